"""The shape of the small random models that the engine's tests run."""

SHAPE = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "head_dim": 16,
    "intermediate": 96,
    "vocab": 512,
    "max_position": 256,
    "initializer_range": 0.2,
}
