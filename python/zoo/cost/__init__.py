"""What a computation, a message and a step cost: bytes, floating-point operations and seconds, without torch.

* ``collectives``: bytes that a rank sends.
"""

from zoo.cost.collectives import wire_bytes

__all__ = ["wire_bytes"]
