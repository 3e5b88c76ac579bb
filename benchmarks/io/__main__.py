"""``python -m benchmarks.io``."""

from benchmarks.io.run import main

if __name__ == "__main__":
    main()
