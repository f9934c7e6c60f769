"""Calibration: run small workloads on the engine, fit the cost model, and keep its error on other workloads.

`run` fits what `harness.measure.passes` measures and validates it, `store` keeps the result for each model, engine and
device.
"""
