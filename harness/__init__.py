"""The experiment: configuration, sweeps, simulation, measurement, comparison, report."""

__version__ = "0.1.0"
