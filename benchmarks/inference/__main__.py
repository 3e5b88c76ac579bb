"""``python -m benchmarks.inference``: see ``decode.py``."""

from benchmarks.inference.decode import main

main()
