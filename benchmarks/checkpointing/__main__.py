"""``python -m benchmarks.checkpointing``."""

from benchmarks.checkpointing.run import main

if __name__ == "__main__":
    main()
