"""Ahead-of-time compilation of all device programs, for GPUs that are not there: `python -m trace_kernels.aot`.

What every entry of the tile tables needs of a GPU (registers, shared memory, matrix instructions) is read from the
compiled binary and held against what the GPU has.
"""
