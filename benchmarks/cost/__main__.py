"""``python -m benchmarks.cost``."""

from benchmarks.cost.published import main

main()
