"""Time and memory of the backends: `python -m kernels.bench`, and `.targets` and `.tiles` of it."""
