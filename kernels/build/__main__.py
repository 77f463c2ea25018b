"""The command `python -m kernels.build`."""

from kernels.build.cpu_compiler import main

if __name__ == "__main__":
    main()
