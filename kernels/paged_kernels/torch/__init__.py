"""The torch backend, for any device. Each file holds the metadata of an operation and the call that runs it.

`import torch` still imports PyTorch: all imports are absolute.
"""
