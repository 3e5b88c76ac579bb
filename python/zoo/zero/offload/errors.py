"""What goes wrong with offloaded state."""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Offloaded state cannot be placed, read or written; the message says where, and what to do."""
