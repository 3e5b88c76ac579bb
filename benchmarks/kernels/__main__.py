"""``python -m benchmarks.kernels``."""

from benchmarks.kernels.run import main

if __name__ == "__main__":
    main()
