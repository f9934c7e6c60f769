"""Calibration: run small workloads on the engine, fit the cost model, and keep its error on other workloads.

`design` chooses the workloads, `run` measures, fits and validates, `store` keeps the result for each model, engine and
device.
"""
