"""One file a format: what its rows mean, which of its quirks are handled by rule, and what is refused.

A line format offers a `RowReader`; a format whose file is one document, or several files, offers a `RowSource`.
`traces.detect` lists them all.
"""
