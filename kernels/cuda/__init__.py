"""Banded attention for CUDA as TIR programs; `source` makes CUDA C++ of them, without a GPU.

Start with `forward`; `layout` says which thread and which part of shared memory holds what.
"""
