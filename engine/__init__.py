"""The serving engine: `engine.core` decides what each step does (no torch), `engine.runtime` runs it (torch).

Importing it sets the environment variable `OMP_WAIT_POLICY` to `PASSIVE`, unless it is set: torch's threads then sleep
between two operators. By default they spin, which took 1.5 to 4 times the CPU-seconds with two threads, and no less
time. OpenMP reads the variable when torch is imported, so a program that imports torch first must set it itself.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
