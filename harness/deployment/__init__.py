"""A deployment: a serving engine that ran, by the log and the settings that it left.

`log` has the nouns, `reading` reads a folder into them, `settings` maps the engine's options to our keys.
"""
