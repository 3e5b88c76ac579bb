"""Every ZeRO option of a ds_config document, and what it is in zoo.

``OPTIONS`` is a table of the documented options of ``zero_optimization`` and its sections ``offload_param`` and
``offload_optimizer``: names, second spellings, documented defaults. One that is a field of the section's class is
carried out there. The others are *deprecated* (translated into the present ones), *unnecessary* (this design does it
anyway, or has nothing that it could choose), or *refused*: asking for what it does is an error, its default is what zoo
does.

Source: the DeepSpeed documentation, ZeRO configurations; values there, meanings here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

Status = Literal["carried out", "unnecessary", "deprecated", "refused"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One documented option.

    Attributes:
        default: the documented one; zoo's own may differ, its field says so.
        zoo: what it is here, or why it does nothing.
        section: "offload_param", "offload_optimizer", or "" for ``zero_optimization`` itself.
        unnecessary: see the module's docstring.
        becomes: of a deprecated option, the paths that take its place and their values for true and for false.
        silent: values that need no comment, beside the default and "auto".
    """

    name: str
    default: Any
    zoo: str
    section: str = ""
    aliases: tuple[str, ...] = ()
    unnecessary: bool = False
    becomes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    silent: tuple[Any, ...] = ()

    @property
    def deprecated(self) -> bool:
        """There is a newer option."""
        return bool(self.becomes)


def _option(name: str, default: Any, zoo: str, **more: Any) -> Option:
    return Option(name=name, default=default, zoo=zoo, **more)


def _stage3(name: str, default: Any, zoo: str, **more: Any) -> Option:
    return Option(name=name, default=default, zoo=zoo, aliases=(f"stage3_{name}",), **more)


def _needless(name: str, default: Any, zoo: str, **more: Any) -> Option:
    return Option(name=name, default=default, zoo=zoo, unnecessary=True, **more)


def _former(name: str, default: Any, becomes: dict[str, tuple[Any, Any]], **more: Any) -> Option:
    return Option(name=name, default=default, zoo=" and ".join(becomes), becomes=becomes, **more)


