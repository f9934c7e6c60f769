"""Generated traces: lengths, arrivals and sharing are drawn from built-in tables, and the header names the source.

Each random stream is counter-based and has its own number. So a shorter trace is the beginning of a longer one, and a
window of a trace draws the same as the whole.
"""
