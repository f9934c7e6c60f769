"""What is in a trace: statistics, distributions, and how much a prefix cache could reuse. No engine is needed."""
