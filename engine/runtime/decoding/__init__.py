"""From logits to tokens: the tokens of a request so far, sampling, beam search, and the token choice of a step.

The draft model of speculative decoding is in `engine/runtime/runner.py`, because it runs a model of its own.
"""
