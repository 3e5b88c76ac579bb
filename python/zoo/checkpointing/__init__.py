"""Training checkpoints: logical tensors on disk, written atomically, read back under any placement.

* :func:`save`: all ranks write their slices; either the whole checkpoint is there afterwards, or none of it counts.
* :class:`BackgroundSaver`: the same while training goes on.
* :func:`load`: opens a checkpoint; :class:`Checkpoint` reads any run of elements of any tensor, and verifies it.
* :func:`latest_tag`: which checkpoint a directory's ``latest`` names.
* :func:`prune`: remove all but the newest.
* :class:`TensorFile`: one safetensors file, tensor by tensor, whole or not at all.
* :func:`clone_tensors_for_torch_save`: copies of views that are no larger in a file than they are.
* :func:`together`: run something on every rank; if it fails on one, it fails on all, by name.
"""

from zoo.checkpointing.background import BackgroundSaver
from zoo.checkpointing.cloning import clone_tensors_for_torch_save
from zoo.checkpointing.errors import CheckpointError, DamageError, MissingStateError, alike, together
from zoo.checkpointing.names import StateSlice, latest_tag
from zoo.checkpointing.pruning import prune
from zoo.checkpointing.reading import Checkpoint, load
from zoo.checkpointing.tensors import TensorFile
from zoo.checkpointing.writing import save

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointError",
    "DamageError",
    "MissingStateError",
    "StateSlice",
    "TensorFile",
    "alike",
    "clone_tensors_for_torch_save",
    "latest_tag",
    "load",
    "prune",
    "save",
    "together",
]
