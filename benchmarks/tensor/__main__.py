"""``python -m benchmarks.tensor``: see ``step.py``."""

from benchmarks.tensor.step import main

main()
