from .one_cycle import OneCycle as OneCycle
from .range_test import LRRangeTest as LRRangeTest
from .schedule import (
    HasParamGroups as HasParamGroups,
)
from .schedule import (
    Schedule as Schedule,
)
from .warmup import WarmupLR as WarmupLR
from .warmup_cosine import WarmupCosineLR as WarmupCosineLR
from .warmup_decay import WarmupDecayLR as WarmupDecayLR
