"""What is decided (`engine.core`, no torch) and what is done (`engine.runtime`, torch)."""
