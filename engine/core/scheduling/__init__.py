"""Scheduling: which requests run in the next step, and what happens when its result is back.

`scheduler` is the loop. `queues` holds the running batch and the waiting requests. `step` fills the step and makes its
plan. `commit` applies the result. Memory is only used through `engine.core.memory.manager`.
"""
