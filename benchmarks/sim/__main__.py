"""``python -m benchmarks.sim``."""

from benchmarks.sim.clock import main

main()
