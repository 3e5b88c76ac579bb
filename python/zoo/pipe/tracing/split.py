"""Any model as a pipeline: its forward is traced, and cut before named submodules."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.layout import declare_tied, declare_unit, is_unit
from zoo.parts import BACKWARD, FORWARD, has_user_hooks, is_watched
from zoo.pipe.module import PipelineModule, builder
from zoo.pipe.tracing.segments import Segment, cut, used
from zoo.pipe.tracing.symbols import Recorded, record

if TYPE_CHECKING:
    from torch import fx

__all__ = ["TracedPipeline", "split"]


def split(
    module: nn.Module, points: Sequence[str] | None = None, *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None, num_stages: int | None = None, example: Any = None,
    leaf_functions: Sequence[Callable[..., Any]] = (), **options: Any,
) -> TracedPipeline:  # fmt: skip
    """A model as a :class:`PipelineModule`, without rewriting it.

    ::

        model = split(LlamaForCausalLM(config), num_stages=4, example={"input_ids": ids, "labels": ids})
        engine, *_ = zoo.engine.initialize(config, model)
        loss = engine.train_batch(batches)  # of dicts like the example

    ``module.forward`` is run once on symbols (``torch.fx``). Submodules that have no cut inside are leaves: called as
    they are, with their hooks and activation checkpointing. All ranks do so, and each keeps its own stages' submodules,
    under the names that they have in ``module``: state dicts of the stages, put together, are the model's. A parameter
    that several stages use is on each of them, and tied (:func:`zoo.layout.declare_tied`). ``module`` itself stays as
    it is; memory of other stages is free when nobody holds it any more, so write ``model = split(model, ...)``. It may
    be on the meta device, if state is loaded later with ``load_state_dict(..., assign=True)``.

    What later stages need of what earlier ones made, inputs of the model included, travels from stage to stage. A value
    that is a tensor in some batches and None in others needs ``{"pipeline": {"dynamic_shapes": true}}``. A stage that
    changes a received tensor in place does not change views of it that another stage has.

    Args:
        module: has to return the same for the same inputs: what its forward does beside (counters, prints, random
            numbers of Python) is done once, when it is traced; buffers that it changes in place are changed each time.
            It is traced in training and in evaluation.
        points: paths of submodules before which a new stage begins, in the order of the forward, and then each stage is
            one layer. None: every called submodule with parameters begins a layer, blocks that are repeated in a list
            are not cut, and ``partition_method`` (by default equal numbers of parameters) says which layers a stage
            has.
        loss_fn: ``loss_fn(outputs, labels)`` of what the model returns, with batches (inputs, labels) or dicts with
            "labels", which the model then does not get. None: the model returns its loss, or an output that has one: a
            dict with "loss", an object with ``.loss``, a tuple that begins with it. In training the last layer hands
            on that alone; in evaluation all that the model returns.
        num_stages: pipeline ranks; not needed with points, nor with ``topology`` or ``mesh``.
        example: a batch of inputs: a dict of keyword arguments, a tuple of positional ones, or one tensor. Then
            branches and loops over shapes are followed as in the example, with a check in each forward that they are
            the same; plain values in a dict (``"use_cache": False``) are the same in all batches, and batches go
            without them. A batch that gives another value, or an argument that the example has not, is refused. Only
            shapes and dtypes of tensors are looked at; submodules and their hooks are called with tensors without
            values. None: forward's parameters without defaults, of which nothing is known, not even that they are
            tensors (``isinstance(x, torch.Tensor)``).
        leaf_functions: functions which the forwards that are cut through find among their globals, and which are
            called in each forward instead of being traced; those that make the masks of Hugging Face models are known.
        options: of :class:`PipelineModule`.

    Raises:
        ValueError: points that are none; a forward that cannot be traced, with its line.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"split() got a {type(module).__name__}; it takes a torch.nn.Module.")
    if loss_fn is not None and isinstance(example, Mapping) and "labels" in example:
        raise ValueError(
            "split() got loss_fn= and an example with 'labels': with a loss_fn these go to it, and the model gets the "
            "rest of the batch; leave one of the two out."
        )
    given, fixed, values = _inputs(module, example)
    through = _through(module, _blocks(module) if points is None else _checked(module, points))
    _check_hooks(through)
    recorded = {
        mode: _traced(module, through, mode, lambda: record(
            module, through, given, fixed=fixed, example=values, functions=leaf_functions
        ))
        for mode in (True, False)
    }  # fmt: skip
    find = _layer_starts if points is None else _point_starts
    found = {mode: find(module, trace, points or ()) for mode, trace in recorded.items()}
    if [path for path, _ in found[True]] != [path for path, _ in found[False]]:
        raise ValueError(
            "the forward calls other submodules in training than in evaluation; name points= that both have in common."
        )
    starts = {mode: [number for _, number in one][1:] for mode, one in found.items()}
    names = [type(module.get_submodule(path)).__name__ for path, _ in found[True]]
    segments = cut(module, recorded, starts, names, loss_only=loss_fn is None, fixed=_defaults(module) | fixed)
    if points is not None:
        options["partition_method"] = "uniform"
        if num_stages is None and not {"topology", "mesh"} & set(options):
            num_stages = _ranks_for(len(segments), builder(options.get("schedule", "1f1b")))
    exactly = points is not None
    return TracedPipeline(module, segments, exactly=exactly, num_stages=num_stages, loss_fn=loss_fn, **options)


