"""Calibration: small workloads run on the engine, the cost model is fitted, and its error on others is kept.

`design` says which workloads run, `run` measures and fits, `validate` tests on held-out workloads, `store` keeps the
result for each model, engine and device.
"""
