from .config import (
    OffloadOptimizerConfig as OffloadOptimizerConfig,
)
from .config import (
    OffloadParamConfig as OffloadParamConfig,
)
from .scratch import (
    NvmeFile as NvmeFile,
)
from .scratch import (
    Scratch as Scratch,
)
from .scratch import (
    files_hold_nothing as files_hold_nothing,
)
from .tiers import OffloadError as OffloadError
from .tiers import (
    Tier as Tier,
)
from .tiers import (
    plan_tiers as plan_tiers,
)
