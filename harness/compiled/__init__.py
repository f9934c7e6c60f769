"""A compiled replay of requests without content: it does what `harness.replay.loop` does, in some microseconds each.

Requests that share no prompt differ in their lengths alone, and only a preempted request itself can reuse the blocks
that it left in the cache. Then it does not matter which block a sequence gets. So this replay counts blocks instead of
managing them, in a loop that numba compiles. It has no policy of its own: every step, time and total equals that of
`engine.core` to the bit (`tests/harness/compiled/test_compiled.py`).
"""
