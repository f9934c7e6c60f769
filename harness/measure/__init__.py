"""Measurement: the real engine as an executor of the replay."""
