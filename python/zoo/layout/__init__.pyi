from .boxes import Box as Box
from .declared import (
    Split as Split,
)
from .declared import (
    axes_of as axes_of,
)
from .declared import (
    declare_as as declare_as,
)
from .declared import (
    declare_axis as declare_axis,
)
from .declared import (
    declare_first as declare_first,
)
from .declared import (
    declare_partial as declare_partial,
)
from .declared import (
    declare_split as declare_split,
)
from .declared import (
    declare_tied as declare_tied,
)
from .declared import (
    declare_unit as declare_unit,
)
from .declared import (
    enter_mesh as enter_mesh,
)
from .declared import (
    is_unit as is_unit,
)
from .declared import (
    logical_name as logical_name,
)
from .declared import (
    split_of as split_of,
)
from .declared import (
    withdraw_unit as withdraw_unit,
)
from .flat import (
    FlatLayout as FlatLayout,
)
from .flat import (
    LogicalTensor as LogicalTensor,
)
from .flat import (
    Piece as Piece,
)
from .flat import (
    Slice as Slice,
)
from .laid import (
    Boxes as Boxes,
)
from .laid import (
    Laid as Laid,
)
from .laid import (
    Part as Part,
)
from .laid import (
    boxes_of as boxes_of,
)
from .mesh import (
    Mesh as Mesh,
)
from .mesh import (
    Sharding as Sharding,
)
from .reshard import (
    Copy as Copy,
)
from .reshard import (
    Held as Held,
)
from .reshard import (
    Intervals as Intervals,
)
from .reshard import (
    Placed as Placed,
)
from .reshard import (
    reshard as reshard,
)
from .reshard import (
    runs_of as runs_of,
)
from .state import (
    Lent as Lent,
)
from .state import (
    StateSlice as StateSlice,
)
from .state import (
    Stored as Stored,
)
from .tiling import tiles as tiles
