"""The content of a trace: statistics, distributions, and how much a prefix cache could reuse. Needs no engine."""
