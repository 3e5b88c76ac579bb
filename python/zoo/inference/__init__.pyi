from .cache import Cache as Cache
from .cache import forecast as forecast
from .generation import generate as generate
from .sampling import Sampling as Sampling
from .streaming import Streamed as Streamed
from .streaming import layer_bytes as layer_bytes
from .streaming import stream as stream
