"""Banded attention for CPUs as TIR programs, and how a call is cut into tasks for them.

Start with `forward`, then `backward`; both are written in the words of `tiles`.
"""
