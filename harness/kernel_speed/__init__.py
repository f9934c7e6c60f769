"""A static model of the kernels' speed: from machine code, without a GPU. A model; nothing here is a measurement.

`gpus` holds published figures of GPUs, `predict` decodes machine code, runs one warp through it and turns that into
seconds, and `block_sizes` makes the table that the roofline reads.
"""
