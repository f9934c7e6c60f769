"""Latency: measured ratios of a kernel to yardsticks of the same rounds, against a baseline of the same device."""
