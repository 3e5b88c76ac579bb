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
from .names import (
    StateSlice as StateSlice,
)
from .names import (
    latest_tag as latest_tag,
)
from .pruning import prune as prune
from .reading import (
    Checkpoint as Checkpoint,
)
from .reading import (
    load as load,
)
from .tensors import TensorFile as TensorFile
from .writing import save as save
