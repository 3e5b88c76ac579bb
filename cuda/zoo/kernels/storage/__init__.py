"""Memory of one storage lent to another, so that tensors keep their storage while its memory comes and goes."""

from zoo.kernels.storage.ops import lend

__all__ = ["lend"]
