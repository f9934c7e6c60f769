"""Request traces: read from public formats or generated, and changed by pure functions.

This package uses no engine, no clock and no torch. Each file imports only files named before it: `errors`, `trace`,
`randomness`, `arrivals`; `formats` (one file per family); `tokens`, `reshape`; `analysis`; `synth` (generators);
`catalogue`; `reading`. Start with `trace.py` (the data) and `reading.py` (`read_trace`).
"""
