"""``python -m benchmarks.compile``."""

from benchmarks.compile.step import main

main()
