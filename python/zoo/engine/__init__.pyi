from .arguments import add_config_arguments as add_config_arguments
from .engine import Engine as Engine
from .entry import initialize as initialize
from .loader import (
    RepeatingLoader as RepeatingLoader,
)
from .loader import (
    ShardedLoader as ShardedLoader,
)
from .loader import (
    shuffled as shuffled,
)
