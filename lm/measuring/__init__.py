"""Bits per character: what is scored, how it is counted, and what is said of the number.

Start with `protocols` (which characters are scored, behind what context) and `bpc` (the sum and the
count). `evaluation` is the command eval.py; `results` and `compressors` make tables.
"""
