"""The regression gate, in three layers named for what they are.

* resource: what the compiler makes of every kernel, without a GPU. It says nothing about time.
* latency: kernels on a GPU, as ratios to yardsticks timed in the same rounds.
* policy: block manager, scheduler and CPU attention, as ratios to loops timed in the same process.
"""

LAYERS = ("resource", "latency", "policy")
