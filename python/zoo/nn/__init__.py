"""Layers that any model may use, with the ZeRO optimizers or without.

* :class:`TiledLinear`: a linear layer as a grid of tiles that are gathered one at a time.
* :func:`memory_efficient_linear`: linear layers that keep no cast copy of their weight under autocast.
* :class:`SequenceParallelAttention`: any attention over sequences that are split over ranks.
* :class:`PackedLinear`, :func:`pack_linears`: linear layers whose weight stays in codes of 8 or 4 bits.
* :class:`TransformerLayer`: a layer of BERT, or with pre-norm, as one autograd function that keeps little for backward.
* :class:`UnitList`: a list of modules that are gathered one by one.
* :mod:`.blocks`: the repeated blocks of a model, and standing between them and who calls them.
* :func:`whole`: sharded parameters, whole for a while.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
