"""The operations on a GPU: every one against its reference, then against torch; ``python -m benchmarks.gpu``."""