class TracedPipeline(PipelineModule):
    """What :func:`split` makes: a :class:`PipelineModule` whose parameters have the names of the original model."""

    def __init__(self, original: nn.Module, segments: list[Segment], *, exactly: bool, **options: Any) -> None:
        self.__dict__["_original"], self.__dict__["_exactly"] = original, exactly
        super().__init__(segments, **options)
        del self.__dict__["_original"]
        self.train(original.training)

    def _add(self, number: int) -> None:
        self._calls[number] = self.specs[number]

    def _bounds_of(self, num_stages: int) -> list[int]:
        if self.__dict__["_exactly"] and self.num_layers != num_stages:
            raise ValueError(
                f"{self.num_layers - 1} points make {self.num_layers} stages, and {self.num_stages} pipeline ranks "
                f"have {num_stages} with this schedule; give {num_stages - 1} points, or num_stages= alone."
            )
        return super()._bounds_of(num_stages)

    def _tie(self) -> None:
        """All layers are known: mount what this rank has."""
        original: nn.Module = self.__dict__["_original"]
        self._check_changed(original)
        users: dict[int, set[int]] = {}
        for stage, rank in enumerate(self.rank_of):
            for segment in self.specs[self.bounds[stage] : self.bounds[stage + 1]]:
                for parameter in used(original, segment.use):
                    users.setdefault(id(parameter), set()).add(rank)
        for name, parameter in original.named_parameters():
            ranks = tuple(sorted(users.get(id(parameter), ())))
            if len(ranks) > 1:
                declare_tied(parameter, name)
                self.tied_ranks[name] = ranks
                if self.stage_id in ranks:
                    self.tied_parameters[name] = parameter
        own = [segment for number, segment in enumerate(self.specs) if number in self._calls]
        _mount(self, original, own, rest=0 in self.stages, everywhere=self.specs)
        for segment in own:
            segment.owner = self

    def _check_changed(self, original: nn.Module) -> None:
        """What one rank changes of its copy, others would not see."""
        segments = [(self._rank_with(number), segment.use) for number, segment in enumerate(self.specs)]
        for rank, use in segments:
            for other, also in segments:
                if other != rank and (both := use.changed & also.attributes):
                    raise ValueError(
                        f"the forward of {type(original).__name__} changes {min(both)!r} on pipeline rank {rank} and "
                        f"reads it on rank {other}, which has a copy; cut so that one rank does both (points=)."
                    )


# What is cut ---------------------------------------------------------------------------------------------------------


