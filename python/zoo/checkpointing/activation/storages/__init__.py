"""Where the inputs of checkpointed functions wait for backward: interchangeable, and one may stand in another.

``Partition(comm, Host())`` keeps of each tensor 1/n, in host memory.
"""

from zoo.checkpointing.activation.storages.host import Host
from zoo.checkpointing.activation.storages.nvme import Nvme
from zoo.checkpointing.activation.storages.partition import Partition
from zoo.checkpointing.activation.storages.protocol import Held, Keep, Storage
from zoo.checkpointing.activation.storages.slots import Contiguous, Ring

__all__ = ["Contiguous", "Held", "Host", "Keep", "Nvme", "Partition", "Ring", "Storage"]
