"""Compiling the programs, and keeping what was compiled on disk: `python -m kernels.build`."""
