"""Layers named one by one as column- or row-parallel, made into a plan.

Readers of other systems' descriptions (:mod:`zoo.tensor.patterns`, :mod:`zoo.tensor.injection`) say of each layer which
of its features are dealt. What they do not say is found here: which rows belong to one head, and what else in the model
counts heads.

* Where the model's family is known, its plan has both. What a reader says has to deal the same rows.
* Else by names (``q_proj``, ``query``), and by the attributes of attention modules that hold numbers of heads; a
  configuration's numbers where they have none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from zoo.tensor.huggingface import KEYS, QUERIES, plan_of
from zoo.tensor.plans import Count, Plan, Rule, matches, wildcards
from zoo.tensor.shares import HEAD, KV, QUERY

FUSED = frozenset({"attn_qkv", "c_attn", "qkv", "qkv_proj", "query_key_value", "w_pack", "wqkv"})
"""Names, in small letters, of matrices that make queries, keys and values at once."""
_HEADS = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head",
          "num_attention_heads_per_partition")  # fmt: skip
_KVS = ("num_key_value_heads", "num_kv_heads", "num_kv", "kv_n_heads", "num_multi_query_groups_per_partition")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("inner_dim", "all_head_size", "embed_dim", "hidden_size", "d_model", "hidden_size_per_partition")
"""Attributes of attention modules that count the features of all heads."""
_ALL = frozenset({HEAD, KV, QUERY})
T = TypeVar("T", Rule, Count)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one layer is dealt.

    Attributes:
        kind: "column": its output features; "row": its input features; "sum": nothing, and gradients are summed.
        outer, blocks, inner: sizes of dims in order, the slowest first, whose product is the dealt features. Each of
            ``blocks``, which lie one after the other, is dealt for itself. Empty: one block of all features.
        gather: outputs of a column-parallel layer are gathered.
    """

    kind: Literal["column", "row", "sum"]
    outer: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    gather: bool = False


def plan_of_ways(
    model: nn.Module, ways: Mapping[str, Way], name: str, *, degree: int = 0, heads: Iterable[str] = ()
) -> Plan:  # fmt: skip
    """The plan.

    Args:
        ways: path of a module → how it is dealt. Others stay whole.
        name: of the plan.
        degree: at which blocks are compared with the plan of the model's family; 0: they are not given.
        heads: last names of linear layers whose output features are the vocabulary, beside the model's own head.

    Raises:
        ValueError: a layer of which no rule can be made, by its name.
    """
    return _Reader(model, dict(ways), degree, frozenset(heads)).plan(name)


@dataclass(frozen=True)
class _Heads:
    """Numbers of heads. ``dim``: the features of one."""

    queries: int
    kv: int
    dim: int


