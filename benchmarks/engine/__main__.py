"""``python -m benchmarks.engine``: see ``overhead.py``."""

from benchmarks.engine.overhead import main

main()
