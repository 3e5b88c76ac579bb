"""Optimizers on the native kernels: torch's interface, one pass over memory.

    p ← δ·p - η·D(S(s, g))

``Adam, AdamW, SGD, Lion, Adagrad`` are this with different S and D (``zoo/kernels/update/update.h``); ``Lamb`` scales η
for each tensor, ``Muon`` makes D orthogonal.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

try:
    import zoo.kernels  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "zoo.kernels":
        raise
    raise ImportError("zoo.optim stands on the distribution zoo-kernels, which is not installed.") from error

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
