"""The measured side: the real engine as an executor of the replay, and the measurements that calibrate the cost model.

`calibration`, `plan` and `spec` import no torch, so that planning a sweep and reading a calibration stay quick.
"""
