"""The replay of requests without content, compiled: what `harness.replay.loop` does to them, at some microseconds each.

Requests whose prompts nobody shares can be told apart by their lengths alone, and what a preemption leaves in the
cache nobody but its owner wants back. Which block a sequence gets then changes no count, so this replay keeps numbers
of blocks instead of blocks, in a loop that numba compiles. It decides nothing of its own: every step, time and total is
the policy core's, to the bit (`tests/harness/compiled/test_compiled.py`).
"""
