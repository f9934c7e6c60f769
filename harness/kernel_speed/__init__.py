"""A static model of the kernels' speed: from machine code, without a GPU. A model; nothing here is a measurement.

`sass` decodes machine code, `gpus` holds published figures of GPUs, `replay` runs one warp through the code, `predict`
turns that into seconds, and `block_sizes` makes the table that the roofline reads.
"""
