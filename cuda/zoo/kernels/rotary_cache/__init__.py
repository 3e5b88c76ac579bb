"""Rotary positions of q and k, and the cache that k and v are written into. The maths is in ``rotary_cache.h``."""

from zoo.kernels.rotary_cache.ops import rotary_cache_

__all__ = ["rotary_cache_"]
