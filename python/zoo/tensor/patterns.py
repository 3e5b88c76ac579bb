"""Plans from patterns of parameter names: DeepSpeed's ``tensor_parallel.partition_config``, and its presets.

    {"layer_specs": [{"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
                     {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
                     {"patterns": [".*\\.gate_up_proj\\.weight$"], "shape": [2, -1], "partition_dim": 0}]}

A spec is for the layers whose weights match one of its regular expressions from the beginning of the name on; the first
spec that matches counts. What they leave open, such as which rows belong to one head, :mod:`zoo.tensor.ways` finds.

``shape`` says of a weight (O, I) what its output features are: all but the last dim are them, in order, and the last is
I. At ``partition_dim``, which is dealt, a number is how many equal blocks lie one after the other, each of which is
dealt for itself ([3, -1]: queries, keys, values), a list has the sizes of unequal ones ([[q, k, v], -1]), and -1 is one
block. Of a row-parallel layer, ``partition_dim`` is the last one, and its blocks are of the input features.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from torch import nn

from zoo.registry import nearest
from zoo.tensor.plans import Plan
from zoo.tensor.reading import check, listed, mapping
from zoo.tensor.ways import Way, plan_of_ways

Shape = tuple[int | tuple[int, ...], ...]
_log = logging.getLogger("zoo.tensor")


class PartitionType(Enum):
    """What of a layer is dealt: output features, input features, nothing."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"

    @classmethod
    def _missing_(cls, value: object) -> PartitionType:
        named = {kind.value: kind for kind in cls}
        if str(value).lower() in named:
            return named[str(value).lower()]
        raise ValueError(f"partition_type {value!r}; allowed are {', '.join(map(repr, named))}.")


