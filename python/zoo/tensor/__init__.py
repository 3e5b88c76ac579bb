"""Tensor parallelism: matrices cut along an axis of the mesh, by a plan that is data.

* :class:`Rule`, :class:`Count`, :class:`Take`, :class:`Plan`: how the parameters of a model lie over the ranks.
* :func:`split`: leaves on every rank its part of a model.
* :func:`plan_of`: the plan of a model of transformers: what its family says, or what the model ships.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
