"""Capacity: the highest rate, the smallest pool or the best block size that meets an SLO.

`trials` has the SLO and simulates candidates, `search` finds the answer, `page` writes it.
"""
