"""The command `python -m kernels.bench`."""

from kernels.bench.table import main

if __name__ == "__main__":
    main()
