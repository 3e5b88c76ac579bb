"""Where the inputs of checkpointed functions wait for backward: interchangeable, and one may stand in another.

``Partition(comm, Host())`` keeps of each tensor 1/n, in host memory.
"""

from zoo.activation_checkpointing.storages.host import Host
from zoo.activation_checkpointing.storages.nvme import Nvme
from zoo.activation_checkpointing.storages.partition import Partition
from zoo.activation_checkpointing.storages.protocol import Held, Keep, Storage
from zoo.activation_checkpointing.storages.slots import Contiguous, Ring

__all__ = ["Contiguous", "Held", "Host", "Keep", "Nvme", "Partition", "Ring", "Storage"]