def _inputs(module: nn.Module, example: Any) -> tuple[list[str | int], dict[str, Any], dict[str | int, Any] | None]:
    """The arguments that batches give, those that are fixed, and examples of the former."""
    parameters = inspect.signature(module.forward).parameters
    if example is None:
        wanted = [p for p in parameters.values() if p.default is p.empty and p.kind in (0, 1)]
        if not wanted:
            raise ValueError(
                f"{type(module).__name__}.forward has defaults for all of its parameters; give split() an example= of "
                'a batch, such as {"input_ids": ids, "labels": ids}, so that it knows which ones batches have.'
            )
        return list(range(len(wanted))), {}, None
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(example, Mapping) and (any_name or set(example) <= set(parameters)):
        tensors = {name: value for name, value in example.items() if _has_tensors(value)}
        return list(tensors), {name: v for name, v in example.items() if name not in tensors}, dict(tensors)
    if isinstance(example, Mapping) and (known := set(example) & set(parameters)):
        unknown = next(name for name in example if name not in known)
        raise ValueError(
            f"split() got an example with {unknown!r}, which {type(module).__name__}.forward does not take; its "
            f"arguments are {', '.join(parameters)}."
        )
    many = example if isinstance(example, tuple | list) else (example,)
    return list(range(len(many))), {}, dict(enumerate(many))


def _defaults(module: nn.Module) -> dict[str, Any]:
    """What arguments are that nobody gives."""
    parameters = inspect.signature(module.forward).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(value))


