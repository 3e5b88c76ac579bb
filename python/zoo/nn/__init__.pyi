from .linear import (
    LinearSwap as LinearSwap,
)
from .linear import (
    MemoryEfficientLinear as MemoryEfficientLinear,
)
from .linear import (
    memory_efficient_linear as memory_efficient_linear,
)
from .packed import PackedLinear as PackedLinear
from .packed import pack_linears as pack_linears
from .sequence import (
    SequenceParallelAttention as SequenceParallelAttention,
)
from .sequence import (
    dot_product_attention as dot_product_attention,
)
from .sharded import whole as whole
from .tiling import TiledLinear as TiledLinear
from .transformer import TransformerLayer as TransformerLayer
from .transformer import TransformerLayerConfig as TransformerLayerConfig
from .unit_list import UnitList as UnitList
