"""``python -m benchmarks.moe``."""

from benchmarks.moe.run import main

if __name__ == "__main__":
    main()
