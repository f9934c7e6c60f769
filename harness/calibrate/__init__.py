"""Calibration: run small workloads on the engine, fit the cost model, and keep its error on other workloads.

`design` chooses the workloads, `run` measures and fits, `validate` measures held-out workloads, `store` keeps the
result for each model, engine and device.
"""
