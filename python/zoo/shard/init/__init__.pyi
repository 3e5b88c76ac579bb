from .context import Init as Init
from .session import InitReport as InitReport
from .session import Touch as Touch
from .sharing import ParamSwapper as ParamSwapper
