from .context import Init as Init
from .keeping import ParamSwapper as ParamSwapper
from .report import (
    InitReport as InitReport,
)
from .report import (
    Touch as Touch,
)
