"""The section ``compile`` of a configuration."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from zoo.config import Config, Section
from zoo.config.fates import Fate, refused, unnecessary
from zoo.config.section import OWN

__all__ = ["CompileConfig"]

_ONE_MEMORY = (
    "what waits for backward, parameters and states live where activation_checkpointing, offload_param and "
    "offload_optimizer say; no pass over a graph moves them"
)

_NOT_HERE = {
    "autosp": "sequences are split by DistributedAttention and UlyssesSPAttentionHF",
    "autotp": "layers are split by the section tensor_parallel",
}
"""Of DeepSpeed's ``passes``, what does it."""


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

    passes: list[str] | None = None
    """With ``deepcompile``: names of passes of one's own (``register_compile_pass``), after zoo's. null: none. Of
    DeepSpeed's, "z1" and "z3" are what zoo's do at every stage."""

    schedule: Annotated[list[tuple[int, list[str]]] | None, OWN] = None
    """With ``deepcompile``: which passes run from which update on, [[0, ["keep", "place"]], …]. null: zoo's, and
    ``passes``."""

    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """``passes`` without those that DeepSpeed names there."""
        given = raw.get("passes")
        if not isinstance(given, list):
            return raw, ()
        for name, instead in _NOT_HERE.items():
            if name in given:
                raise ValueError(f"passes names {name}, and no pass of zoo splits a model: {instead}. Leave it out")
        stages = [name for name in given if name in ("z1", "z3")]
        if not stages:
            return raw, ()
        note = f"passes names {', '.join(stages)}: zoo's own passes do that at every stage"
        return {**raw, "passes": [name for name in given if name not in stages]}, (note,)

    def contradictions(self, config: Config) -> Iterable[str]:
        for name, given in (("passes", self.passes or None), ("schedule", self.schedule)):
            if given is not None and not self.deepcompile:
                yield (
                    f"compile.{name} is {given!r}, and units are compiled, not one graph that passes run over; set "
                    f"compile.deepcompile = true, or leave {name} out"
                )
        if self.passes and self.schedule is not None:
            yield (
                "compile.passes and compile.schedule are both set, and a schedule says all of the passes; name "
                f"{', '.join(self.passes)} in its lists, and leave passes out"
            )
        yield from wrong_arguments(self.kwargs, "compile.kwargs")

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


def wrong_arguments(kwargs: Mapping[str, Any], where: str) -> Iterable[str]:
    """What is wrong with further arguments of ``torch.compile``, a sentence each; ``where`` they are given."""
    for name in kwargs.keys() & {"dynamic", "fullgraph", "disable"}:
        if kwargs[name] is not None and not isinstance(kwargs[name], bool):
            yield f"{where}: {name}= is True or False, and not {kwargs[name]!r}"
    if "backend" in kwargs:
        yield f"{where} has backend; write it as compile.backend"
    others = kwargs.keys() - {"backend"}
    if others:
        from torch import compile as of_torch

        allowed = inspect.signature(of_torch).parameters.keys() - {"model", "backend"}
        for name in sorted(others - allowed):
            yield f"{where} has {name}, which torch.compile does not take: allowed are {', '.join(sorted(allowed))}"


def check_backend(backend: Any, where: str) -> None:
    """Raise ValueError where ``torch.compile`` has no backend of that name; ``where`` it is given, with its value."""
    if not (isinstance(backend, str) or callable(backend)):
        raise ValueError(f"{where}: give the name of a backend, or a function.")
    if callable(backend):
        return
    from torch.compiler import list_backends

    if backend not in (names := list_backends(exclude_tags=())):
        known = [name for name in names if not name.endswith("_TESTING_ONLY")]
        near = difflib.get_close_matches(backend, known, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{where}: torch.compile has no such backend; it has {', '.join(known)}{meant}")
