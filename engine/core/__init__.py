"""The policy core: it decides which tokens each step computes and which KV blocks they use.

It is pure Python and NumPy: no torch, no simpy, no clock. The simulator and the real engine run the same code.
So both must give the same counts, and any difference is a bug.

Each file imports only files named before it: errors, options, identity, request, sequence, plan, calendar, policies.
Then come `memory` (block pool, KV cache managers) and `scheduling` (the scheduler). Read first:
`scheduling/scheduler.py`, `memory/paged.py`, `memory/block_pool.py`.
"""
