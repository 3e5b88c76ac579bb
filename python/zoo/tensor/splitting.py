"""A plan put into a model: every rank keeps its parts, and layers know of the others.

``split`` may be given a model with values, the same ones on all ranks, or one on the meta device, whose parts are then
loaded (:mod:`zoo.tensor.loading`). Nothing is changed before everything was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import Box, Boxes, declare_partial, declare_split
from zoo.tensor.adapters import home
from zoo.tensor.agreement import all_or_none, description
from zoo.tensor.counting import Setting, counts_of, takes_of
from zoo.tensor.dropout import Dealt, WholeMasks, drops
from zoo.tensor.guard import guard
from zoo.tensor.layers import Column, Direct, Drop, Features, Inside, Layer, Part, Row, Vocabulary, become, part_of
from zoo.tensor.plans import AXIS, Cut, Plan, Rule, matches
from zoo.tensor.region import PIECES, Region
from zoo.tensor.sequence import Place, SequenceRegion, gather_tokens
from zoo.tensor.shares import HEAD

LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", "FalconLinear")
TURNED = ("Conv1D",)


@dataclass(frozen=True)
class _Change:
    """Of one module."""

    path: str
    module: nn.Module
    rule: Rule
    kind: type[Layer]
    part: Part | None
    parameters: tuple[tuple[nn.Parameter, int, Cut | None], ...]
    """(parameter, dim, what of it stays; None for all of it, with a part of the gradient)"""


def split(
    model: nn.Module, plan: Plan, mesh: Any, *, training: bool = True, grain: int = 1, sequence: bool = False,
    overlap: bool = False, axis: str = AXIS,
) -> Region:  # fmt: skip
    """Leave on every rank its part of ``model``, in place. Collective over the axis, for its communicator.

    Args:
        model: on any device, the same on all ranks.
        plan: its rules; patterns count from ``model``.
        mesh: a DeviceMesh with the axis ``axis``, or a Communicator of its ranks.
        training: keys and values that several ranks need stay whole on each, so that there is one of each to update.
            Else each rank has copies of those that it needs.
        grain: hidden features and the vocabulary are dealt in multiples of this.
        sequence: between blocks each rank has a share of the tokens (:mod:`zoo.tensor.sequence`).
        overlap: outputs of row-parallel layers are made in pieces, and one is summed while the next is computed. The
            same numbers of bytes in more messages; not with ``sequence``.

    Returns:
        The region, for a loss over parts.

    Raises:
        ValueError: the plan does not fit the model or the degree. Nothing was changed.
    """
    comm = mesh if isinstance(mesh, Communicator) else Communicator.of_axes(_with_names(mesh), [axis])

    def prepare() -> _Prepared:
        if overlap and sequence:
            raise ValueError(
                "overlap=True with sequence=True: tokens are summed and scattered whole; leave one of them out."
            )
        return _prepared(model, plan, comm, training, grain, sequence)

    def alike(_: _Prepared) -> dict[str, Any]:
        return {"plan": plan.as_data(), "setting": (training, grain, sequence, overlap), **description(model)}

    prepared = all_or_none(comm, "splitting a model", prepare, alike)
    prepared.region.pieces = PIECES if overlap else 1
    if comm.size == 1:
        return prepared.region
    if comm is not mesh:
        comm.share_memory()
    return _apply(model, plan, prepared, axis)


def split_alone(
    model: nn.Module, plan: Plan, comm: Any, *, training: bool = True, grain: int = 1, sequence: bool = False
) -> Region:  # fmt: skip
    """The same, of a rank that asks no other one whether it agrees."""
    prepared = _prepared(model, plan, comm, training, grain, sequence)
    return prepared.region if comm.size == 1 else _apply(model, plan, prepared, AXIS)


def _with_names(mesh: Any) -> Any:
    if not getattr(mesh, "mesh_dim_names", None):
        raise ValueError(
            f"split got {mesh!r} as its mesh; it takes a DeviceMesh with named dims, as "
            "init_device_mesh('cpu', (1, 2), mesh_dim_names=('data', 'tensor')) makes it, or a Communicator."
        )
    return mesh


@dataclass(frozen=True)
class _Prepared:
    """What will be done, after everything was checked."""

    region: Region
    setting: Setting
    changes: list[_Change]
    counts: list[Callable[[], None]]
    takes: list[Callable[[], Any]]
    tokens: _Tokens | None


def _prepared(
    model: nn.Module, plan: Plan, comm: Communicator, training: bool, grain: int, sequence: bool
) -> _Prepared:  # fmt: skip
    setting, region = Setting(comm, training, grain), SequenceRegion(comm) if sequence else Region(comm)
    changes = _changes(model, plan, setting, region)
    tokens = _tokens(model, plan, changes) if sequence else None
    return _Prepared(region, setting, changes, counts_of(model, plan, setting), takes_of(model, plan, setting), tokens)


def _apply(model: nn.Module, plan: Plan, prepared: _Prepared, axis: str) -> Region:
    region, done = prepared.region, dict[int, str]()
    for change in prepared.changes:
        for parameter, dim, cut in change.parameters:
            if done.setdefault(id(parameter), change.path) == change.path:
                _cut(parameter, dim, cut, axis)
        become(change.module, change.kind, change.part)
        if change.part is not None:
            _resize(change.module, change.part, change.kind)
    for apply in [*prepared.counts, *prepared.takes]:
        apply()
    region.draws = drops(model)
    _draw_whole_masks(prepared.changes, plan, prepared.setting, region, model)
    guard(model, [change.path for change in prepared.changes])
    if isinstance(region, SequenceRegion) and prepared.tokens is not None:
        _share_tokens(*prepared.tokens, region, axis)
    return region


_Tokens = tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]], list[nn.Parameter]]
"""Layers and blocks in them, by path, and parameters that see a share of the tokens alone."""


def _tokens(model: nn.Module, plan: Plan, changes: list[_Change]) -> _Tokens:
    """Raises ValueError for a model that is not made of layers whose blocks can gather tokens."""
    why = f"sequence=True with plan {plan.name!r}"
    layers = [(path, module) for path, module in model.named_modules() if plan.layers and matches(plan.layers, path)]
    if not layers:
        raise ValueError(f"{why}, which names no layers that the model has.")
    inside = tuple(f"{path}." for path, _ in layers)
    mine = [change for change in changes if change.path.startswith(inside)]
    for change in mine:
        if change.kind in (Inside, Direct):
            raise ValueError(f"{why}: {change.path} reads what is computed from all tokens. Leave sequence=True out.")
    paths = dict.fromkeys(change.path.rpartition(".")[0] for change in mine if change.kind is Column)
    for path, _ in layers:
        if path in paths:
            raise ValueError(
                f"{why}: matrices of {path} are not in modules of their own in it, which could gather tokens for them. "
                "Leave sequence=True out."
            )
    blocks = [(path, model.get_submodule(path)) for path in paths]
    ruled = {id(parameter) for change in mine for parameter, _, _ in change.parameters}
    rows = {id(change.module) for change in mine if change.kind is Row}
    for path, block in blocks:
        for inner in block.modules():
            if id(inner) not in rows and any(id(p) not in ruled for p in inner.parameters(recurse=False)):
                raise ValueError(
                    f"{why}: in {path} a {type(inner).__name__} without a rule sees all tokens, and its gradient would "
                    "be summed twice. Leave sequence=True out."
                )
    whole = [p for _, layer in layers for p in layer.parameters() if id(p) not in ruled]
    return layers, blocks, whole


def _share_tokens(
    layers: list[tuple[str, nn.Module]], blocks: list[tuple[str, nn.Module]], whole: list[nn.Parameter],
    region: SequenceRegion, axis: str,
) -> None:  # fmt: skip
    ids = {id(parameter) for parameter in whole}
    for parameter in whole:  # each rank sees its own tokens
        declare_partial(parameter, [axis])
    for _, block in blocks:
        gather_tokens(block, region)
    for number, (path, layer) in enumerate(layers):
        for module in layer.modules():
            own = any(id(p) in ids for p in module.parameters(recurse=False))
            if own and module is not layer and not isinstance(module, Layer):
                become(module, Layer, None)
        masks = WholeMasks(path, region, None, ()) if drops(layer) else None
        Place(region, masks, number == 0, number == len(layers) - 1).give(layer)


def _draw_whole_masks(
    changes: list[_Change], plan: Plan, setting: Setting, region: Region, model: nn.Module
) -> None:  # fmt: skip
    """Modules with layers of a region that drop something: in some models the ways in and out are in two of them."""
    share = plan.share(setting.comm.size, setting.comm.rank, setting.grain)
    heads = None
    if HEAD in share.known and plan.deals_heads:
        queries = share.heads.queries
        heads = Dealt(queries.start, queries.stop, share.heads.num)
    found: dict[str, list[Dealt]] = {}
    for change in changes:
        part, path = change.part, home(model, change.path)
        if change.kind not in (Row, Column) or part is None or part.sizes is not None:
            continue
        features = found.setdefault(path, [])
        if len(part.cut.runs) == 1 and part.take is None and part.rows is None:
            features.append(Dealt(*part.cut.runs[0], part.cut.total))
    for path, features in found.items():
        module = model.get_submodule(path)
        masks = WholeMasks(path, region, heads, tuple(dict.fromkeys(features)))
        if drops(module):
            masks.attach(module)
        elif region.draws:
            masks.watch(module)
    if region.draws and "" not in found:
        WholeMasks("", region, None, ()).watch(model)


def _changes(model: nn.Module, plan: Plan, setting: Setting, region: Region) -> list[_Change]:
    found, fitting = [], set()
    for path, module in model.named_modules():
        rule = plan.rule_of(path)
        if rule is None:
            continue
        fitting.add(rule)
        if rule.inside and callable(getattr(type(module), "enter_mesh", None)):
            continue  # experts that see to it themselves what ranks of every axis have of them (zoo.layout.enter_mesh)
        if part_of(module) is not None:
            raise ValueError(f"{path or type(module).__name__} is split already; a model is split once.")
        holder = model.get_submodule(path.rpartition(".")[0])
        if holder is not module and isinstance(holder, nn.MultiheadAttention):
            raise ValueError(
                f"{path} lies in a {type(holder).__name__}, which computes with its weight and does not call it; leave "
                "it whole, or write attention with linear layers of its own."
            )
        found.append(_change(path, module, rule, plan, setting, region))
    _check_rules(model, plan, [rule for rule in plan.rules if rule not in fitting])
    _check_ties(found, model)
    return found


def _check_rules(model: nn.Module, plan: Plan, unused: list[Rule]) -> None:
    """Raise ValueError where rules are for no module, or for those that another rule is for already."""
    for rule in unused:
        path = next((path for path, _ in model.named_modules() if matches(rule.module, path)), None)
        first = None if path is None else plan.rule_of(path)
        if first is not None:
            raise ValueError(
                f"plan {plan.name!r} has the rule {rule}, and before it {first}; the first one counts for {path}. "
                "Leave one of them out, or put the one for fewer modules first."
            )
    if unused:
        paths = [path for path, module in model.named_modules() if path and not list(module.children())]
        raise ValueError(
            f"plan {plan.name!r} has rules for {', '.join(rule.module for rule in unused)}, and the model has no such "
            f"modules; it has {', '.join(paths[:6])}, …"
        )


def _change(
    path: str, module: nn.Module, rule: Rule, plan: Plan, setting: Setting, region: Region
) -> _Change:  # fmt: skip
    parameters = dict(module.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{path}.{name} is a {type(parameter).__name__}; split a model before its parameters are partitioned "
                "or quantised."
            )
        if parameter.grad is not None:
            raise ValueError(f"{path}.{name} has a gradient, of the whole of it; split a model before its backward.")
    if "forward" in module.__dict__ or type(module).__mro__[1].__name__ == type(module).__name__:
        raise ValueError(
            f"{path} has a forward that was put in its place, as compression does, and that a split layer would not "
            "call; split a model first."
        )
    if isinstance(module, nn.Dropout):
        return _Change(path, module, rule, Drop, Part(region, _dropped(path, rule, plan, setting)), ())
    if rule.partial:
        return _Change(path, module, rule, Layer, None, tuple((p, 0, None) for p in parameters.values()))
    if rule.outputs:
        return _Change(path, module, rule, Direct, _direct(rule, plan, region), ())
    if rule.inside or rule.own:
        return _inside(path, module, rule, plan, setting, region)
    turned = _is_turned(path, module)
    if "weight" not in parameters:
        raise ValueError(
            f"{path} has the parameters {', '.join(parameters)} and makes its weight of them, as in weight norm "
            "and pruning; split a model before that."
        )
    weight = parameters["weight"]
    embedding = isinstance(module, nn.Embedding)
    dim = int(bool(rule.columns)) if not turned else int(bool(rule.rows))
    total = weight.shape[dim]
    comm = setting.comm
    cut = plan.cut(rule, total, comm.size, comm.rank, setting.grain)
    stays = cut.shared and setting.training
    rows = cut.runs if stays else None
    part = Part(region, cut, dim, turned=turned, take=cut.take, rows=rows, scatter=rule.scatter, path=path)
    if rule.gather:
        sizes = [plan.cut(rule, total, comm.size, rank, setting.grain) for rank in range(comm.size)]
        part.sizes = tuple(other.size for other in sizes)
    if (stays or cut.take) and (rule.columns or embedding):
        raise ValueError(
            f"{path}: at degree {comm.size} ranks have heads of {rule.columns or rule.rows!r} in common, which only "
            "the rows of a linear layer can have."
        )
    if (rule.gather or rule.scatter or (embedding and rule.rows)) and len(cut.runs) > 1:
        raise ValueError(f"{path}: its part is {len(cut.runs)} ranges; a vocabulary, or what is gathered, is one.")
    kind = _kind(module, rule)
    of_weight = (weight, dim, None if stays else cut)
    of_bias = [(parameters["bias"], 0, None if stays else cut)] if rule.rows and "bias" in parameters else []
    return _Change(path, module, rule, kind, part, (of_weight, *of_bias))


def _dropped(path: str, rule: Rule, plan: Plan, setting: Setting) -> Cut:
    """What a dropout gets: nothing of it is dealt, or as much as of the columns of the matrix beside it."""
    if rule.partial:
        return Cut((), None, False, 0)
    comm = setting.comm
    cut = plan.cut(rule, rule.dims.total, comm.size, comm.rank, setting.grain)
    if cut.shared or cut.take:
        raise ValueError(f"{path}: at degree {comm.size} ranks have features of what it drops in common.")
    return cut


def _inside(
    path: str, module: nn.Module, rule: Rule, plan: Plan, setting: Setting, region: Region
) -> _Change:  # fmt: skip
    parameters, comm = dict(module.named_parameters(recurse=False)), setting.comm
    names, missing = {*rule.within, *rule.once}, set(rule.within) - set(parameters)
    if missing or (rule.inside and set(parameters) != names):
        raise ValueError(
            f"{path} has the parameters {', '.join(parameters)}, and the rule for it names {', '.join(sorted(names))}; "
            "of a module whose output is a sum over ranks it takes all of them."
        )
    cuts = []
    for name, dim, _ in (*rule.inside, *rule.own):
        parameter = parameters[name]
        dim %= parameter.ndim
        cut = plan.cut(rule.within[name], parameter.shape[dim], comm.size, comm.rank, setting.grain)
        if cut.shared or cut.take:
            raise ValueError(f"{path}.{name}: heads, which ranks may have in common, are cut in linear layers only.")
        cuts.append((parameter, dim, cut))
    if rule.own:
        return _Change(path, module, rule, Layer, None, tuple(cuts))
    first, dim, cut = cuts[0]
    features = first.shape[-2] if dim == first.ndim - 1 else first.shape[-1]
    whole = tuple((parameters[name], 0, None) for name in rule.once)
    part = Part(region, cut, dim, features=features, once=rule.once)
    return _Change(path, module, rule, Inside, part, (*cuts, *whole))


def _direct(rule: Rule, plan: Plan, region: Region) -> Part:
    """What the outputs of a whole module are, one after the other."""
    sizes, start = dict(plan.sizes), 0
    for dim in (dim for factor in rule.dims.factors for dim in (factor if isinstance(factor, tuple) else (factor,))):
        size = sizes.get(dim.name) if dim.size is None else dim.size
        if size is None:
            raise ValueError(f"{rule}: the plan has no size for {dim.name!r}.")
        if dim.name == rule.cut:
            return Part(region, Cut((), None, False, 0), direct=(start, start + size))
        start += size
    raise AssertionError(f"{rule} does not have the dim that it cuts")


def _is_turned(path: str, module: nn.Module) -> bool:
    name = type(module).__name__
    linear = type(module) is nn.Linear or (isinstance(module, nn.Linear) and name in LINEAR)
    if not (linear or name in TURNED or isinstance(module, nn.Embedding)):
        raise ValueError(
            f"{path} is a {name}; a plan cuts torch.nn.Linear and Embedding, and transformers' Conv1D. For another "
            "layer with their mathematics, replace it by one of these."
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        raise ValueError(f"{path}: max_norm, sparse and scale_grad_by_freq of an embedding are not for parts of it.")
    return name in TURNED


def _kind(module: nn.Module, rule: Rule) -> type[Layer]:
    if isinstance(module, nn.Embedding):
        return Vocabulary if rule.rows else Features
    return Column if rule.rows else Row


def _check_ties(changes: Iterable[_Change], model: nn.Module) -> None:
    """Raise ValueError where a parameter of two modules is cut in two ways, or a matrix of one that is in no rule."""
    first: dict[int, tuple[str, int, Any]] = {}
    for change in changes:
        for parameter, dim, cut in change.parameters:
            path, *other = first.setdefault(id(parameter), (change.path, dim, cut))
            if other != [dim, cut]:
                raise ValueError(
                    f"{path} and {change.path} have one parameter, and the plan cuts it in two ways; a tied head is "
                    "cut as its embedding is: rows='vocab', cut='vocab'."
                )
    ruled = {id(change.module) for change in changes}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False) if id(module) not in ruled else ():
            if id(parameter) in first and parameter.ndim > 1:  # a bias may be kept where nothing computes with it
                raise ValueError(
                    f"{path} has the parameter of {first[id(parameter)][0]}, and no rule; give it one that cuts in the "
                    "same way."
                )


def _cut(parameter: nn.Parameter, dim: int, cut: Cut | None, axis: str) -> None:
    if cut is None:
        declare_partial(parameter, [axis])
        return
    whole = tuple(parameter.shape)
    parts = [parameter.detach().narrow(dim, start, stop - start) for start, stop in cut.runs]
    parameter.data = torch.cat(parts, dim)  # memory of its own: the whole one is given back
    boxes = []
    for start, stop in cut.runs:
        offsets, sizes = [0] * len(whole), list(whole)
        offsets[dim], sizes[dim] = start, stop - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    declare_split(parameter, [axis], shape=whole, boxes=Boxes.side_by_side(boxes, dim))


def _resize(module: nn.Module, part: Part, kind: type[Layer]) -> None:
    names = {Column: "out_features", Row: "in_features", Vocabulary: "num_embeddings", Features: "embedding_dim"}
    if kind not in names:
        return
    name = {"out_features": "nf", "in_features": "nx"}[names[kind]] if part.turned else names[kind]
    if part.sizes is None and part.rows is None and hasattr(module, name):
        setattr(module, name, part.cut.size)