class _Reader:
    def __init__(self, model: nn.Module, ways: dict[str, Way], degree: int, heads: frozenset[str]) -> None:
        self.model, self.ways, self.degree, self.names_of_heads = model, ways, degree, heads
        self.modules = dict(model.named_modules())
        self.family = family_of(model)
        self._add_tied_embeddings()

    def plan(self, name: str) -> Plan:
        rules = {path: self._rule(path, self.ways[path]) for path in self.modules if path in self.ways}
        cut = {path for path, rule in rules.items() if rule.cut in _ALL}
        sizes = dict(self.family.sizes) if self.family else {}
        counts: list[tuple[str, Count]] = []
        takes = []
        if self.family is not None:
            more = dict(self._of_family("rules", cut))
            rules |= {path: rule for path, rule in more.items() if self._follows(path, rule, cut)}
            counts = list(self._of_family("counts", cut))
            used = dict(self._of_family("takes", cut))
            takes = [take for take in self.family.takes if any(matches(take.module, path) for path in used)]
        else:
            if self._heads is not None:
                sizes |= {HEAD: self._heads.queries, KV: self._heads.kv}
            counts = [(at, count) for at in self._attentions if _beneath(at, cut) for count in self._counts(at)]
        words = [_out(self.modules[path]) for path, rule in rules.items() if rule.cut == "vocab" and rule.rows]
        sizes |= {"vocab": words[0]} if words else {}
        return Plan(
            name=name,
            sizes=tuple(sizes.items()),
            rules=tuple(_grouped([(path, rules[path]) for path in self.modules if path in rules], self.modules)),
            counts=tuple(_grouped(counts, self.modules)),
            takes=tuple(takes),
            layers=self.family.layers if self.family is not None else "",
        )

    def _follows(self, path: str, rule: Rule, cut: set[str]) -> bool:
        """Whether a rule of the family is for what has to be dealt where heads are."""
        biases = self._embeds(path) and rule.cut in _ALL  # a number for each head
        return rule.partial or bool(rule.outputs) or biases or (bool(rule.own) and _beneath(path, cut))

    # -- what the family says -----------------------------------------------------------------------------------------

    def _of_family(self, what: str, cut: set[str]) -> Iterable[tuple[str, Any]]:
        """Rules, counts or takes of the family, by path, for modules whose heads are dealt."""
        for path in self.modules:
            parent = path.rpartition(".")[0] if what == "rules" else path
            if path not in self.ways and _beneath(parent, cut):
                for item in getattr(self.family, what):
                    if matches(item.module, path):
                        yield path, item

    def _family_rule(self, path: str, way: Way, total: int) -> Rule | None:
        rule = self.family.rule_of(path) if self.family is not None else None
        same = rule is not None and (self._embeds(path) or bool(rule.rows if way.kind == "column" else rule.columns))
        if rule is None or self.family is None or not same:
            return None
        if way.blocks or way.outer or way.inner:
            said = _ruled(path, way, _dims(way, "inner"), "inner")
            for rank in range(self.degree):
                cuts = [self.family.cut(each, total, self.degree, rank) for each in (rule, said)]
                if (cuts[0].runs, cuts[0].take) != (cuts[1].runs, cuts[1].take):
                    raise ValueError(
                        f"{path}: the shape that is given deals {_dims(way, 'inner')!r}, and {self.family.name} has "
                        f"there {rule.rows or rule.columns!r}, which at degree {self.degree} are other rows. Leave the "
                        "shape out: the family's is taken then."
                    )
        return replace(rule, gather=rule.gather or way.gather)

    # -- rules --------------------------------------------------------------------------------------------------------

    def _rule(self, path: str, way: Way) -> Rule:
        if way.kind == "sum":
            return Rule(module=path, partial=True)
        module = self.modules[path]
        total = _out(module) if way.kind == "column" or self._embeds(path) else _in(module)
        if (rule := self._family_rule(path, way, total)) is not None:
            return rule
        if self._embeds(path):  # its outputs are whole on every rank, as what follows expects
            words = path in self._tables
            return Rule(module=path, rows="vocab" if words else "entry", cut="vocab" if words else "entry")
        if path in self._ends and way.kind == "column" and not way.blocks:
            return Rule(module=path, rows="vocab", cut="vocab", gather=way.gather)
        core, cut = self._core(path, way, total)
        return replace(_ruled(path, way, _dims(way, core), cut), scatter=way.kind == "row" and path in self._ends)

    def _core(self, path: str, way: Way, total: int) -> tuple[str, str]:
        """Of what the dealt features are, and which name is cut."""
        at = path.rpartition(".")[0]
        equal = len(set(way.blocks)) < 2
        if at not in self._attentions or self._heads is None:
            return "inner", "inner"
        heads, name = self._heads, path.rpartition(".")[2]
        fused = (heads.queries * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim)
        if not equal:
            if way.blocks != fused or way.outer or way.inner:
                raise ValueError(
                    f"{path}, within attention of {heads.queries} heads, {heads.kv} of keys and values, has blocks of "
                    f"{', '.join(map(str, way.blocks))} features; queries, keys and values are {fused}. Give a plan "
                    "(zoo.tensor.Plan)."
                )
            return "(head kv kv) dim", HEAD
        if way.kind == "column" and name in KEYS:
            return "kv dim", KV
        each = total // math.prod([len(way.blocks) or 1, *way.outer, *way.inner])
        asks = len(way.blocks) == 3 or (not way.blocks and total == sum(fused))
        if heads.kv != heads.queries and way.kind == "column" and name not in QUERIES and asks:
            raise ValueError(
                f"{path} has {total} features, queries, keys and values of {heads.queries} heads and {heads.kv}; which "
                f"of them belong to a head is not said. Give the shape [[{', '.join(map(str, fused))}], -1], or a plan "
                "(zoo.tensor.Plan)."
            )
        return ("head dim", HEAD) if each % heads.queries == 0 else ("inner", "inner")

    # -- what the model has -------------------------------------------------------------------------------------------

    def _embeds(self, path: str) -> bool:
        return isinstance(self.modules[path], nn.Embedding)

    @cached_property
    def _ends(self) -> set[str]:
        """Linear layers whose outputs are words."""
        own = getattr(self.model, "get_output_embeddings", None)
        head = own() if callable(own) else None
        found = {p for p, m in self.modules.items() if m is head or p.rpartition(".")[2] in self.names_of_heads}
        tables = {id(m.weight) for m in self.modules.values() if isinstance(m, nn.Embedding)}
        tied = {p for p, m in self.modules.items() if id(getattr(m, "weight", None)) in tables and not self._embeds(p)}
        return {path for path in found | tied if _is_matrix(self.modules[path])}

    @cached_property
    def _tables(self) -> set[str]:
        """Embeddings of words: the model's own, and those that are tied to a head."""
        own = getattr(self.model, "get_input_embeddings", None)
        try:
            table = own() if callable(own) else None
        except NotImplementedError:
            table = None
        heads = {id(self.modules[path].weight) for path in self._ends}
        embeddings = {p: m for p, m in self.modules.items() if isinstance(m, nn.Embedding)}
        return {p for p, m in embeddings.items() if m is table or id(m.weight) in heads}

    def _add_tied_embeddings(self) -> None:
        """One parameter is cut in one way, whichever of its names is given."""
        for path in [p for p in self.ways if p in self.modules and p in self._ends]:
            for table in self._tables:
                if self.modules[table].weight is self.modules[path].weight and self.ways[path].kind == "column":
                    self.ways.setdefault(table, Way(kind="column"))

    @cached_property
    def _attentions(self) -> dict[str, nn.Module]:
        """Modules whose own layers make queries, and which know how many heads there are."""
        found = {}
        for path, way in self.ways.items():
            at, _, name = path.rpartition(".")
            if way.kind == "column" and (name in QUERIES or name.lower() in FUSED) and at in self.modules:
                found[at] = self.modules[at]
        return found

    @cached_property
    def _heads(self) -> _Heads | None:
        """Of all attention modules; None where nothing says how many there are."""
        found = {heads for at in self._attentions if (heads := self._heads_of(at)) is not None}
        if len(found) > 1:
            raise ValueError(
                f"attention modules have different numbers of heads: {', '.join(map(str, found))}; a plan has one "
                "number. Give a plan of another kind, or leave some of them whole."
            )
        return next(iter(found), None)

    def _heads_of(self, at: str) -> _Heads | None:
        module, config = self.modules[at], _text_config(self.model)
        queries = _first(module, _HEADS) or getattr(config, "num_attention_heads", None)
        if not queries:
            return None
        widths = {name: _out(child) for name, child in module.named_children() if _is_matrix(child)}
        groups = _first(module, _GROUPS)
        kv = _first(module, _KVS) or (queries // groups if groups else None)
        kv = kv or getattr(config, "num_key_value_heads", None)
        query = next((name for name in widths if name in QUERIES), None)
        key = next((name for name in widths if name in KEYS), None)
        if query is not None:
            kv = kv or (widths[key] * queries // widths[query] if key else queries)
            return _Heads(queries, kv, widths[query] // queries)
        fused = next(name for name in widths if name.lower() in FUSED)
        blocks = self.ways[f"{at}.{fused}"].blocks
        if not kv and len(blocks) == 3 and blocks[0] >= queries:
            kv = blocks[1] // (blocks[0] // queries)
        kv = kv or queries
        return _Heads(queries, kv, max(widths[fused] // (queries + 2 * kv), 1))

    def _counts(self, at: str) -> Iterable[Count]:
        module, heads = self._attentions[at], self._heads
        if heads is None:
            return
        known: list[tuple[Sequence[str], int, str]] = [
            (_HEADS, heads.queries, "head"), (_KVS, heads.kv, "kv"), (_GROUPS, heads.queries // heads.kv, "query"),
            (_WIDTHS, heads.queries * heads.dim, f"head dim={heads.dim}"),
        ]  # fmt: skip
        for names, value, dims in known:
            for name in names:
                if getattr(module, name, None) == value:
                    yield Count(module=at, attribute=name, dims=dims)


def family_of(model: nn.Module) -> Plan | None:
    """Of the model's family or styles; None where there is none."""
    config = getattr(model, "config", None)
    if not (getattr(config, "model_type", None) and hasattr(model, "get_input_embeddings")):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its vocabulary, which a reader may leave whole
            return plan_of(model)
    except (ValueError, AttributeError):  # nothing is known of it, or its configuration is of another kind
        return None


def _ruled(path: str, way: Way, dims: str, cut: str) -> Rule:
    if way.kind == "row":
        return Rule(module=path, columns=dims, cut=cut)
    return Rule(module=path, rows=dims, cut=cut, gather=way.gather)


def _dims(way: Way, core: str) -> str:
    """``core``: of one block, or of all of them where it is bracketed."""
    if len(set(way.blocks)) > 1 and core == "inner":
        middle = f"({' '.join(f'inner={size}' for size in way.blocks)})"
    elif len(way.blocks) > 1 and "(" not in core:
        middle = f"part={len(way.blocks)} {core}"
    else:
        middle = core
    outer = [f"outer{i}={size}" for i, size in enumerate(way.outer)]
    return " ".join([*outer, middle, *(f"within{i}={size}" for i, size in enumerate(way.inner))])


def _grouped(items: Sequence[tuple[str, T]], modules: Mapping[str, Any]) -> list[T]:
    """Of (path, item): one item with ``*`` for the numbers of layers where all modules of that pattern have it."""
    by_path: dict[str, list[T]] = {}
    for path, item in items:
        by_path.setdefault(path, []).append(item)
    found: dict[T, None] = {}
    for path, own in by_path.items():
        pattern = wildcards(path)
        others = [other for other in modules if wildcards(other) == pattern and matches(pattern, other)]
        for item in own:
            bare = replace(item, module="")
            alike = all(bare in [replace(o, module="") for o in by_path.get(other, ())] for other in others)
            found[replace(item, module=pattern if alike else path)] = None
    return list(found)


def _beneath(at: str, paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{at}.") for path in paths)


def _first(module: nn.Module, names: Iterable[str]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    text: Callable[[], Any] | None = getattr(config, "get_text_config", None)
    return text() if text is not None else config


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _out(module: Any) -> int:
    """Output features; of an embedding, its entries."""
    return int(module.weight.shape[1 if _turned(module) else 0])


def _in(module: Any) -> int:
    return int(module.weight.shape[0 if _turned(module) else 1])
