"""The regression gate: it compares kernels and policy with accepted baselines. It has three layers.

* resource: what the compiler makes of every kernel, without a GPU. It says nothing about time.
* latency: kernels on a GPU, as ratios to yardsticks timed in the same rounds.
* policy: block manager, scheduler and CPU attention, as ratios to loops timed in the same process.

Each layer is one module with `case_names`, `measure`, `judge` and `unfit`.
"""

LAYERS = ("resource", "latency", "policy")
