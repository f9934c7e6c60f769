"""A compiled replay of requests of one sequence: it does what `harness.replay.loop` does, in some microseconds each.

It does not matter which block a sequence gets. So this replay counts blocks instead of managing them, but for those
that several requests may share, in a loop that numba compiles. It has no policy of its own: every step, time and total
equals that of `engine.core` to the bit (`tests/harness/compiled/test_compiled.py`).
"""
