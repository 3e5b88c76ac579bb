"""Plans: how the parameters of a model lie over the ranks of the axis ``tensor``. Data, without torch.

A plan is a list of rules, and what else in a model counts heads. Each of them names modules by a pattern, in which
``*`` is one name: ``model.layers.*.self_attn.q_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from zoo.tensor.dims import HEADS, Dims, stored
from zoo.tensor.reading import check, listed, mapping
from zoo.tensor.shares import HEAD, KV, Run, Share

AXIS = "tensor"
"""The mesh axis along which matrices are cut."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Of the parameters of some modules.

    * ``rows``: the output features are dealt (Megatron-LM, Shoeybi et al. 2019, section 3: column-parallel). Every
      rank multiplies whole inputs by its rows.
    * ``columns``: the input features are dealt (row-parallel). Each rank multiplies its inputs, and the products are
      summed over ranks; the bias is added once, after that.
    * of an embedding, ``rows`` deal the vocabulary (a masked lookup, then a sum), ``columns`` its features.
    * ``partial``: nothing is dealt, and each rank's gradient is a summand: norms within attention.
    * of a dropout, ``columns``: it gets this rank's features; ``partial``: a whole tensor, where others are parts.
    * ``inside``: the module computes with parts of its own parameters, and its output is a sum over ranks: experts
      whose matrices are one tensor (E, I, C). ``once`` of its parameters are whole, and the first rank alone adds them.
    * ``own``: parameters of the module itself are dealt, and it computes with its part: a number for each head.
    * ``outputs``: nothing is dealt, and of its outputs the dim ``cut`` goes straight to the heads of every rank: the
      rotary key of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.3). Its gradient is summed.

    Attributes:
        module: the pattern. rows, columns: named dims (:mod:`zoo.tensor.dims`), one of the two, or none.
        inside: (parameter, which dim of it, what is along that dim) for every parameter of the module, but for those
            named in ``once``: biases of its outputs. own: the same for some of its parameters.
        outputs: dims that lie one after the other: "(kv_lora_rank qk_rope_head_dim)".
        cut: the name of the dim that is dealt.
        gather: with ``rows``: outputs are gathered, so that each rank has all of them.
        scatter: with ``columns``: inputs are whole, and each rank takes its own.
    """

    module: str
    rows: str = ""
    columns: str = ""
    cut: str = ""
    gather: bool = False
    scatter: bool = False
    partial: bool = False
    inside: tuple[tuple[str, int, str], ...] = ()
    outputs: str = ""
    once: tuple[str, ...] = ()
    own: tuple[tuple[str, int, str], ...] = ()

    def __post_init__(self) -> None:
        ways = [
            bool(self.rows),
            bool(self.columns),
            self.partial,
            bool(self.inside),
            bool(self.outputs),
            bool(self.own),
        ]
        wrong = (self.gather and not self.rows) or (self.once and not self.inside)
        if sum(map(bool, ways)) != 1 or bool(self.cut) == self.partial or wrong:
            raise ValueError(
                f"a rule for {self.module!r} got rows={self.rows!r}, columns={self.columns!r}, cut={self.cut!r}, "
                f"partial={self.partial}, inside={self.inside}, outputs={self.outputs!r}, own={self.own}, "
                f"once={self.once}, gather={self.gather}; it takes rows and cut (and gather), or columns and cut (and "
                "scatter), inside and cut (and once), own and cut, outputs and cut, or partial alone."
            )
        _ = self.within  # says what is wrong with dims of it
        if not (self.partial or self.inside or self.own) and self.cut not in {
            d.name for f in self.dims.factors for d in _names(f)
        }:
            raise ValueError(f"a rule for {self.module!r} cuts {self.cut!r}, and has the dims {self.dims.text!r}.")

    @cached_property
    def dims(self) -> Dims:
        """Of what is dealt."""
        return Dims.parse(self.rows or self.columns or self.outputs)

    @cached_property
    def within(self) -> dict[str, Rule]:
        """Of ``inside`` and ``own``: by parameter, the rule for its dealt dim."""
        parameters = (*self.inside, *self.own)
        return {name: Rule(module=f"{self.module}.{name}", rows=dims, cut=self.cut) for name, _, dims in parameters}

    def __str__(self) -> str:
        if self.partial:
            return f"{self.module}: whole, gradients are summed"
        if self.outputs:
            return f"{self.module}: whole, of its outputs {self.outputs!r} gradients of {self.cut!r} are summed"
        if self.inside:
            more = f", {', '.join(self.once)} once" if self.once else ""
            return f"{self.module}: {_listed(self.inside)}, cut {self.cut!r}, outputs summed{more}"
        if self.own:
            return f"{self.module}: {_listed(self.own)}, cut {self.cut!r}"
        way = f"rows {self.rows!r}" if self.rows else f"columns {self.columns!r}"
        more = ", outputs gathered" if self.gather else ", of whole inputs" if self.scatter else ""
        return f"{self.module}: {way}, cut {self.cut!r}{more}"


@dataclass(frozen=True, kw_only=True)
class Count:
    """An attribute of some modules that counts what is dealt: ``num_heads``, or ``config.num_attention_heads``.

    Attributes:
        attribute: the name; with a dot, of an object that the module then gets a copy of its own of.
        dims: what it counts: each rank sets the product of its own sizes, whole ones of dims that no rule cuts.
    """

    module: str
    attribute: str
    dims: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute} counts {self.dims!r}"


@dataclass(frozen=True, kw_only=True)
class Take:
    """An argument of some modules that has something for every head: each rank takes its own.

    Attributes:
        argument: the keyword, or the place among those without one.
        dim: which dim of the tensor. dims: what is along it: "batch head".
    """

    module: str
    argument: str | int
    dim: int
    dims: str
    cut: str = HEAD

    def __str__(self) -> str:
        return f"{self.module}: of {self.argument!r} this rank's part of {self.dims!r}"


@dataclass(frozen=True)
class Cut:
    """What of one matrix a rank has, along the dim that is dealt.

    Attributes:
        runs: [start, stop) of the whole dim, each row once.
        take: in what order the model's code sees those rows, as [start, stop) of them; None: as they are.
        shared: other ranks have some of them too.
        before: [start, stop) of what ranks with lower numbers have; empty unless ``shared``.
        total: the size of the whole dim.
    """

    runs: tuple[Run, ...]
    take: tuple[Run, ...] | None
    shared: bool
    total: int
    before: tuple[Run, ...] = ()

    @property
    def size(self) -> int:
        """Of this rank's part."""
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True)
class Plan:
    """Rules for one model.

    Attributes:
        name: whose it is: a family, or where it came from.
        sizes: of named dims: heads, heads of keys and values, the vocabulary.
        rules, counts, takes: see there.
        layers: a pattern of the repeated blocks, in order.
    """

    name: str
    sizes: tuple[tuple[str, int], ...] = ()
    rules: tuple[Rule, ...] = ()
    counts: tuple[Count, ...] = ()
    takes: tuple[Take, ...] = ()
    layers: str = ""

    def __post_init__(self) -> None:
        known = dict(self.sizes)
        wrong = {name: number for name, number in self.sizes if type(number) is not int or number < 1}
        if wrong:
            raise ValueError(f"plan {self.name!r} has the sizes {wrong}; a size is an integer from 1 on.")
        if known.get(HEAD, 0) % known.get(KV, 1):
            raise ValueError(
                f"plan {self.name!r} has {known[HEAD]} query heads for {known[KV]} of keys and values, which do not "
                "divide them."
            )

    @cached_property
    def deals_heads(self) -> bool:
        """Whether ranks get heads of their own: not where attention stays whole."""
        cut = {rule.cut for rule in self.rules} | {take.cut for take in self.takes}
        counted = {d.name for c in self.counts for f in Dims.parse(c.dims).factors for d in _names(f)}
        return not HEADS.isdisjoint(cut | counted)

    def share(self, degree: int, rank: int, grain: int = 1) -> Share:
        """What a rank has of every dim that is dealt.

        Raises:
            ValueError: there are fewer heads than ranks, or less than one rank.
        """
        if degree < 1 or not 0 <= rank < degree:
            raise ValueError(f"degree {degree} and rank {rank}; a degree is at least 1, and ranks count from 0.")
        heads = dict(self.sizes).get(HEAD, degree)
        if heads < degree and self.deals_heads:
            raise ValueError(
                f"degree {degree} with the {heads} query heads of plan {self.name!r}: every rank needs one, so the "
                f"degree is at most {heads}."
            )
        return Share(self.sizes, degree, rank, grain)

    def cut(self, rule: Rule, total: int, degree: int, rank: int, grain: int = 1) -> Cut:
        """What a rank has of a matrix with ``total`` features along the dealt dim; of ``rule``, one of this plan's.

        Raises:
            ValueError: they do not fit.
        """
        return _cut(self, rule, total, degree, rank, grain)

    def rule_of(self, path: str) -> Rule | None:
        """The first rule for the module at ``path``."""
        return next((rule for rule in self.rules if matches(rule.module, path)), None)

    def within(self, prefix: str) -> Plan:
        """The same for a model that has this one as its module ``prefix``."""

        def moved(items: Sequence[Any]) -> Any:
            return tuple(replace(item, module=f"{prefix}.{item.module}") for item in items)

        layers = f"{prefix}.{self.layers}" if self.layers else ""
        return replace(self, rules=moved(self.rules), counts=moved(self.counts), takes=moved(self.takes), layers=layers)

    def as_data(self) -> dict[str, Any]:
        """What JSON can hold; :meth:`of_data` reads it."""
        return {**asdict(self), "sizes": dict(self.sizes)}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Plan:
        """Raises ValueError for names that it does not know, and for values of other types."""
        lists = {"rules": Rule, "counts": Count, "takes": Take}
        given = mapping("a plan", data)
        given["sizes"] = tuple(mapping("sizes of a plan", given.get("sizes", {})).items())
        for key, kind in lists.items():
            items = listed(f"{key} of a plan", given.get(key, ()))
            given[key] = tuple(_made(kind, _plain(mapping(f"one of the {key} of a plan", item))) for item in items)
        return _made(cls, given)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        sizes = ", ".join(f"{number} {name}" for name, number in self.sizes)
        lines = [
            f"plan {self.name}: {sizes}" if sizes else f"plan {self.name}",
            *map(str, (*self.rules, *self.counts, *self.takes)),
        ]
        return "\n  ".join(lines)


