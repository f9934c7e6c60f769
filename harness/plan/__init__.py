"""Planning: overrides become points, every point is checked and named before any runs."""
