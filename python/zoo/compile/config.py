"""The section ``compile`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from zoo.config import Section
from zoo.config.fates import Fate, refused, unnecessary
from zoo.config.section import OWN

__all__ = ["CompileConfig"]

_ONE_MEMORY = (
    "what waits for backward, parameters and states live where activation_checkpointing, offload_param and "
    "offload_optimizer say; no pass over a graph moves them"
)


class CompileConfig(Section):
    """The model goes through torch.compile: its units, or all of it as one graph."""

    carried_by: ClassVar[str] = "zoo.engine"

    enabled: bool = False
    """Compile when the engine is made. Without, ``engine.compile()`` does, with what is said here."""

    deepcompile: bool = False
    """All of the model is one graph where it can be, with gathers and reductions inside; otherwise each unit is one,
    and they are between. What cannot be one graph runs as it does uncompiled; the log says why, once."""

    backend: str = "inductor"
    """What makes code: "inductor", or "aot_eager", which runs graphs as they are; without ``deepcompile`` any backend
    of torch."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``torch.compile``: ``dynamic``, ``mode``, ``options``."""

    passes: list[str] = Field(default_factory=list)
    """With ``deepcompile``: names of passes of one's own (``register_compile_pass``), after zoo's."""

    schedule: Annotated[list[tuple[int, list[str]]] | None, OWN] = None
    """With ``deepcompile``: which passes run from which update on, [[0, ["keep", "place"]], …]. null: zoo's, and
    ``passes``."""

    fates: ClassVar[Mapping[str, Fate]] = {
        **{
            key: refused(_ONE_MEMORY, False)
            for key in ("offload_activation", "offload_opt_states", "offload_parameters")
        },
        "offload_activation_pin_memory": unnecessary("no pass offloads", True),
        "double_buffer": unnecessary("gathers have as many buffers as stage3_prefetch_bucket_size allows", True),
        "free_activation": unnecessary("what nobody uses any more is freed at once", False),
        "free_activation_threshold": unnecessary("what nobody uses any more is freed at once", 10 << 20, int),
        "symmetric_memory": refused("gathers travel by zero_optimization's routes", False),
        "autoep_non_moe": unnecessary("a model without experts has nothing to be parallel in", False, bool),
        "debug_log": unnecessary("the log zoo.compile says what is no graph, and why", False),
        **{
            key: unnecessary("starts and waits have one order on all ranks", False)
            for key in ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather")
        },
        "keep_int_input_tensors": unnecessary("inputs stay as long as torch keeps them", True),
        "keep_all_input_tensors": unnecessary("inputs stay as long as torch keeps them", False),
    }
