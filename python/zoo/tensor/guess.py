"""A guess of the plan of any model, from which outputs of its linear layers go where.

A matrix can be cut by rows, and the next one by columns, where each input feature of the next one depends on few
outputs of those before: on one, as in a perceptron, or on those of one head, as in attention. That is looked for in the
numbers themselves. The model is run once, with the output of every linear layer and embedding made a leaf of autograd;
the gradient of one input feature of a layer is then zero at all outputs that it does not depend on.

What a gradient cannot see (slopes of heads, numbers that the code computes with) the proof sees: the plan is compared
with the whole model on the same example before it is given out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zoo.tensor.plans import Count, Plan, Rule, wildcards
from zoo.tensor.proof import doubled, prove_run

_MOST_FEATURES = 4096
"""Of a layer whose inputs are looked at one by one."""


def guess(model: nn.Module, *args: Any, **kwargs: Any) -> Plan:
    """A plan for ``model``, found from one forward in fp64 on a copy, and proved on it at the degrees 2 and 3.

    Blocks that are repeated in a list are taken to be alike. What no two layers can share the work of stays whole.

    Args:
        args, kwargs: inputs of the model: a small batch of three tokens or more. Sizes of the model are looked at
            feature by feature: of a large one guess on a small one of the same class.

    Raises:
        ValueError: nothing can be cut, parts of the model have different numbers of heads, or the split model computes
            something else: with what differs.
    """
    given, named = doubled((args, kwargs))
    return guess_run(model, lambda model: model(*given, **named))


def guess_run(model: nn.Module, run: Callable[[nn.Module], Any]) -> Plan:
    """As :func:`guess`, from what ``run`` computes with a copy of the model in fp64."""
    found = _Guess(*_watched(model, run))
    plan, uncertain = found.plan(f"guess of {type(model).__name__}"), found.uncertain()
    heads = dict(plan.sizes).get("head", 3)
    why: ValueError | None = None
    for more in dict.fromkeys(((), uncertain["wide"], uncertain["config"], uncertain["wide"] + uncertain["config"])):
        dim = found.dims_of_heads if any(count.dims == "head dim" for count in more) else ()
        tried = replace(plan, counts=plan.counts + more, sizes=plan.sizes + dim)
        try:
            for degree in (2, 3):
                if degree <= heads:
                    prove_run(model, tried, degree, run)
        except ValueError as error:
            why = why or error
        else:
            return tried
    raise why or AssertionError("a plan is proved or refused")


@dataclass
class _Called:
    """A linear layer or an embedding in a forward."""

    path: str
    module: nn.Module
    given: torch.Tensor | None = None
    leaf: torch.Tensor | None = None
    calls: int = 0
    read_by: set[str] = field(default_factory=set)
    """Paths of the linear layers that read its output with no other in between; "" for the model's own outputs."""


@dataclass(frozen=True)
class _Pair:
    """Layers before, and one after them, whose features are those of heads; ``dim`` 1: features by themselves."""

    before: tuple[tuple[str, str], ...]  # path, dims
    after: str
    heads: int
    groups: int
    dim: int
    norms: tuple[str, ...]


