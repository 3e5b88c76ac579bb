from .declared import (
    declare_part as declare_part,
)
from .declared import (
    parts_of as parts_of,
)
from .handed import (
    Handed as Handed,
)
from .handed import (
    Unused as Unused,
)
from .hooks import (
    BACKWARD as BACKWARD,
)
from .hooks import (
    FORWARD as FORWARD,
)
from .hooks import (
    checking_hook as checking_hook,
)
from .hooks import (
    has_user_hooks as has_user_hooks,
)
from .hooks import (
    is_own_hook as is_own_hook,
)
from .hooks import (
    is_watched as is_watched,
)
from .hooks import (
    own_hook as own_hook,
)
from .hooks import (
    without_own_hooks as without_own_hooks,
)
from .ordering import in_order as in_order
from .protocols import (
    AfterUpdate as AfterUpdate,
)
from .protocols import (
    BeforeUpdate as BeforeUpdate,
)
from .protocols import (
    Closes as Closes,
)
from .protocols import (
    CountsBatch as CountsBatch,
)
from .protocols import (
    Environment as Environment,
)
from .protocols import (
    GivesMetrics as GivesMetrics,
)
from .protocols import (
    HasState as HasState,
)
from .protocols import (
    MakesLoader as MakesLoader,
)
from .protocols import (
    OnBatch as OnBatch,
)
from .protocols import (
    OnLoss as OnLoss,
)
from .protocols import (
    Prepares as Prepares,
)
from .protocols import (
    Runner as Runner,
)
from .protocols import (
    ScalesLr as ScalesLr,
)
from .protocols import (
    Sink as Sink,
)
from .record import Clock as Clock
from .record import StepRecord as StepRecord
from .shuffling import (
    drawn as drawn,
)
from .shuffling import (
    mixed as mixed,
)
from .shuffling import (
    shuffled as shuffled,
)
from .shuffling import (
    uniform as uniform,
)
