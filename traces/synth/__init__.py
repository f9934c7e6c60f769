"""Generated traces: lengths, arrivals and sharing drawn from embedded tables, each saying what it is calibrated on.

Every stream of random numbers is counter-based and of its own, so that a shorter trace is the beginning of a longer
one and a window of a trace is drawn like the whole.
"""
