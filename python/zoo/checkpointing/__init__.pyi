from .background import BackgroundSaver as BackgroundSaver
from .cloning import clone_tensors_for_torch_save as clone_tensors_for_torch_save
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    DamageError as DamageError,
)
from .errors import (
    MissingStateError as MissingStateError,
)
from .errors import (
    alike as alike,
)
from .errors import (
    together as together,
)
from .format.names import (
    StateSlice as StateSlice,
)
from .format.names import (
    has_checkpoints as has_checkpoints,
)
from .format.names import (
    latest_tag as latest_tag,
)
from .format.tensors import TensorFile as TensorFile
from .pruning import prune as prune
from .reading import (
    Checkpoint as Checkpoint,
)
from .reading import (
    load as load,
)
from .writing import save as save
