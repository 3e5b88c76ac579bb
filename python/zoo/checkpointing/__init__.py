"""Training checkpoints: logical tensors on disk, written atomically, read back under any placement.

* :func:`save`: all ranks write their slices; either the whole checkpoint is there afterwards, or none of it counts.
* :func:`load`: opens a checkpoint after checking it; :class:`Checkpoint` reads any run of elements of any tensor.
* :func:`latest_tag`: which checkpoint a directory's ``latest`` names.
"""

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.names import StateSlice, latest_tag
from zoo.checkpointing.reading import Checkpoint, load
from zoo.checkpointing.writing import save

__all__ = ["Checkpoint", "CheckpointError", "StateSlice", "latest_tag", "load", "save"]