@dataclass
class LayerSpec:
    """Of the layers whose weights match.

    Attributes:
        patterns: regular expressions, matched with names such as ``model.layers.0.mlp.up_proj.weight``.
        shape, partition_dim: see above; without a shape all features are one block.
        model_types: only in models whose configuration has one of these types; None or empty: in all.
        gather_output: outputs of a column-parallel layer are gathered.
        grad_allreduce: of "skip": the gradients of ranks are summands, as those of norms of heads are.
    """

    patterns: Sequence[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Shape | None = None
    partition_dim: int | None = None
    model_types: Sequence[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        self.partition_type = PartitionType(self.partition_type)
        check(LayerSpec, {f.name: getattr(self, f.name) for f in fields(LayerSpec)}, what="a spec", free=("shape",))
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from None
        if self.gather_output and self.partition_type is not PartitionType.COLUMN:
            raise ValueError(f"{self}: gather_output is for partition_type 'column'.")
        if self.grad_allreduce and self.partition_type is not PartitionType.SKIP:
            raise ValueError(f"{self}: grad_allreduce is for partition_type 'skip'.")
        if self.shape is not None:
            sizes: Any = listed("the shape of a spec", self.shape)
            self.shape = tuple(tuple(size) if isinstance(size, list) else size for size in sizes)
            self._check(self.shape)

    def _check(self, shape: Shape) -> None:
        dim = self.get_partition_dim()
        if not 0 <= dim < len(shape):
            raise ValueError(f"{self}: partition_dim {dim} of a shape with {len(shape)} dims.")
        for at, size in enumerate(shape):
            each = size if isinstance(size, tuple) and at == dim else (size,)
            good = all(type(n) is int and (n > 0 or (n == -1 and each == (size,))) for n in each)
            if not each or not good:
                raise ValueError(
                    f"{self}: {size!r}; a shape has positive integers and -1, and at partition_dim, here {dim}, it "
                    "may have a list of positive integers."
                )

    def get_partition_dim(self) -> int:
        """Which dim of ``shape`` is dealt: 0 of column-parallel layers, 1 of row-parallel ones, unless it is said."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 1 if self.partition_type is PartitionType.ROW else 0

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether this spec is for a parameter of a model of this type."""
        types = {str(kind).lower() for kind in self.model_types or ()}
        if types and (model_type is None or model_type.lower() not in types):
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)

    def way(self, path: str, weight: tuple[int, int]) -> Way | None:
        """How a layer with a weight (O, I) is dealt; None where it stays whole.

        Raises:
            ValueError: the shape is not the weight's.
        """
        if self.partition_type is PartitionType.SKIP:
            return Way(kind="sum") if self.grad_allreduce else None
        kind = self.partition_type.value
        if self.shape is None:
            return Way(kind=kind, gather=self.gather_output)
        dim, sizes = self.get_partition_dim(), self._sizes(path, weight)
        last = len(sizes) - 1
        if (dim == last) != (kind == "row"):
            raise ValueError(
                f"{path}: {self} deals dim {dim} of {len(sizes)}; the last one is the input features, which 'row' "
                "deals, and the others are the output features, which 'column' deals."
            )
        said = self.shape[dim]
        blocks = said if isinstance(said, tuple) else (sizes[dim] // said,) * said if said > 1 else ()
        if sizes[dim] % max(len(blocks), 1) and not isinstance(said, tuple):
            raise ValueError(f"{path}: {self} makes {said} equal blocks of {sizes[dim]} features.")
        if kind == "row":
            return Way(kind="row", blocks=blocks)
        return Way(kind="column", outer=sizes[:dim], blocks=blocks, inner=sizes[dim + 1 : last],
                   gather=self.gather_output)  # fmt: skip

    def _sizes(self, path: str, weight: tuple[int, int]) -> tuple[int, ...]:
        """Of all dims of the shape, for a weight (O, I)."""
        dim = self.get_partition_dim()
        sizes: list[int | None] = []
        for at, size in enumerate(self.shape or ()):
            whole = sum(size) if isinstance(size, tuple) else None if size == -1 or at == dim else size
            sizes.append(whole)
        # A number at partition_dim says how many blocks there are, and not how long the dim is.
        if len(sizes) > 1 and sizes[-1] is None:
            sizes[-1] = weight[1]
        known = math.prod(size for size in sizes if size is not None)
        if sizes.count(None) == 1 and known and math.prod(weight) % known == 0:
            sizes[sizes.index(None)] = math.prod(weight) // known
        found = tuple(size for size in sizes if size is not None)
        if len(found) != len(sizes) or found[-1] != weight[1] or math.prod(found[:-1]) != weight[0] or len(found) < 2:
            raise ValueError(
                f"{path} has a weight {weight}, and {self} is another shape: its last dim is the input features, and "
                "the product of the others the output features; of these one may be left open."
            )
        return found

    def __str__(self) -> str:
        shape = "" if self.shape is None else f", shape {list(self.shape)}"
        return f"{self.partition_type.value} for {', '.join(self.patterns)}{shape}"


@dataclass
class PartitionConfig:
    """All specs, and what is done with layers that none of them is for.

    Attributes:
        tp_size: the degree, where it is said here too; 0 and 1: it is not.
        layer_specs: the first that matches counts.
        embedding_partition_dim: has no effect, as in DeepSpeed: embeddings that match are cut along their entries, and
            their outputs are whole.
        lm_head_patterns: the last names of layers whose outputs are words, beside what the model calls its head.
        use_default_specs: specs of the preset, if one is named, count after these.
        strict_mode: linear layers that no spec is for are refused.
    """

    tp_size: int = 1
    layer_specs: list[LayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: Sequence[str] = ("lm_head", "embed_out")
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> PartitionConfig:
        """Of JSON.

        Raises:
            ValueError: keys that it does not know, and values that are not allowed.
        """
        given = dict(_known(cls, mapping("partition_config", data)))
        specs = listed("partition_config.layer_specs", given.pop("layer_specs", None) or [])
        read = [_known(LayerSpec, mapping("one of partition_config.layer_specs", spec)) for spec in specs]
        check(PartitionConfig, given, what="partition_config")
        return cls(layer_specs=[LayerSpec(**{"patterns": (), **spec}) for spec in read], **given)

    def spec_of(self, name: str, model_type: str | None = None) -> LayerSpec | None:
        """The first for a parameter."""
        return next((spec for spec in self.layer_specs if spec.matches(name, model_type)), None)


def plan_of_partition_config(
    model: nn.Module, config: PartitionConfig | Mapping[str, Any] | None, degree: int, *, preset: str | None = None
) -> Plan:  # fmt: skip
    """The plan of ``config`` for a model.

    Args:
        model: whole; on any device.
        config: as a mapping, it is read by :meth:`PartitionConfig.of_data`; None: the preset's specs alone.
        degree: ranks along the axis.
        preset: the name of specs that count after those of ``config`` (:data:`PRESETS`).

    Raises:
        ValueError: no layer matches, or one does of which no rule can be made.
    """
    read = PartitionConfig.of_data(config or {}) if not isinstance(config, PartitionConfig) else config
    if read.tp_size not in (0, 1, degree):
        raise ValueError(f"partition_config.tp_size is {read.tp_size}, and the degree {degree}; leave one of them out.")
    defaults = preset_specs(preset) if preset is not None and (config is None or read.use_default_specs) else []
    specs = [*read.layer_specs, *defaults]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    ways, skipped = _ways(model, specs, kind, strict=read.strict_mode)
    if not ways and not skipped:
        raise ValueError(
            f"no layer of {type(model).__name__} matches {'; '.join(map(str, specs)) or 'any spec, as there is none'}. "
            f"Its parameters are named {', '.join([name for name, _ in model.named_parameters()][:4])}, …"
        )
    _tell_unused(model, read.layer_specs)
    name = "partition_config" if preset is None else f"partition_config, preset {preset}"
    return plan_of_ways(model, ways, name, degree=degree, heads=read.lm_head_patterns)


def _tell_unused(model: nn.Module, specs: Iterable[LayerSpec]) -> None:
    """Warn of specs that a program gives for all models and no parameter of this one fits: a word may be wrong."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    unused = [s for s in specs if not s.model_types and not any(map(s.matches, names))]
    if unused:
        _log.warning(
            "partition_config: no parameter of %s matches %s; what they were meant for stays whole, or as other specs "
            "say. Specs for other models have model_types.", type(model).__name__, "; ".join(map(str, unused)),
        )  # fmt: skip


def _ways(
    model: nn.Module, specs: Sequence[LayerSpec], kind: str | None, *, strict: bool
) -> tuple[dict[str, Way], set[str]]:  # fmt: skip
    """By path, and what stays whole because a spec says so."""
    found: dict[str, Way] = {}
    skipped: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        spec = next((s for s in specs if s.matches(f"{path}.weight", kind)), None)
        if not isinstance(weight, nn.Parameter) or (spec is None and not (strict and isinstance(module, nn.Linear))):
            continue
        if spec is None:
            raise ValueError(f"strict_mode: no spec is for {path}.weight; add one, of partition_type 'skip' perhaps.")
        if weight.ndim != 2 and not spec.grad_allreduce:
            continue  # a norm that ".*weight" matches
        if spec.shape is not None and (type(module).__name__ == "Conv1D" or isinstance(module, nn.Embedding)):
            raise ValueError(f"{path} is a {type(module).__name__}, and {spec}; a shape is for linear layers (O, I).")
        out, into = (weight.shape[0], weight.shape[-1]) if weight.ndim == 2 else (0, 0)
        way = spec.way(path, (out, into))
        if way is not None:
            found[path] = way
        else:
            skipped.add(path)
    _check_ties(model, found, skipped)
    return found, skipped


def _check_ties(model: nn.Module, ways: Mapping[str, Way], skipped: Iterable[str]) -> None:
    """Raise ValueError where one name of a parameter is dealt, and another one skipped."""
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = {id(modules[path].weight): path for path in skipped}
    for path in ways:
        other = whole.get(id(modules[path].weight))
        if other is not None:
            raise ValueError(
                f"{path} and {other} have one weight; a spec deals the first and another one skips the second. Give "
                "both one partition_type."
            )


def _known(kind: Any, data: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [f.name for f in fields(kind)]
    for key in data:
        if key not in names:
            close = nearest(key, names)
            raise ValueError(
                f"partition_config has no key {key!r}{f', perhaps {close!r}' if close else ''}; there are "
                f"{', '.join(names)}."
            )
    return data


_SEPARATE = (
    ("row", r".*\.self_attn\.o_proj\.weight$", None),
    ("column", r".*\.self_attn\.[qkv]_proj\.weight$", None),
    ("row", r".*\.mlp\.down_proj\.weight$", None),
    ("column", r".*\.mlp\.(up|gate)_proj\.weight$", None),
)
_BIGSCIENCE = (
    ("row", r".*\.self_attention\.dense\.weight$", None),
    ("row", r".*\.mlp\.dense_4h_to_h\.weight$", None),
)
PRESETS: Mapping[str, Sequence[tuple[str, str, Shape | None]]] = {
    "llama": _SEPARATE,
    "qwen2": _SEPARATE,
    "bloom": (
        *_BIGSCIENCE,
        ("column", r".*\.self_attention\.query_key_value\.weight$", None),
        ("column", r".*\.mlp\.dense_h_to_4h\.weight$", None),
    ),
    "chatglm": (
        *_BIGSCIENCE,
        ("column", r".*\.self_attention\.query_key_value\.weight$", (3, -1)),
        ("column", r".*\.mlp\.dense_h_to_4h\.weight$", (2, -1)),
    ),
    "phi3": (
        ("row", r".*\.self_attn\.o_proj\.weight$", None),
        ("column", r".*\.self_attn\.qkv_proj\.weight$", (3, -1)),
        ("row", r".*\.mlp\.down_proj\.weight$", None),
        ("column", r".*\.mlp\.gate_up_proj\.weight$", (2, -1)),
    ),
    "mixtral": (
        *_SEPARATE[:2],
        ("row", r".*\.block_sparse_moe\.experts\.\d+\.w2\.weight$", None),
        ("column", r".*\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$", None),
        ("skip", r".*\.block_sparse_moe\.gate\.weight$", None),
    ),
    "deepseek_v2": (
        ("row", r".*\.self_attn\.o_proj\.weight$", None),
        ("skip", r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight$", None),
        ("column", r".*\.self_attn\.(q_b_proj|kv_b_proj)\.weight$", None),
        ("skip", r".*\.mlp\.gate\.weight$", None),
        ("row", r".*\.mlp\.(experts\.\d+|shared_experts)\.down_proj\.weight$", None),
        ("column", r".*\.mlp\.(experts\.\d+|shared_experts)\.(up|gate)_proj\.weight$", None),
    ),
}
"""Name → (partition_type, pattern, shape) of each spec: what DeepSpeed's ``preset_model`` names."""


def preset_specs(name: str) -> list[LayerSpec]:
    """Raises ValueError for a name that is not in :data:`PRESETS`."""
    if name.lower() not in PRESETS:
        raise ValueError(f"preset_model {name!r}; there are {', '.join(sorted(PRESETS))}.")
    return [LayerSpec([pattern], PartitionType(kind), shape) for kind, pattern, shape in PRESETS[name.lower()]]
