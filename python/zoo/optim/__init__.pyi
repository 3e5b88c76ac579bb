from .adagrad import Adagrad as Adagrad
from .adam import (
    Adam as Adam,
)
from .adam import (
    AdamW as AdamW,
)
from .base import ElementwiseOptimizer as ElementwiseOptimizer
from .lamb import Lamb as Lamb
from .lion import Lion as Lion
from .local_steps import (
    DiLoCo as DiLoCo,
)
from .local_steps import (
    LocalSGD as LocalSGD,
)
from .muon import Muon as Muon
from .onebit_adam import OnebitAdam as OnebitAdam
from .onebit_lamb import OnebitLamb as OnebitLamb
from .sgd import SGD as SGD
from .zero_one_adam import ZeroOneAdam as ZeroOneAdam