OPTIONS: tuple[Option, ...] = (
    _option("stage", 0, "which roles are split: 0 none, 1 optimizer states, 2 gradients too, 3 parameters too"),
    _needless("contiguous_gradients", True, "gradients always accumulate in flat buffers"),
    _needless(
        "reduce_scatter",
        True,
        "gradients are always reduce-scattered; at stage 0 an all-gather follows, which makes it an all-reduce",
    ),
    _option("reduce_bucket_size", 500_000_000, "up to how many elements units share one collective; 0: none do"),
    _needless(
        "use_multi_rank_bucket_allreduce",
        True,
        "a bucket is one collective in which every rank gets its chunk, so there are no messages by rank to combine",
    ),
    _needless("allgather_partitions", True, "a bucket is gathered by one all-gather; there are no broadcasts"),
    _option("allgather_bucket_size", 500_000_000, "the same buckets as reduce_bucket_size, the smaller of the two"),
    _option("overlap_comm", None, "reduce gradients during backward, or all of them at its end"),
    _needless("load_from_fp32_weights", True, "a checkpoint keeps fp32 masters as they are, and they are what is read"),
    _needless("elastic_checkpoint", False, "a checkpoint can be read at any world size and stage", silent=(True,)),
    _option("offload_param", None, "where partitioned parameters live while they are not used; stage 3"),
    _option("offload_optimizer", None, "where optimizer states and reduced gradients live; stages 1 to 3"),
    _option("sub_group_size", 1_000_000_000, "the update runs in pieces of so many elements; 0: the smallest"),
    _former("cpu_offload_param", None, {"offload_param.device": ("cpu", "none")}, aliases=("cpu_offload_params",)),
    _former(
        "cpu_offload_use_pin_memory",
        None,
        {"offload_param.pin_memory": (True, False), "offload_optimizer.pin_memory": (True, False)},
    ),
    _former("cpu_offload", None, {"offload_optimizer.device": ("cpu", "none")}),
    _stage3("prefetch_bucket_size", 50_000_000, "parameters gathered ahead of the running unit"),
    _stage3("param_persistence_threshold", 100_000, "parameters of at most this many elements stay whole"),
    _stage3("model_persistence_threshold", sys.maxsize, "at most this many elements stay whole for that reason"),
    _stage3("max_live_parameters", 1_000_000_000, "gathered parameters that may stay after forward for backward"),
    _stage3(
        "max_reuse_distance",
        1_000_000_000,
        "the recorded order of units says what is needed again next, and max_live_parameters bounds what may stay",
        unnecessary=True,
    ),
    _stage3(
        "gather_16bit_weights_on_model_save",
        False,
        "at stage 3 the engine's save_16bit_model() gathers and saves; otherwise it saves nothing there",
    ),
    _former("stage3_gather_fp16_weights_on_model_save", False, {"gather_16bit_weights_on_model_save": (True, False)}),
    _option(
        "ignore_unused_parameters",
        True,
        "a parameter without a gradient counts as having a zero gradient; false makes that an error",
    ),
    _needless("legacy_stage1", False, "all stages are one implementation"),
    _needless(
        "round_robin_gradients", False, "every rank holds a chunk of every bucket, so the work is spread evenly anyway"
    ),
    _option("zero_hpz_partition_size", 1, "a second, smaller group that parameters are gathered in (ZeRO++ hpZ)"),
    _option("zero_quantized_weights", False, "parameters travel quantised (ZeRO++ qwZ)"),
    _option("zero_quantized_nontrainable_weights", False, "frozen parameters are stored quantised"),
    _option("zero_quantized_gradients", False, "gradients travel quantised (ZeRO++ qgZ)"),
    _option("mics_shard_size", -1, "how many ranks one copy of the model states is split over (MiCS)"),
    _option("mics_hierarchical_params_gather", False, "gathering inside of nodes first (MiCS)"),
    _needless(
        "memory_efficient_linear",
        True,
        "at stage 3 what autograd keeps of a weight is a view of a buffer that is emptied on release; for models under "
        "torch.autocast there is zoo.zero.memory_efficient_linear(model)",
        silent=(False,),
    ),
    _needless("pipeline_loading_checkpoint", False, "every rank reads its own slices of a checkpoint at the same time"),
    _option("override_module_apply", True, "in zoo.zero.Init, Module.apply sees whole parameters of each module"),
    _option("device", "none", "none, cpu or nvme", section="offload_param"),
    _option("nvme_path", None, "a directory on the NVMe device", section="offload_param"),
    _option("buffer_count", 5, "buffers for parameters on NVMe", section="offload_param"),
    _option("buffer_size", 100_000_000, "elements of such a buffer", section="offload_param"),
    _option("max_in_cpu", 1_000_000_000, "elements that stay in host memory with NVMe", section="offload_param"),
    _option("pin_memory", False, "host memory is page-locked", section="offload_param"),
    _option("device", "none", "none, cpu or nvme", section="offload_optimizer"),
    _option("nvme_path", None, "a directory on the NVMe device", section="offload_optimizer"),
    _option("buffer_count", 4, "buffers for states on NVMe", section="offload_optimizer"),
    _option("pin_memory", False, "host memory is page-locked", section="offload_optimizer"),
    _option("pipeline_read", False, "read the next piece while one is updated", section="offload_optimizer"),
    _option("pipeline_write", False, "write a piece while the next one is updated", section="offload_optimizer"),
    _option("fast_init", False, "faster first initialisation of states on NVMe", section="offload_optimizer"),
    _option("ratio", 1.0, "the part of the elements that is offloaded", section="offload_optimizer"),
)

_BY_KEY = {key: option for option in OPTIONS if not option.section for key in (option.name, *option.aliases)}

KEYS = frozenset(_BY_KEY)
"""Every name of an option of ``zero_optimization`` itself."""


def name_of(key: str) -> str:
    """The first of an option's names."""
    return _BY_KEY[key].name if key in _BY_KEY else key


def status(option: Option, model: type[BaseModel]) -> Status:
    """What becomes of an option (of ``zero_optimization`` itself) when ``model`` is that section's class."""
    if option.deprecated:
        return "deprecated"
    if option.name in model.model_fields:
        return "carried out"
    return "unnecessary" if option.unnecessary else "refused"


