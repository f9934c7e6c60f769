"""The store: one folder for each point, committed whole or not at all.

Everything else in a store is derived from the point folders and can be rebuilt.
"""
