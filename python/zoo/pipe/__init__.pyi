from .grid import PipelineParallelGrid as PipelineParallelGrid
from .lowering import (
    Program as Program,
)
from .lowering import (
    Step as Step,
)
from .lowering import (
    Transfer as Transfer,
)
from .lowering import (
    lower as lower,
)
from .measuring import measure as measure
from .module import PipelineModule as PipelineModule
from .runtime.losses import attach_loss as attach_loss
from .schedules import (
    Computation as Computation,
)
from .schedules import (
    Kind as Kind,
)
from .schedules import (
    ScheduleError as ScheduleError,
)
from .schedules import (
    Table as Table,
)
from .schedules import (
    build as build,
)
from .specs import (
    LayerSpec as LayerSpec,
)
from .specs import (
    TiedLayerSpec as TiedLayerSpec,
)
from .topology import (
    PipeDataParallelTopology as PipeDataParallelTopology,
)
from .topology import (
    PipeModelDataParallelTopology as PipeModelDataParallelTopology,
)
from .topology import (
    ProcessTopology as ProcessTopology,
)
from .tracing.split import split as split
from .validate import check as check