def _watched(model: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[nn.Module, dict[str, _Called]]:
    """A copy in fp64 and what its forward called: outputs are leaves.

    Raises:
        ValueError: it has no values to look at.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"a {type(model).__name__} on the meta device has no values, from which a plan could be guessed; give a "
            "small one of the same class."
        )
    model = copy.deepcopy(model).double().eval()
    called = {
        path: _Called(path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) or _is_linear(module)
    }

    def hook(one: _Called) -> Any:
        def after(_: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
            one.calls += 1
            one.given = given[0] if given and isinstance(given[0], torch.Tensor) else None
            # Positive, so that no feature is cut off by a rectifier at all tokens.
            one.leaf = (out.detach().abs() + 0.1).requires_grad_()
            return one.leaf.clone()  # the model may write to it

        return after

    handles = [one.module.register_forward_hook(hook(one)) for one in called.values()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            found = run(model)
    finally:
        for handle in handles:
            handle.remove()
    once = {path: one for path, one in called.items() if one.calls == 1}
    outputs = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.requires_grad]
    for one in [*once.values(), None]:
        many = outputs if one is None else [one.given] if one.given is not None and one.given.requires_grad else []
        for other in _reached(many, list(once.values())):
            other.read_by.add("" if one is None else one.path)
    return model, once


def _is_linear(module: nn.Module) -> bool:
    # Conv1D of transformers has its weight the other way round; the rule is the same.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _reached(tensors: Sequence[torch.Tensor], called: Sequence[_Called]) -> list[_Called]:
    if not tensors or not called:
        return []
    draws = torch.Generator().manual_seed(0)
    total = torch.stack([(x * torch.randn(x.shape, generator=draws, dtype=x.dtype)).sum() for x in tensors]).sum()
    leaves = [one.leaf for one in called if one.leaf is not None]
    grads = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
    return [one for one, grad in zip(called, grads, strict=True) if bool(grad.any())]


class _Guess:
    def __init__(self, model: nn.Module, called: dict[str, _Called]) -> None:
        self._model, self._called = model, called
        self._pairs: list[_Pair] = []

    def plan(self, name: str) -> Plan:
        """Raises ValueError where nothing can be cut."""
        firsts: dict[str, _Called] = {}
        for path, one in self._called.items():
            if _is_linear(one.module):
                firsts.setdefault(wildcards(path), one)
        words = self._vocabulary()
        taken = {rule.module for rule in words}
        for one in firsts.values():
            pair = self._pair(one) if one.path not in taken else None
            if pair is not None and taken.isdisjoint(path for path, _ in pair.before):
                self._pairs.append(pair)
                taken |= {pair.after, *(path for path, _ in pair.before)}
        pairs = self._pairs
        if not pairs:
            raise ValueError(
                f"{type(self._model).__name__}: no linear layer reads features that others make one by one or head by "
                "head, so that nothing can be cut; give a plan (zoo.tensor.Plan)."
            )
        attentions = [pair for pair in pairs if pair.dim > 1]
        kinds = {(pair.heads, pair.groups) for pair in attentions}
        if len(kinds) > 1:
            raise ValueError(
                f"{type(self._model).__name__} has attention with different numbers of heads (of queries, of keys and "
                f"values): {sorted(kinds)}; a plan has one of each. Give a plan (zoo.tensor.Plan)."
            )
        rules = [*words, *(rule for pair in pairs for rule in _rules(pair))]
        heads, groups = next(iter(kinds), (0, 0))
        sizes = (("head", heads), ("kv", groups)) if heads else ()
        return Plan(
            name=name,
            sizes=(*sizes, *((("vocab", self._words()),) if words else ())),
            rules=tuple(dict.fromkeys(rules)),
            counts=tuple(dict.fromkeys(count for pair in attentions for count in self._counts(pair))),
            layers=next((r.module[: r.module.index("*") + 1] for r in rules if "*" in r.module), ""),
        )

    @property
    def dims_of_heads(self) -> tuple[tuple[str, int], ...]:
        """The size "dim" of a plan that counts features of heads."""
        return tuple({("dim", pair.dim): None for pair in self._pairs if pair.dim > 1})[:1]

    # Heads ---------------------------------------------------------------------------------------------------------

    def _pair(self, after: _Called) -> _Pair | None:
        """``after`` with the layers that make its features; None where it cannot be cut by columns."""
        x = after.given
        before = [one for one in self._called.values() if after.path in one.read_by]
        alone = all(one.read_by == {after.path} and _is_linear(one.module) for one in before)
        if x is None or not x.requires_grad or not before or not alone or x.shape[-1] > _MOST_FEATURES:
            return None
        reads, norms = self._reads(after, before)
        heads = _heads_of(reads)
        if heads is None:
            return None
        num, groups = heads
        dim = x.shape[-1] // num
        told, at = [], 0
        for one in before:
            width = one.leaf.shape[-1]  # type: ignore[union-attr]
            dims = _dims_of(reads[:, at : at + width], num, groups, dim)
            if dims is None:
                return None
            told.append((one.path, dims))
            at += width
        if norms is None or (norms and dim == 1):
            return None
        return _Pair(tuple(told), after.path, num, groups, dim, tuple(norms))

    def _reads(self, after: _Called, before: Sequence[_Called]) -> tuple[torch.Tensor, list[str] | None]:
        """(F, G) bool: which of the outputs of the layers before each input feature of ``after`` depends on; and the
        modules whose parameters lie in between, None if heads do not share them alike."""
        x: Any = after.given
        leaves: list[Any] = [one.leaf for one in before]
        own = {id(p) for one in self._called.values() for p in one.module.parameters()}
        between = [(name, p) for name, p in self._model.named_parameters() if id(p) not in own]
        draws = torch.Generator().manual_seed(1)
        rows, masks = [], []
        for feature in range(x.shape[-1]):
            one = x[..., feature]
            total = (one * torch.randn(one.shape, generator=draws, dtype=one.dtype)).sum()
            wanted = [*leaves, *(p for _, p in between)]
            grads = torch.autograd.grad(total, wanted, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([grad.flatten(0, -2).ne(0).any(0) for grad in grads[: len(leaves)]]))
            masks.append([bool(grad.any()) for grad in grads[len(leaves) :]])
        reached = [name for (name, _), here in zip(between, zip(*masks, strict=True), strict=True) if any(here)]
        shared = [name for (name, _), here in zip(between, zip(*masks, strict=True), strict=True) if all(here)]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in reached))
        return torch.stack(rows), modules if reached == shared else None

    def _counts(self, pair: _Pair) -> Iterable[Count]:
        """Attributes, of the modules that have all layers of the pair inside, that hold numbers of heads."""
        path, module = self._around(pair)
        for name, value in vars(module).items():
            dims = _counted(name, value, pair)
            if dims is not None:
                yield Count(module=wildcards(path), attribute=name, dims=dims)

    def uncertain(self) -> dict[str, tuple[Count, ...]]:
        """What may count heads as well: numbers of all their features, and those of a configuration that is kept."""
        found: dict[str, dict[Count, None]] = {"wide": {}, "config": {}}
        for pair in self._pairs:
            path, module = self._around(pair)
            if pair.dim == 1:
                continue
            for name, value in vars(module).items():
                if type(value) is int and value == pair.heads * pair.dim:
                    found["wide"][Count(module=wildcards(path), attribute=name, dims="head dim")] = None
            for name, value in vars(vars(module).get("config", object)).items():
                if (dims := _counted(name, value, pair)) is not None:
                    found["config"][Count(module=wildcards(path), attribute=f"config.{name}", dims=dims)] = None
        return {kind: tuple(counts) for kind, counts in found.items()}

    def _around(self, pair: _Pair) -> tuple[str, nn.Module]:
        """The innermost module that has all layers of the pair inside."""
        parts = [path.split(".")[:-1] for path in (pair.after, *(path for path, _ in pair.before))]
        common = list(takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False)))
        path = ".".join(names[0] for names in common)
        return path, self._model.get_submodule(path)

    # Vocabulary ----------------------------------------------------------------------------------------------------

    def _words(self) -> int | None:
        """How many rows an embedding and a last layer both have."""
        heads = [one for one in self._called.values() if _is_linear(one.module) and one.read_by == {""}]
        sizes = {one.leaf.shape[-1] for one in heads if one.leaf is not None}
        tables = [one.module for one in self._called.values() if isinstance(one.module, nn.Embedding)]
        both = {table.num_embeddings for table in tables} & sizes
        return both.pop() if len(both) == 1 else None

    def _vocabulary(self) -> list[Rule]:
        """Of all tables of that many words, under each of their names, and of last layers with as many outputs."""
        words, found = self._words(), []
        for path, module in self._model.named_modules(remove_duplicate=False):
            one = self._called.get(path)
            if isinstance(module, nn.Embedding) and module.num_embeddings == words:
                found.append(Rule(module=path, rows="vocab", cut="vocab"))
            elif one is not None and one.read_by == {""} and one.leaf is not None and one.leaf.shape[-1] == words:
                found.append(Rule(module=path, rows="vocab", cut="vocab", gather=True))
        return found


def _heads_of(reads: torch.Tensor) -> tuple[int, int] | None:
    """(heads, groups of heads that have something in common) of (F, G): features of a head are neighbours, of one
    number, and have more in common than those of two heads; None where that is not so."""
    features = reads.shape[0]
    common = reads.double() @ reads.double().t()
    own, apart = common.diagonal(), common - torch.diag(common.diagonal())
    most = apart.max() if features > 1 else apart.sum()
    if features < 2 or not own.all() or bool((apart == own.unsqueeze(0)).all(-1).any()):
        return None
    same = apart == most if most > 0 else torch.zeros_like(apart, dtype=torch.bool)
    heads = _blocks(same)
    groups = _blocks(apart > 0)
    if heads is None or groups is None or heads < 2 or heads % groups:
        return None
    return heads, groups


def _blocks(same: torch.Tensor) -> int | None:
    """How many equal blocks along the diagonal ``same`` is made of."""
    features = same.shape[0]
    full = same | torch.eye(features, dtype=torch.bool)
    size = int(full[0].sum())
    if features % size:
        return None
    number = torch.arange(features) // size
    return features // size if torch.equal(full, number.unsqueeze(0) == number.unsqueeze(1)) else None


def _dims_of(reads: torch.Tensor, heads: int, groups: int, dim: int) -> str | None:
    """Named dims of the outputs of one layer; ``reads`` (F, G) as above, of its outputs only."""
    width = reads.shape[1]
    by_head = reads.reshape(heads, dim, width).any(1)  # (H, G)
    each = heads // groups
    of_head = torch.eye(heads, dtype=torch.bool)
    of_group = torch.eye(groups, dtype=torch.bool).repeat_interleave(each, 0)  # (H, K)
    name = "head" if dim > 1 else "inner"
    tail = " dim" if dim > 1 else ""
    known: dict[str, list[torch.Tensor]] = {f"{name}{tail}": [of_head]}
    if groups < heads:
        known[f"kv{tail}"] = [of_group]
        known[f"(head kv kv){tail}"] = [of_head, of_group, of_group]
        query = torch.arange(groups * (each + 2))
        of_row = torch.stack([
            (query // (each + 2) == head // each) & ((query % (each + 2) >= each) | (query % (each + 2) == head % each))
            for head in range(heads)
        ])  # fmt: skip
        known[f"kv (query one=1 one=1){tail}"] = [of_row]
    known |= {f"part={number} {name}{tail}": [of_head] * number for number in (2, 3, 4)}
    for text, owners in known.items():
        together = torch.cat(owners, dim=1)
        if width % together.shape[1] == 0:
            expected = together.repeat_interleave(width // together.shape[1], dim=1)
            if torch.equal(by_head, expected):
                return text
    return None


def _rules(pair: _Pair) -> Iterable[Rule]:
    name = "head" if pair.dim > 1 else "inner"
    for path, dims in pair.before:
        cut = "kv" if dims.startswith("kv") else name
        yield Rule(module=wildcards(path), rows=dims, cut=cut)
    for path in pair.norms:
        yield Rule(module=wildcards(path), partial=True)
    yield Rule(module=wildcards(pair.after), columns=f"{name} dim" if pair.dim > 1 else name, cut=name)


def _counted(name: str, value: Any, pair: _Pair) -> str | None:
    """What an attribute counts, by its name and number."""
    if type(value) is not int:
        return None
    words: Mapping[str, tuple[tuple[str, ...], int]] = {
        "query": (("group", "rep"), pair.heads // pair.groups),
        "kv": (("kv", "key", "value"), pair.groups),
        "head": (("head",), pair.heads),
    }
    found = (dims for dims, (parts, number) in words.items() if value == number and any(part in name for part in parts))
    return next(found, None)
