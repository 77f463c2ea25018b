"""The tvm backend: compiled programs as functions with gradients, on CPUs and CUDA devices."""
