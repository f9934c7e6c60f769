"""Policy: block manager, scheduler and CPU attention, as ratios to loops timed in the same process."""
