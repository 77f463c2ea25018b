"""Bytes: corpora, splits, and the order in which they are read."""
