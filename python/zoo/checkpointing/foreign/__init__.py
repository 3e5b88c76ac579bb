"""Checkpoints of other systems, read and written; nothing that a file says is imported or called.

* :func:`load_deepspeed`: DeepSpeed's, of ZeRO stages 0 to 3, with pipeline and expert files, or universal.
* :func:`write_universal`: a universal checkpoint that DeepSpeed loads.
* :func:`load_torch`: a file of ``torch.save``, its tensors still in the file.
* :class:`ForeignCheckpoint`: what they are read as, in the words of ``zoo.checkpointing.Checkpoint``.
"""

from zoo.checkpointing.foreign.deepspeed import load_deepspeed
from zoo.checkpointing.foreign.deepspeed_universal import write_universal
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.records import plain
from zoo.checkpointing.foreign.torch_files import load_torch

__all__ = ["ForeignCheckpoint", "load_deepspeed", "load_torch", "plain", "write_universal"]
