"""Memory of one storage lent to another, so that tensors keep their storage while its memory comes and goes; and huge
pages for new memory."""

from zoo.kernels.storage.ops import in_huge_pages, lend

__all__ = ["in_huge_pages", "lend"]
