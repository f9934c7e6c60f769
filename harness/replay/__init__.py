"""The replay: one simpy model for the simulated and the measured side.

`loop` sends requests to the scheduler and runs its plans. An executor says how long a plan takes. A recorder keeps what
happened. Nothing here imports torch.
"""
