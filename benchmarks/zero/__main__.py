"""``python -m benchmarks.zero``."""

from benchmarks.zero.run import main

if __name__ == "__main__":
    main()
