"""``python -m benchmarks.activation_checkpointing``."""

from benchmarks.activation_checkpointing.run import main

if __name__ == "__main__":
    main()
