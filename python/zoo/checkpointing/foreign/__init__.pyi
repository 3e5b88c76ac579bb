from .dcp import load_dcp as load_dcp
from .dcp_writing import save_dcp as save_dcp
from .deepspeed import load_deepspeed as load_deepspeed
from .deepspeed_universal import write_universal as write_universal
from .formats import (
    FORMATS as FORMATS,
)
from .formats import (
    deepspeed_tags as deepspeed_tags,
)
from .formats import (
    open_foreign as open_foreign,
)
from .formats import (
    recognise as recognise,
)
from .gguf import load_gguf as load_gguf
from .importing import (
    import_checkpoint as import_checkpoint,
)
from .importing import (
    training_meta as training_meta,
)
from .live import live as live
from .pieces import ForeignCheckpoint as ForeignCheckpoint
from .records import plain as plain
from .safetensors_folder import (
    load_safetensors as load_safetensors,
)
from .safetensors_folder import (
    write_safetensors as write_safetensors,
)
from .torch_files import load_torch as load_torch
from .torch_writing import TorchFile as TorchFile
