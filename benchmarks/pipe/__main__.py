"""``python -m benchmarks.pipe``."""

from benchmarks.pipe.run import main

if __name__ == "__main__":
    main()
