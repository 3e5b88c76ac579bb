"""How many bytes torch's allocator of the CPU has given to a thread, and the most of them at the same time."""

from zoo.kernels.allocated.ops import Allocated

__all__ = ["Allocated"]
