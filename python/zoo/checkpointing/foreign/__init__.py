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

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
