"""Checkpoints of other systems, read and written; nothing that a file says is imported or called.

* :func:`load_deepspeed`: DeepSpeed's, of ZeRO stages 0 to 3, with pipeline and expert files, or universal.
* :func:`write_universal`: a universal checkpoint that DeepSpeed loads.
* :func:`load_torch`: a file of ``torch.save``, its tensors still in the file.
* :func:`load_dcp`, :func:`save_dcp`: those of ``torch.distributed.checkpoint``.
* :func:`live`: live state for ``torch.distributed.checkpoint.save`` and ``load``.
* :func:`load_safetensors`, :func:`write_safetensors`: models as Hugging Face keeps them, sharded with an index.
* :func:`load_gguf`: GGUF files.
* :class:`TorchFile`: a file that ``torch.load(weights_only=True)`` reads, written tensor by tensor.
* :func:`open_foreign`, :func:`recognise`: whichever of these a file or folder is.
* :func:`import_checkpoint`: any of them written anew as a checkpoint of zoo, piece by piece.
* :class:`ForeignCheckpoint`: what they are read as, in the words of ``zoo.checkpointing.Checkpoint``.
"""

from zoo.checkpointing.foreign.dcp import load_dcp
from zoo.checkpointing.foreign.dcp_writing import save_dcp
from zoo.checkpointing.foreign.deepspeed import load_deepspeed
from zoo.checkpointing.foreign.deepspeed_universal import write_universal
from zoo.checkpointing.foreign.formats import FORMATS, deepspeed_tags, open_foreign, recognise
from zoo.checkpointing.foreign.gguf import load_gguf
from zoo.checkpointing.foreign.importing import import_checkpoint, training_meta
from zoo.checkpointing.foreign.live import live
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.records import plain
from zoo.checkpointing.foreign.safetensors_folder import load_safetensors, write_safetensors
from zoo.checkpointing.foreign.torch_files import load_torch
from zoo.checkpointing.foreign.torch_writing import TorchFile

__all__ = [
    "FORMATS",
    "ForeignCheckpoint",
    "TorchFile",
    "deepspeed_tags",
    "import_checkpoint",
    "live",
    "load_dcp",
    "load_deepspeed",
    "load_gguf",
    "load_safetensors",
    "load_torch",
    "open_foreign",
    "plain",
    "recognise",
    "save_dcp",
    "training_meta",
    "write_safetensors",
    "write_universal",
]
