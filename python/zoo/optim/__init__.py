"""Optimizers on the native kernels: torch's interface, one pass over memory.

    p ← δ·p - η·D(S(s, g))

``Adam, AdamW, SGD, Lion, Adagrad`` are this with different S and D (``zoo/kernels/update/update.h``); ``Lamb`` scales η
for each tensor, ``Muon`` makes D orthogonal.
"""

try:
    import zoo.kernels  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "zoo.kernels":
        raise
    raise ImportError("zoo.optim stands on the distribution zoo-kernels, which is not installed.") from error

from zoo.optim.adagrad import Adagrad
from zoo.optim.adam import Adam, AdamW
from zoo.optim.base import ElementwiseOptimizer
from zoo.optim.lamb import Lamb
from zoo.optim.lion import Lion
from zoo.optim.local_steps import DiLoCo, LocalSGD
from zoo.optim.muon import Muon
from zoo.optim.onebit_adam import OnebitAdam
from zoo.optim.onebit_lamb import OnebitLamb
from zoo.optim.sgd import SGD
from zoo.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DiLoCo",
    "ElementwiseOptimizer",
    "Lamb",
    "Lion",
    "LocalSGD",
    "Muon",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
]
