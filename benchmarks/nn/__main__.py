"""``python -m benchmarks.nn``: see ``layer.py``."""

from benchmarks.nn.layer import main

main()
