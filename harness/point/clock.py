"""What a measured second is."""

from harness.config.schema import Clock, RunConfig
from harness.environment import engine_device


def clock_of(config: RunConfig) -> Clock:
    """`auto` is CPU-seconds of the engine's thread where one CPU thread does all the work, else wall time."""
    if config.replay.clock is not Clock.auto:
        return config.replay.clock
    single = engine_device(config.engine.device) == "cpu" and config.engine.threads == 1
    return Clock.cpu if single else Clock.wall
