"""Checkpoints of other systems, read and written; nothing that a file says is imported or called.

* :func:`load_deepspeed`: DeepSpeed's, of ZeRO stages 0 to 3, with pipeline and expert files, or universal.
* :func:`write_universal`: a universal checkpoint that DeepSpeed loads.
* :func:`load_torch`: a file of ``torch.save``, its tensors still in the file.
* :class:`TorchFile`: a file that ``torch.load(weights_only=True)`` reads, written tensor by tensor.
* :class:`ForeignCheckpoint`: what they are read as, in the words of ``zoo.checkpointing.Checkpoint``.
"""

from zoo.checkpointing.foreign.deepspeed import load_deepspeed
from zoo.checkpointing.foreign.deepspeed_universal import write_universal
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.records import plain
from zoo.checkpointing.foreign.torch_files import load_torch
from zoo.checkpointing.foreign.torch_writing import TorchFile

__all__ = ["ForeignCheckpoint", "TorchFile", "load_deepspeed", "load_torch", "plain", "write_universal"]
