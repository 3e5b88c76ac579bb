"""The FLOPs profiler: what each module of a model computes, moves and takes, forward and backward.

* :class:`FlopsProfiler`: from start to stop, in a training loop. :func:`get_model_profile`: of one call.
* :class:`Profile`: what came of it: :class:`ModuleProfile`, :class:`Operator`, :class:`Utilisation`.
* :func:`measure_layers`: time or memory of each of a chain of layers.
* :func:`costing`: what a simulated rank computes takes as long as on a device.
* :func:`flame_page`, :func:`folded_stacks`: as a picture.
* :func:`register_formula`: count an operator of one's own, from its :class:`Call`.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