def _blocks(module: nn.Module) -> list[str]:
    """Repeated blocks, as seen from outside: children of a container of which there are two or more of one class."""
    found: list[str] = []

    def visit(path: str, inside: nn.Module) -> None:
        children = {f"{path}.{name}" if path else name: child for name, child in inside.named_children()}
        classes = Counter(type(child) for child in children.values())
        container = isinstance(inside, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for name, child in children.items():
            if container and classes[type(child)] > 1 and any(True for _ in child.parameters()):
                found.append(name)
            else:
                visit(name, child)

    visit("", module)
    if not found and len(list(module.named_children())) < 2:
        raise ValueError(
            f"{type(module).__name__} has no list of repeated blocks; name the submodules before which a stage begins: "
            'points=["encoder.second", "head"].'
        )
    return found


def _checked(module: nn.Module, points: Sequence[str]) -> list[str]:
    known = dict(module.named_modules(remove_duplicate=False))
    if isinstance(points, str) or not points or len(set(points)) != len(points):
        raise ValueError(f"points={points!r}; it takes a list of paths of submodules, each once.")
    for point in points:
        if not point or point not in known:
            raise ValueError(
                f"points= names {point!r}, which is no submodule of this {type(module).__name__}; there are "
                f"{', '.join(itertools.islice((name for name in known if name), 12))}, ..."
            )
    return list(points)


def _through(module: nn.Module, points: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that points are inside of."""
    paths = {".".join(point.split(".")[:n]) for point in points for n in range(len(point.split(".")))} | {""}
    return {path: module.get_submodule(path) for path in sorted(paths)}


def _check_hooks(through: Mapping[str, nn.Module]) -> None:
    for path, module in through.items():
        if has_user_hooks(module, FORWARD + BACKWARD):
            raise ValueError(
                f"{path or 'the model'} ({type(module).__name__}) has hooks, and a cut goes through it, so that it is "
                "not called any more; register them on its submodules."
            )
        if is_watched(module):
            raise ValueError(
                f"{path or 'the model'} ({type(module).__name__}) is in an engine, under a ZeRO optimizer or "
                "compressed; split it before that, or call engine.destroy(), optimizer.close() or detach() first."
            )


def _traced(module: nn.Module, through: Mapping[str, nn.Module], mode: bool, trace: Callable[[], Recorded]) -> Recorded:
    before = {path: one.training for path, one in through.items()}
    try:
        for one in through.values():
            one.training = mode
        return trace()
    finally:
        for path, one in through.items():
            one.training = before[path]


def _point_starts(module: nn.Module, trace: Recorded, points: Sequence[str]) -> list[tuple[str, int]]:
    """Each point with the place of the first node inside of it."""
    nodes = list(trace.graph.nodes)
    found = [("", 0)]
    paths = {id(m): path for path, m in reversed(list(module.named_modules()))}
    for point in points:
        path = paths[id(module.get_submodule(point))]
        number = next((i for i, node in enumerate(nodes) if _is_inside(node, path)), None)
        if number is None:
            raise ValueError(f"points= names {point!r}, which the forward does not call.")
        if number <= found[-1][1] and len(found) > 1:
            raise ValueError(
                f"points= names {found[-1][0]!r} before {point!r}, and the forward calls them the other way round."
            )
        found.append((path, number))
    return found


def _is_inside(node: fx.Node, path: str) -> bool:
    where = str(node.target) if node.op == "call_module" else node.meta["path"]
    return where == path or where.startswith(f"{path}.")


def _layer_starts(module: nn.Module, trace: Recorded, points: Sequence[str]) -> list[tuple[str, int]]:
    """Each called submodule with parameters, and its place; the first layer begins where the forward does."""
    found = [
        (str(node.target), number)
        for number, node in enumerate(trace.graph.nodes)
        if node.op == "call_module" and any(True for _ in module.get_submodule(str(node.target)).parameters())
    ]
    if not found:
        raise ValueError(f"{type(module).__name__}.forward calls no submodule with parameters; nothing can be cut.")
    return [(found[0][0], 0), *found[1:]]


def _ranks_for(num_stages: int, schedule: Any) -> int:
    if hasattr(schedule, "for_model"):
        raise ValueError(
            "split() got points= and a schedule that depends on the model; give num_stages=, the number of pipeline "
            "ranks."
        )
    for ranks in range(1, num_stages + 1):
        if len(tuple(schedule.placement(ranks))) == num_stages:
            return ranks
    raise ValueError(
        f"{num_stages - 1} points make {num_stages} stages, and this schedule has another number of them on any number "
        "of ranks; give as many points as it needs."
    )


# What a rank keeps ---------------------------------------------------------------------------------------------------


def _mount(
    owner: nn.Module, original: nn.Module, own: Sequence[Segment], *, rest: bool, everywhere: Sequence[Segment]
) -> None:
    """Give ``owner`` what its segments use, under the original names, in the original order.

    Modules that are cut through become containers without a forward, so that what they hold themselves belongs to the
    whole. A parameter of which only the second name is used here is held under its first one as well: that is its name
    in the whole model. ``rest``: what no segment uses is here.
    """
    called = {id(original.get_submodule(path)) for segment in own for path in segment.use.modules}
    wanted = {id(p) for segment in own for p in used(original, segment.use)}
    read = {path for segment in own for path in segment.use.attributes}
    elsewhere = {id(p) for segment in everywhere for p in used(original, segment.use)}
    inside = {path for segment in everywhere for path in segment.use.modules}
    read_by_any = {path for segment in everywhere for path in segment.use.attributes}
    first = {name for name, _ in original.named_parameters()}
    whole: list[str] = []
    for path, module in original.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{there}.") for there in whole):
            continue
        if path and id(module) in called:
            whole.append(path)
            _place(owner, original, path)._modules[path.rpartition(".")[2]] = module
            if not is_unit(module):
                declare_unit(module, whole=False)
            continue
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}" if path else name
            here = parameter is not None and id(parameter) in wanted and full in first
            if full in read or here or (rest and parameter is not None and id(parameter) not in elsewhere):
                _place(owner, original, full)._parameters[name] = parameter
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            unused = full not in read_by_any and not any(full.startswith(f"{there}.") for there in inside)
            if full in read or (rest and unused):
                there = _place(owner, original, full)
                there._buffers[name] = buffer
                if name in module._non_persistent_buffers_set:
                    there._non_persistent_buffers_set.add(name)


def _place(owner: nn.Module, original: nn.Module, path: str) -> nn.Module:
    """The container that ``path`` is in, made where it is missing."""
    at: Any = owner
    like: Any = original
    for name in path.split(".")[:-1]:
        like = like._modules[name]
        found = at._modules.get(name)
        if found is None:
            found = at._modules[name] = nn.ModuleDict()
            found.__dict__.update({key: value for key, value in vars(like).items() if key.startswith("_zoo_")})
        at = found
    return at  # type: ignore[no-any-return]
