"""How much a configuration holds: the highest rate, the smallest pool or the best block size that meets an SLO."""
