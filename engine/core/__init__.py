"""The policy: block pool, prefix cache, KV cache managers, sequences, scheduler, step plan.

Pure Python and NumPy. Nothing here imports torch or simpy or reads a clock, because the simulator and the
real engine must run the very same code: a difference in any count between them is then a bug, never an error.
"""
