"""The ``zero_optimization`` section of a configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from zoo.config import Section
from zoo.config.fates import Fate
from zoo.config.section import OWN, Documented
from zoo.shard.documents import FATES
from zoo.shard.offload.config import OffloadOptimizerConfig, OffloadParamConfig


class ZeroConfig(Section):
    """Options of the ZeRO optimizers. Sizes are numbers of elements, as in ds_config files."""

    carried_by: ClassVar[str] = "zoo.zero"
    fates: ClassVar[Mapping[str, Fate]] = FATES

    stage: int = Field(default=0, ge=0, le=3)
    """What is split over the data-parallel ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""

    reduce_bucket_size: Annotated[int | None, Documented(500_000_000)] = Field(default=None, ge=0)
    """Units, such as layers, are put together into buckets of at most this many elements; a bucket is one message. The
    smaller of this and allgather_bucket_size counts. More means fewer messages and more memory. Default: 2**20. A unit
    is never split; 0: each unit has a bucket of its own."""

    allgather_bucket_size: Annotated[int | None, Documented(500_000_000)] = Field(default=None, ge=0)
    """See reduce_bucket_size: parameters and gradients share their buckets."""

    overlap_comm: Annotated[bool, Documented(None)] = True
    """Reduce gradients during backward. Otherwise all of them at its end."""

    prefetch_bucket_size: Annotated[int | None, Documented(50_000_000)] = Field(
        default=None, ge=0, alias="stage3_prefetch_bucket_size"
    )
    """Stage 3: how many elements are gathered ahead, while the layer before them computes. More hides more of the
    communication and takes more memory; 0: nothing is gathered ahead. Default: one layer, as far as its parameters are
    split: the largest bucket of a unit that contains no others; two where a gather has two stages (from NVMe, or
    between nodes first)."""

    max_live_parameters: Annotated[int | None, Documented(1_000_000_000)] = Field(
        default=None, ge=0, alias="stage3_max_live_parameters"
    )
    """Stage 3: gathered parameters that may stay after forward because backward needs them soon, the latest units
    first. Default: twice the largest bucket of a unit that contains no others, and once that of one that does, which
    backward needs first; at least 2**22 elements. More means less communication and more memory."""

    divergent: Annotated[bool, OWN] = False
    """Stage 3: ranks may run different units, or a unit a different number of times. They vote on each gather, nothing
    is gathered ahead, and gradients are reduced in step(), which every rank calls."""

    param_persistence_threshold: int = Field(default=100_000, ge=0, alias="stage3_param_persistence_threshold")
    """Stage 3: parameters of at most this many elements stay whole on every rank."""

    model_persistence_threshold: int = Field(default=sys.maxsize, ge=0, alias="stage3_model_persistence_threshold")
    """Stage 3: at most this many elements stay whole because of param_persistence_threshold."""

    gather_16bit_weights_on_model_save: bool = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    """Stage 3: the engine's ``save_16bit_model`` gathers the parameters and saves them. Otherwise it saves nothing at
    stage 3; at the other stages parameters are whole, and it always saves."""

    load_from_fp32_weights: bool = True
    """``load_state`` (the engine's ``load_checkpoint``) gives fp32 masters the fp32 values of the checkpoint. False:
    those values rounded to the dtype that the parameters compute in, as if it had the 16-bit weights alone."""

    override_module_apply: bool = True
    """Inside ``zoo.zero.Init``, ``Module.apply`` makes a module's parameters whole at once for its function. Otherwise
    each operation of the function makes whole what it touches."""

    sub_group_size: Annotated[int, Documented(1_000_000_000)] = Field(default=2**22, ge=0)
    """The update runs in pieces of about this many elements where masters are kept outside of the optimizer, or states
    on NVMe: only one piece's gradient exists in fp32 at a time, and the states of three pieces in memory (of seven with
    update_in_backward). 0: a piece for each bucket and parameter group."""

    update_in_backward: Annotated[bool, OWN] = False
    """A shard is updated as soon as its gradient is reduced, and the traffic of its states overlaps with backward. Each
    backward outside of no_sync() is a step then, which step() has to follow; learning rates count that are set before
    it. Not with clipping, loss scaling or optimizers of whole tensors."""

    buffers: Annotated[Literal["own", "broadcast", "average"], OWN] = "own"
    """The model's buffers (BatchNorm's running statistics): "own": each rank's forwards keep theirs. "broadcast": after
    each step() all ranks have those of rank 0, as with broadcast_buffers of DistributedDataParallel. "average": after
    each step() floating point ones are the mean of the ranks'. With both of these all ranks begin with rank 0's."""

    ignore_unused_parameters: bool = True
    """False: a backward that leaves a trainable parameter of this rank without a gradient is an error that names it.
    Otherwise its gradient counts as zero."""

    # Not OffloadParamConfig(): a model of pydantic that is made reads the entry points of all installed packages.
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Where partitioned parameters live while they are not used; stage 3."""

    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """Where optimizer states and reduced gradients live; stages 1 to 3."""

    offload_host_bytes: Annotated[int | None, OWN] = Field(default=None, ge=4096)
    """Hard cap of the host memory that an optimizer's pools take from the system, all ranks of a node together: buffers
    of offloading, and parameters and gradients that it keeps on the host, page-locked (pin_memory) or not; and the
    bounce buffers of NVMe, two blocks (aio: block_size) for each thread, which are left free for them. Ranks of a
    node (ranks_per_node) draw on one account: what one does not need another may take. States that the wrapped
    optimizer allocates itself, with device "cpu", are not in it. A group with k of a node's L ranks has the share k/L.
    Default: no cap but the machine's."""

    ranks_per_node: Annotated[int | None, OWN] = Field(default=None, ge=1)
    """Ranks of a node, for what treats a node's ranks apart from others. Default: torchrun's LOCAL_WORLD_SIZE."""

    hierarchical_all_reduce: Annotated[bool, OWN] = False
    """Stage 0: gradients are reduce-scattered within nodes, all-reduced between them, all-gathered within them."""

    mics_shard_size: int = Field(default=-1, ge=-1)
    """Stages 1 to 3, shard groups (MiCS at stage 3, hybrid sharding elsewhere): what the stage splits is split over
    groups of this many consecutive ranks, and each group has all of it; gradients are summed within a group, then over
    the groups. Must divide the number of data-parallel ranks; -1: one group."""

    mics_hierarchical_params_gather: bool = False
    """Stage 3: gather parameters in two stages, first between nodes, then within them."""

    zero_hpz_partition_size: int = Field(default=1, ge=0)
    """Stage 3, hpZ: what forward gathered is kept, split over groups of this many ranks (those of a node), and backward
    gathers from there. 0 and 1: off; more than split the parameters: all of these."""

    zero_quantized_weights: bool = False
    """Stage 3, qwZ: parameters are gathered as int8 with one fp32 scale for each group of elements."""

    zero_quantized_nontrainable_weights: bool = False
    """Stage 3: frozen parameters are kept, and gathered, as int8 with scales, in the tier that offload_param says."""

    zero_quantized_gradients: bool = False
    """Stage 3, qgZ: gradients are reduced by two quantised all-to-all, within nodes and between them."""

    quantized_gradients_bits: Annotated[Literal[4, 8], OWN] = 4
    """Bits of an element on both ways of zero_quantized_gradients."""

    quantized_gradients_feedback: Annotated[bool, OWN] = False
    """With zero_quantized_gradients: what quantising left out of a rank's gradient is added to its next one (error
    feedback), at 4 bytes a parameter on every rank. Not with a loss scale."""

    @model_validator(mode="after")
    def _axes_fit_the_stage(self) -> ZeroConfig:
        if self.mics_shard_size == 0:
            raise ValueError("mics_shard_size=0; it is a number of ranks, or -1 for no shard groups")
        asked = {
            "divergent": self.divergent,
            "mics_hierarchical_params_gather": self.mics_hierarchical_params_gather,
            "zero_hpz_partition_size": self.zero_hpz_partition_size > 1,
            "zero_quantized_weights": self.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": self.zero_quantized_nontrainable_weights,
            "zero_quantized_gradients": self.zero_quantized_gradients,
        }
        for name in (name for name, on in asked.items() if on):
            if self.stage != 3:
                raise ValueError(f"{name} needs stage 3, where parameters are partitioned; stage is {self.stage}")
        if self.quantized_gradients_feedback and not self.zero_quantized_gradients:
            raise ValueError(
                "quantized_gradients_feedback=True without zero_quantized_gradients: there is no error to feed back"
            )
        clash = [
            name for name, on in (
                ("update_in_backward", self.update_in_backward), ("mics_shard_size", self.mics_shard_size != -1),
                ("mics_hierarchical_params_gather", self.mics_hierarchical_params_gather),
                ("zero_hpz_partition_size", self.zero_hpz_partition_size > 1),
                ("ignore_unused_parameters=False", not self.ignore_unused_parameters),
            ) if on
        ]  # fmt: skip
        if self.divergent and clash:
            raise ValueError(
                f"divergent=True with {', '.join(clash)}, which needs all ranks at the same place; drop one of the two"
            )
        if self.mics_shard_size != -1 and self.stage == 0:
            raise ValueError("mics_shard_size needs stage 1, 2 or 3; at stage 0 nothing is split")
        if self.hierarchical_all_reduce and self.stage != 0:
            raise ValueError(
                f"hierarchical_all_reduce is about the all-reduce of stage 0; at stage {self.stage} gradients are "
                "reduce-scattered"
            )
        return self

    @model_validator(mode="after")
    def _backward_can_update(self) -> ZeroConfig:
        if self.update_in_backward and not self.ignore_unused_parameters:
            raise ValueError(
                "ignore_unused_parameters=False finds out at the end of backward; with update_in_backward=True the "
                "others would be updated by then. Drop one of the two"
            )
        return self

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The documented null of overlap_comm leaves it to the implementation."""
        return {key: value for key, value in raw.items() if key != "overlap_comm" or value is not None}, []

    @model_validator(mode="after")
    def _offload_fits_the_stage(self) -> ZeroConfig:
        if self.offload_param.device != "none" and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, where parameters are partitioned; stage is {self.stage}")
        if self.offload_optimizer.device != "none" and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3; at stage 0 every rank has all states")
        for name, section in (("offload_param", self.offload_param), ("offload_optimizer", self.offload_optimizer)):
            if section.device == "nvme" and section.nvme_path is None:
                raise ValueError(f'{name}.device = "nvme" needs {name}.nvme_path, a directory on the device')
        return self

    @property
    def bucket_size(self) -> int:
        """The size up to which units are coalesced, in elements."""
        given = [size for size in (self.reduce_bucket_size, self.allgather_bucket_size) if size is not None]
        return min(given, default=2**20)
