"""One file per family of formats: what their rows mean, which faults a rule repairs, and what is refused.

To add a format, start with `rows.py`. A format with one record per line is a `LineSource`. A format that is
one document or several files is a `RowSource`. Then add it to the lists at the top of `traces/reading.py`.
`files.py` reads bytes, `parsing.py` reads CSV, JSON and numbers, `segments.py` turns block ids and token ids into
segments.
"""
