"""Training checkpoints: logical tensors on disk, written atomically, read back under any placement.

* :func:`save`: all ranks write their slices; either the whole checkpoint is there afterwards, or none of it counts.
* :class:`BackgroundSaver`: the same while training goes on.
* :func:`load`: opens a checkpoint; :class:`Checkpoint` reads any run of elements of any tensor, and verifies it.
* :func:`latest_tag`: which checkpoint a directory's ``latest`` names. :func:`has_checkpoints`: whether there are any.
* :func:`prune`: remove all but the newest.
* :class:`TensorFile`: one safetensors file, tensor by tensor, whole or not at all.
* :func:`clone_tensors_for_torch_save`: copies of views that are no larger in a file than they are.
* :func:`together`: run something on every rank; if it fails on one, it fails on all, by name.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
