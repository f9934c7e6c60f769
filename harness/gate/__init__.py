"""The regression gate. It compares kernels and policy with accepted baselines, in four layers.

* resource: the compiler's output for every kernel, without a GPU. It says nothing about time.
* latency: kernels on a GPU, as ratios to yardsticks timed in the same rounds.
* policy: block manager and scheduler, as ratios to loops timed in the same process.
* cpu: the engine's attention on a CPU, as ratios to the accepted version of the same code in the same process.

Each layer is one module with `case_names`, `measure`, `judge` and `unfit`.
"""

LAYERS = ("resource", "latency", "policy", "cpu")
