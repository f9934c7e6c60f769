"""What holds for all tests: no test of Hypothesis fails because the machine is busy."""

from contextlib import suppress

with suppress(ImportError):  # a machine that only runs the GPU tests may have no Hypothesis
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any-load", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    )
    settings.load_profile("any-load")
