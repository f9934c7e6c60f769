"""The serving engine: `engine.core` decides what each step does (no torch), `engine.runtime` runs it (torch)."""
