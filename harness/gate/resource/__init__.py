"""Resources: what the compiler makes of each kernel configuration. No GPU, and no claim about time."""