def translate(section: Mapping[str, Any], model: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The keys of a ``zero_optimization`` section as ``model`` has them, and a sentence for each that is not obvious.

    Deprecated keys become present ones; unnecessary ones go, with a sentence if they ask for something else than what
    is done anyway; a refused one goes if it asks for nothing, and so does null where that is the default. Carried-out
    and unknown keys stay as they are: their values are the model's to check.

    Raises:
        ValueError: an old and a new key say different things (both are named), an option is given under two of its
            names, a refused option asks for something, or a value is of the wrong kind.
    """
    present, sentences = _modernised(section)
    kept: dict[str, Any] = {}
    for key, value in present.items():
        option = _BY_KEY.get(key)
        if option is not None and value is None and option.default is None:
            continue
        what = status(option, model) if option is not None else "unknown"
        if option is None or what == "carried out":
            kept[key] = value
        elif what == "unnecessary":
            _check_kind(option, key, value)
            if value not in (option.default, "auto", *option.silent):
                sentences.append(f"{key}={value!r} has no effect: {option.zoo}.")
        elif what == "refused" and not _asks_for_nothing(option, key, value):
            raise ValueError(f"{key}={value!r} is not supported ({option.zoo}); allowed: {option.default!r}")
    return kept, sentences


def _modernised(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The section without deprecated keys, and a sentence for each that it had."""
    present = {key: value for key, value in section.items() if key not in _BY_KEY or not _BY_KEY[key].deprecated}
    sentences = []
    spelled: dict[str, str] = {}
    for key, on in section.items():
        if key in present:
            continue
        option = _BY_KEY[key]
        if spelled.setdefault(option.name, key) != key:
            raise ValueError(f"{spelled[option.name]} and {key} are one option; remove one")
        if on is None:
            continue
        if not isinstance(on, bool):
            raise ValueError(f"{key}={on!r}; allowed: true or false")
        said = {path: values[0 if on else 1] for path, values in option.becomes.items()}
        for path, value in said.items():
            _write(present, path, value, f"{key}={on!r}")
        listed = " and ".join(f"{path}={value!r}" for path, value in said.items())
        sentences.append(f"{key} is deprecated: {key}={on!r} was read as {listed}.")
    return present, sentences


def _write(present: dict[str, Any], path: str, value: Any, said: str) -> None:
    """Set a dotted path, unless something else is there."""
    head, _, leaf = path.partition(".")
    if leaf:
        inner = present.get(head)
        if inner is not None and not isinstance(inner, Mapping):
            return  # validation says what is wrong with it
        node, name = dict(inner or {}), leaf
        present[head] = node
    else:
        node = present
        name = next((key for key in (head, *_BY_KEY[head].aliases) if key in present), head)
    if node.get(name, value) != value:
        where = f"{head}.{leaf}" if leaf else name
        raise ValueError(
            f"{said} and {where}={node[name]!r} contradict each other; remove the former, it is deprecated"
        )
    node[name] = value


def _check_kind(option: Option, key: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, bool) if isinstance(option.default, bool) else number
    if not fits and value != "auto":
        raise ValueError(
            f"{key}={value!r}; allowed: {'true or false' if isinstance(option.default, bool) else 'a number'}"
        )


def _asks_for_nothing(option: Option, key: str, value: Any) -> bool:
    if option.default is None:
        return isinstance(value, Mapping) and value.get("device", "none") == "none"
    _check_kind(option, key, value)
    return value in (option.default, "auto")


def schema_of_translated(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """JSON schema of each key that :func:`translate` takes beside the fields of ``model``, for editors."""
    found: dict[str, dict[str, Any]] = {}
    for key, option in _BY_KEY.items():
        what = status(option, model)
        if what in ("unnecessary", "deprecated"):
            kind = "boolean" if option.default is None or isinstance(option.default, bool) else "number"
            text = f"Now {option.zoo}." if what == "deprecated" else f"Accepted, without effect: {option.zoo}."
            found[key] = {"type": kind, "description": text, "deprecated": option.deprecated}
    return found
