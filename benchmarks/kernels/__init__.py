"""CPU kernels against a C loop over the same bytes and against their peers; ``python -m benchmarks.kernels``."""