def _listed(parameters: Sequence[tuple[str, int, str]]) -> str:
    return ", ".join(f"{name} dim {dim} {dims!r}" for name, dim, dims in parameters)


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    unknown = sorted(set(given) - {f.name for f in fields(kind)})
    if unknown:
        allowed = ", ".join(f.name for f in fields(kind))
        raise ValueError(f"{kind.__name__.lower()} got {', '.join(unknown)}; it has {allowed}.")
    check(kind, given, what=f"a {kind.__name__.lower()}")
    return kind(**given)


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of JSON as the tuples that they were."""

    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, list) else value

    return {key: plain(value) for key, value in item.items()}


def _names(factor: Any) -> tuple[Any, ...]:
    return factor if isinstance(factor, tuple) else (factor,)


@lru_cache(maxsize=4096)
def _cut(plan: Plan, rule: Rule, total: int, degree: int, rank: int, grain: int) -> Cut:
    dims = rule.dims.resolved(dict(plan.sizes), total, rule.module)
    everyone = [stored(dims.runs(rule.cut, plan.share(degree, other, grain))) for other in range(degree)]
    runs, take = everyone[rank]
    covered, _ = stored([run for found, _ in everyone for run in found])
    if covered != [(0, total)]:
        raise AssertionError(f"{rule} leaves out rows of {total} at degree {degree}: {covered}")
    size = sum(stop - start for found, _ in everyone for start, stop in found)
    before, _ = stored([run for found, _ in everyone[:rank] for run in found]) if size > total else ([], None)
    return Cut(tuple(runs), None if take is None else tuple(take), size > total, total, tuple(before))


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in text.split(".")))


def matches(pattern: str, path: str) -> bool:
    """Whether ``path`` is one of the modules that ``pattern`` names."""
    return _pattern(pattern).fullmatch(path) is not None


def wildcards(path: str) -> str:
    """The pattern of the modules that are at ``path`` in any layer: numbers as ``*``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
