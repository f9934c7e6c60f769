"""The replay: one simpy model for simulation and measurement.

`loop` sends requests to the scheduler and runs its step plans. An executor gives the duration of a step. A recorder
keeps steps and requests. Nothing here imports torch.
"""
