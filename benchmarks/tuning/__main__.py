"""``python -m benchmarks.tuning``."""

from benchmarks.tuning.grid import main

main()
