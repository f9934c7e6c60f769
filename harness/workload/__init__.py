"""The workload of a point: its requests, its pool, its policies and how it is played.

Both sides of a point, the simulated and the measured one, start from here. Nothing here imports torch.
"""
