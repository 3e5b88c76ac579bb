"""1-bit compression with error feedback: y + e' = x + e, of which y travels in a bit an element and a scale a group.

In two operations, compressing and what is owed then, because a step may be skipped between them; the next compressing
can do the second of them on its way.

The maths and the papers are in ``onebit.h``.
"""

from zoo.kernels.onebit.ops import GROUP_SIZE, compress_, compress_mean_, decompress_, owed_, wire_bytes

__all__ = ["GROUP_SIZE", "compress_", "compress_mean_", "decompress_", "owed_", "wire_bytes"]
