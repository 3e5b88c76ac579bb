from .plans import AXIS as AXIS
from .plans import Count as Count
from .plans import Cut as Cut
from .plans import Plan as Plan
from .plans import Rule as Rule
from .plans import Take as Take
from .region import Region as Region
from .splitting import split as split
