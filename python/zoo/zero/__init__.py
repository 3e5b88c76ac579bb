"""ZeRO: training state split over the data-parallel ranks, in the PyTorch way of training.

``Stage1Optimizer``, ``Stage2Optimizer`` and ``Stage3Optimizer`` are one implementation (:class:`ZeroOptimizer`) with
three placements; stage 0, plain data parallelism, is the fourth.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
