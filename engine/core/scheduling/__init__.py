"""Scheduling: which requests run in the next step, and what happens when its result is back.

`scheduler` is the loop. `batch` holds the running and the waiting requests, fills the step and makes its plan.
`commit` applies the result. Memory is only used through `engine.core.memory.manager`.
"""
