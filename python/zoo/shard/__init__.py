"""A module whose parameters are split over ranks: gathered for a unit's forward and backward, gradients reduced.

It knows no optimizer. :class:`ShardedModel` runs a module so, :mod:`zoo.zero` trains with it, and :class:`Init` splits
a model while it is built.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
