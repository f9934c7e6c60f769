"""What arrives: request traces, read from public formats or generated, reshaped by pure functions.

Nothing here knows of an engine, a clock or torch. Formats and their traps are tested in `tests/traces`.
"""
