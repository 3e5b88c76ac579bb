from .blockwise import Blockwise as Blockwise
from .codec import Codec as Codec
from .errors import (
    Error as Error,
)
from .errors import (
    Owed as Owed,
)
from .errors import (
    fold as fold,
)
from .fp8 import Fp8 as Fp8
from .gathered import Gathered as Gathered
from .hierarchy import Hierarchical as Hierarchical
from .hook import (
    HookState as HookState,
)
from .hook import (
    hook as hook,
)
from .onebit import OneBit as OneBit
from .power_sgd import PowerSGD as PowerSGD
from .random_k import RandomK as RandomK
from .reducer import (
    Compressor as Compressor,
)
from .reducer import (
    Reducer as Reducer,
)
from .top_k import TopK as TopK
from .two_step import (
    ReduceLeg as ReduceLeg,
)
from .two_step import (
    TwoStep as TwoStep,
)
