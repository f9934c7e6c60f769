"""A serving engine that ran elsewhere, by the log and the settings that it left, and its simulation beside it.

`log` has the nouns, `reading` reads a folder into them, `settings` maps the engine's options to our keys.
"""
