"""A model as a sequence of layers, of which each rank has those of its stages."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.cost.stages import LayerSize
from zoo.layout import declare_tied, declare_unit, split_of
from zoo.pipe.documented import Documented
from zoo.pipe.misfits import misfit, outline_of
from zoo.pipe.partition import split_layers
from zoo.pipe.runtime.losses import again
from zoo.pipe.sizes import size_of
from zoo.pipe.specs import LayerSpec, TiedCall, TiedLayerSpec
from zoo.pipe.topology import PipeDataParallelTopology, ProcessTopology
from zoo.pipe.tracing.segments import Segment
from zoo.pipe.trees import outline_text
from zoo.registry import DEFAULT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PipelineModule"]

AXIS = "pipe"
_log = logging.getLogger("zoo.pipe")


class PipelineModule(Documented, nn.Module):
    """x ↦ layer[L-1](… layer[1](layer[0](x))), cut into stages along the mesh axis "pipe".

    ::

        model = PipelineModule([LayerSpec(nn.Linear, 8, 8), torch.relu, LayerSpec(nn.Linear, 8, 2)], num_stages=2,
                               loss_fn=nn.functional.cross_entropy)
        engine, *_ = zoo.engine.initialize(config, model)
        loss = engine.train_batch(batches)

    A rank builds the layers of its own stages only. Parameters are called as in ``nn.Sequential(*layers)``: layer 3 is
    ``3.weight`` on whichever rank it is. A tied layer's are ``tied_modules.KEY.weight``.

    What a layer returns is the one argument of the next: a tensor, or tuples, lists and dicts of tensors and plain
    values. On the last stage ``loss_fn(outputs, labels)`` is the micro-batch's mean loss; without a ``loss_fn`` the
    last layer returns it.

    Args:
        layers: specs, modules and functions, or an ``nn.Sequential``. A module is kept where its stage is, and let go
            elsewhere.
        num_stages: pipeline ranks; or give ``topology``, or ``mesh`` with an axis "pipe".
        topology: of all ranks of the job, with an axis "pipe".
        loss_fn: see above.
        seed_layers: before layer i is built, and before it runs, ``seed_fn`` is called with a seed that depends on i
            and not on the stages: at construction ``base_seed + i``; in forward one for each (micro-batch,
            data-parallel rank, i), so that dropout does not repeat.
        seed_fn: ``torch.manual_seed`` and ``random.seed`` by default.
        base_seed: see ``seed_layers``.
        partition_method: "parameters" (equal numbers of parameters), "uniform" (of layers), "type:REGEX" (of layers
            whose class name matches), or a list with one weight for each layer, such as
            :func:`zoo.pipe.measure` returns.
        activation_checkpoint_interval: layers between two activations that are kept; 0 keeps all.
        activation_checkpoint_func: ``f(function, *inputs)``; by default the component ``activation_checkpoint.zoo``,
            that is :func:`zoo.activation_checkpointing.checkpoint`, which follows ``configure`` and the section
            ``activation_checkpointing``.
        checkpointable_layers: names of classes; only runs in which one of them is are checkpointed. None: all.
        schedule: name of the schedule, or a builder (``zoo.pipe.schedules``): it says how many stages a rank has.
            "auto": the one that the forecast for these layers puts first; :class:`zoo.pipe.schedules.auto.AutoSchedule`
            has options. A mapping {"type": name, "params": {...}} gives options too.
        mesh: a DeviceMesh with an axis "pipe", instead of ``num_stages``.

    Attributes:
        num_stages: pipeline ranks. stage_id: this rank's place among them. stages: the numbers of its stages.
        bounds: stage s has the layers bounds[s] to bounds[s+1]-1.

    Raises:
        ValueError: arguments that exclude each other, sizes that do not fit, a stage without parameters, a module or
            parameter that layers on several ranks have and no TiedLayerSpec describes.
    """

    engine_runner = "pipeline"

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None, checkpointable_layers: Sequence[str] | None =
        None, *, schedule: Any = "1f1b", mesh: DeviceMesh | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._topology = _topology(num_stages, topology, mesh)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.num_stages: int = self._topology.get_dim(AXIS)
        self.stage_id: int = getattr(self._topology.get_coord(rank), AXIS)
        self.loss_fn, self.seed_layers, self.base_seed = loss_fn, seed_layers, base_seed
        self.seed_fn = _seed if seed_fn is None else seed_fn
        _check_arguments(layers, loss_fn, activation_checkpoint_interval, checkpointable_layers)
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or _checkpoint
        self.checkpointable_layers = checkpointable_layers
        self.specs = list(layers)
        _check_layers(self.specs)
        self.num_layers = len(self.specs)
        counts = [_num_parameters(spec) for spec in self.specs]
        # Modules may be let go below.
        self._sized = [spec if isinstance(spec, LayerSpec) else size_of(spec) for spec in self.specs]
        self._counts, self._names = counts, list(map(_name_of, self.specs))
        if self.stage_id == 0 and activation_checkpoint_interval and checkpointable_layers is not None:
            _tell_of_names(checkpointable_layers, self._names)
        self._partition_method = partition_method
        self.schedule = self.adapted(builder(schedule))
        self.rank_of = tuple(self.schedule.placement(self.num_stages))
        self.stages = tuple(s for s, r in enumerate(self.rank_of) if r == self.stage_id)
        self.bounds = self._bounds_of(len(self.rank_of))
        self._check_parameters(self.rank_of)
        self._check_shared()
        self._outlines = self._outlined()
        self._calls: dict[int, Callable[[Any], Any]] = {}
        self.tied_modules = nn.ModuleDict()
        self.tied_ranks, self.tied_parameters = {}, {}
        for stage in self.stages:
            for number in range(self.bounds[stage], self.bounds[stage + 1]):
                self._add(number)
        self._tie()
        self.foreign_names = {
            f"{number}.": f"tied_modules.{spec.key}." for number, spec in enumerate(self.specs)
            if isinstance(spec, TiedLayerSpec)
        }  # fmt: skip
        self.specs = [spec if number in self._calls else None for number, spec in enumerate(self.specs)]
        self.micro_offset = 0
        """Which forward this is: counted over (step, micro-batch, data-parallel rank) by the runner."""

    rank_of: tuple[int, ...]

    def adapted(self, schedule: Any) -> Any:
        """The builder of a schedule, for the layers of this model where it asks for them (``for_model``)."""
        if not hasattr(schedule, "for_model"):
            return schedule
        return schedule.for_model(
            lambda: [one if isinstance(one, LayerSize) else size_of(one) for one in self._sized], self._bounds_of,
            checkpoint_interval=self.activation_checkpoint_interval, checkpointed=self._would_checkpoint,
            rank_of=self.__dict__.get("rank_of"), usable=self._check_parameters, logs=self.stage_id == 0,
        )  # fmt: skip

    def _would_checkpoint(self, numbers: range) -> bool:
        """:meth:`_may_checkpoint`, of layers on any rank."""
        names = self.checkpointable_layers
        if names is None:
            return any(self._counts[n] for n in numbers)
        return any(self._names[n] in names for n in numbers)

    def _bounds_of(self, num_stages: int) -> list[int]:
        return split_layers(self._partition_method, num_stages, self._names, lambda: self._counts)

    # Building --------------------------------------------------------------------------------------------------------

    def _check_parameters(self, rank_of: Sequence[int]) -> None:
        """Every rank has something to train, which an optimizer asks for."""
        bounds = self._bounds_of(len(rank_of))
        for rank in range(self.num_stages):
            stages = [s for s, r in enumerate(rank_of) if r == rank]
            numbers = [n for s in stages for n in range(bounds[s], bounds[s + 1])]
            if not any(self._counts[n] for n in numbers):
                named = ", ".join(f"{n} ({self._names[n]})" for n in numbers[:5])
                raise ValueError(
                    f"pipeline rank {rank} of {self.num_stages} has no parameters: its layers are {named or 'none'}. "
                    "Use fewer stages, or another partition_method."
                )

    def _outlined(self) -> list[Any]:
        """The layers without memory, where the first stage is."""
        if self.num_stages == 1 or not self.is_first_stage:
            return []
        return [outline_of(layer) for layer in self.specs]

    def forget_outlines(self) -> None:
        """Nobody will ask whether the layers fit any more."""
        self._outlines = []

    def misfit(self, x: Any) -> str | None:
        """On the rank with the first stage: a sentence on the first layer that does not take what it would get in a
        forward of ``x``, found without numbers (:mod:`zoo.pipe.misfits`); None where none is known."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return misfit(self._outlines, x, names=self._names, dtype=dtype, training=self.training)

    def _rank_with(self, number: int) -> int:
        """The pipeline rank that has a layer."""
        return self.rank_of[bisect.bisect_right(self.bounds, number) - 1]

    def _check_shared(self) -> None:
        """What layers on several ranks share would be one thing at first, and then a copy on each rank."""
        first: dict[int, tuple[int, str]] = {}
        for number, layer in enumerate(self.specs):
            if not isinstance(layer, nn.Module):
                continue
            for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers()):
                before, its_name = first.setdefault(id(tensor), (number, name))
                if self._rank_with(before) != self._rank_with(number):
                    raise ValueError(
                        f"layers {before} ({_name_of(self.specs[before])}) and {number} ({_name_of(layer)}) have one "
                        f"tensor, there {its_name!r} and here {name!r}, and are on the pipeline ranks "
                        f"{self._rank_with(before)} and {self._rank_with(number)}: describe both by "
                        "TiedLayerSpec(key, ...), or have them on one stage by partition_method."
                    )

    def _add(self, number: int) -> None:
        spec = self.specs[number]
        with self._seeded(number):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                self._calls[number] = TiedCall(self.tied_modules[spec.key], spec.forward_fn)
                return
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
            declare_unit(layer, whole=False)
        self._calls[number] = layer

    @contextlib.contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        if self.seed_layers:
            self.seed_fn(self.base_seed + number)
        yield

    def _tie(self) -> None:
        ranks: dict[str, set[int]] = {}
        for number, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                ranks.setdefault(spec.key, set()).add(self._rank_with(number))
        for spec in self.specs:
            if isinstance(spec, TiedLayerSpec) and len(ranks[spec.key]) > 1:
                self.tied_ranks |= {f"{spec.key}.{a}": tuple(sorted(ranks[spec.key])) for a in spec.tied_weight_attr}
            if isinstance(spec, TiedLayerSpec) and spec.key in self.tied_modules:
                module = self.tied_modules[spec.key]
                named = dict(module.named_parameters())
                if len(ranks[spec.key]) > 1:  # one module, on however many ranks
                    for parameter in named.values():
                        if not split_of(parameter).axes:
                            declare_tied(parameter, spec.key)
                for name in spec.tied_weight_attr:
                    if name not in named:
                        raise ValueError(
                            f"TiedLayerSpec({spec.key!r}, {spec.typename.__name__}) ties {name!r}; the module has the "
                            f"parameters {', '.join(named) or 'none'}. Name them by tied_weight_attr=."
                        )
                    declare_tied(named[name], spec.key)
                    self.tied_parameters[f"{spec.key}.{name}"] = named[name]

    # Running ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Any, stage: int | None = None) -> Any:
        """The layers of one stage of this rank, or of all of its stages one after the other."""
        for one in self.stages if stage is None else (stage,):
            x = self._run(x, range(self.bounds[one], self.bounds[one + 1]))
        return x

    def _run(self, x: Any, numbers: range) -> Any:
        every = self.activation_checkpoint_interval
        if not every or not torch.is_grad_enabled() or not self.training:
            return self._run_layers(x, numbers)
        for start in range(numbers.start, numbers.stop, every):
            part = range(start, min(start + every, numbers.stop))
            x = self._checkpointed(x, part) if self._may_checkpoint(part) else self._run_layers(x, part)
        return x

    def _checkpointed(self, x: Any, numbers: range) -> Any:
        given = x if isinstance(x, tuple) else (x,)
        single = not isinstance(x, tuple)
        offset, repeats = self.micro_offset, again()  # when it runs again, other micro-batches have begun

        def run(*inputs: Any) -> Any:
            with repeats():
                return self._run_layers(inputs[0] if single else inputs, numbers, offset)

        return self.activation_checkpoint_func(run, *given)

    def _may_checkpoint(self, numbers: range) -> bool:
        names = self.checkpointable_layers
        if names is None:
            return any(isinstance(p, nn.Parameter) for n in numbers for p in _parameters(self._calls[n]))
        return any(type(self._layer(n)).__name__ in names for n in numbers)

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Names of the modules of a stage of this rank."""
        found: dict[str, None] = {}
        for number in range(self.bounds[stage], self.bounds[stage + 1]):
            call = self._calls[number]
            if isinstance(call, TiedCall):
                key = next(key for key, module in self.tied_modules.items() if module is call.module)
                found[f"tied_modules.{key}"] = None
            elif isinstance(call, nn.Module):
                found[str(number)] = None
        return tuple(found)

    def layer_call(self, number: int) -> Callable[[Any], Any]:
        """One of this rank's layers, as it is called."""
        return self._calls[number]

    def _layer(self, number: int) -> Any:
        call = self._calls[number]
        return call.module if isinstance(call, TiedCall) else call

    def _run_layers(self, x: Any, numbers: range, offset: int | None = None) -> Any:
        offset = self.micro_offset if offset is None else offset
        for number in numbers:
            if self.seed_layers:
                self.seed_fn(self.base_seed + number + self.num_layers * (1 + offset))
            try:
                x = self._calls[number](x)
            except Exception as error:
                _add_note(error, f"in layer {number} ({_name_of(self._layer(number))}) of the pipeline, "
                                 f"whose input is {outline_text(x)}")  # fmt: skip
                raise
        return x

    # What a script asks ----------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Of all ranks of the job."""
        return self._topology

    def mesh_axes(self) -> Mapping[str, int]:
        """Names and sizes of the axes of that, outermost first; "model" is called "tensor" on a mesh."""
        return {"tensor" if name == "model" else name: size for name, size in self._topology.mesh_axes.items()}

    def enter_mesh(self, mesh: DeviceMesh) -> None:
        """Called with the job's mesh, before anything is sharded.

        Raises:
            ValueError: this rank is elsewhere on its axis "pipe" than the model was cut for.
        """
        self._sharded = True
        names = mesh.mesh_dim_names or ()
        place, size = (mesh.get_local_rank(AXIS), mesh.size(names.index(AXIS))) if AXIS in names else (0, 1)
        if (place, size) != (self.stage_id, self.num_stages):
            raise ValueError(
                f"this rank is number {place} of {size} on the axis 'pipe' of the mesh {names}, and "
                f"its model was cut as number {self.stage_id} of {self.num_stages}. Give PipelineModule the mesh, or "
                "leave the mesh to the model's topology."
            )

    @property
    def is_first_stage(self) -> bool:
        """This rank has the first layers."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """This rank has the last layers, and the loss."""
        return len(self.rank_of) - 1 in self.stages

    def get_additional_losses(self) -> dict[str, Any] | None:
        """What else to report of the latest forward of this rank's stages; for subclasses. Nobody trains on it: a
        loss of a middle layer that counts is attached to its output (:func:`zoo.pipe.attach_loss`)."""
        return None


def _topology(num_stages: int | None, topology: ProcessTopology | None, mesh: Any) -> ProcessTopology:
    given = [
        name
        for name, value in (("num_stages", num_stages), ("topology", topology), ("mesh", mesh))
        if value is not None
    ]
    if len(given) != 1 and given != ["num_stages", "topology"]:
        raise ValueError(f"PipelineModule got {' and '.join(given) or 'none'} of num_stages, topology, mesh; give one.")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh is not None:
        names = tuple(mesh.mesh_dim_names or ())
        topology = ProcessTopology(axes=list(names), dims=list(mesh.shape))
    if topology is not None and not isinstance(topology, ProcessTopology):
        raise ValueError(
            f"PipelineModule got topology={topology!r}, a {type(topology).__name__}; give a ProcessTopology."
        )
    if topology is None:
        stages = num_stages if type(num_stages) is int else 0
        if stages < 1 or world % stages:
            raise ValueError(
                f"num_stages={num_stages!r} with {world} rank{'s' if world > 1 else ''}; it must divide them. The "
                "other ranks are data-parallel."
            )
        topology = PipeDataParallelTopology(num_pp=stages, num_dp=world // stages)
    if AXIS not in topology.get_axis_names():
        raise ValueError(f"the topology has the axes {topology.get_axis_names()}; one of them must be called 'pipe'.")
    if topology.world_size() != world:
        raise ValueError(f"the topology is for {topology.world_size()} ranks, and the job has {world}.")
    if num_stages is not None and topology.get_dim(AXIS) != num_stages:
        raise ValueError(f"num_stages={num_stages}, and the topology has {topology.get_dim(AXIS)}; give one of them.")
    return topology


def builder(schedule: Any) -> Any:
    """A schedule's builder: itself, or by name, or by name and options."""
    from zoo import registry

    if isinstance(schedule, str):
        return registry.build("pipe_schedule", schedule, {})
    if isinstance(schedule, Mapping):
        if set(schedule) - {"type", "params"} or not isinstance(schedule.get("type"), str):
            raise ValueError(f"schedule={schedule}; a mapping is {{'type': a name, 'params': its options}}.")
        return registry.build("pipe_schedule", schedule["type"], dict(schedule.get("params") or {}))
    if isinstance(schedule, type) or not (hasattr(schedule, "placement") or hasattr(schedule, "for_model")):
        raise ValueError(
            f"schedule={schedule!r}; it takes a name, a mapping {{'type': a name, 'params': its options}}, or an "
            "object with placement(num_ranks) and build(num_ranks, num_micro_batches)."
        )
    return schedule


def _check_arguments(layers: Any, loss_fn: Any, interval: Any, checkpointable: Any) -> None:
    if not isinstance(layers, Iterable):
        raise ValueError(
            f"PipelineModule got a {type(layers).__name__} as layers; it takes a list of LayerSpecs, modules and "
            "functions, or an nn.Sequential. zoo.pipe.split(model, ...) cuts any other model."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r}; it takes a function of (outputs, labels), or None.")
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
        raise ValueError(f"activation_checkpoint_interval={interval!r}; 0, or a number of layers.")
    if isinstance(checkpointable, str) or not isinstance(checkpointable, Iterable | None):
        raise ValueError(f"checkpointable_layers={checkpointable!r}; give a list of the names of classes.")


def _tell_of_names(names: Iterable[str], there: Sequence[str]) -> None:
    if not set(names) & set(there):
        _log.warning(
            "checkpointable_layers=%s: nothing is checkpointed, because no layer is one of these; their classes are %s",
            list(names), ", ".join(sorted(set(there))),
        )  # fmt: skip


def _check_layers(layers: Sequence[Any]) -> None:
    for number, layer in enumerate(layers):
        if not (isinstance(layer, (LayerSpec, nn.Module)) or callable(layer)):
            raise ValueError(
                f"layer {number} is {layer!r}, a {type(layer).__name__}; it must be a LayerSpec, module or function."
            )
    tied: dict[str, TiedLayerSpec] = {}
    for spec in layers:
        if isinstance(spec, TiedLayerSpec):
            first = tied.setdefault(spec.key, spec)
            if repr(first) != repr(spec) or first.tied_weight_attr != spec.tied_weight_attr:
                raise ValueError(
                    f"layers tied as {spec.key!r} are described as {first!r} and as {spec!r}, tying "
                    f"{first.tied_weight_attr} and {spec.tied_weight_attr}; one module has one description."
                )


def _name_of(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return (
        type(layer).__name__ if isinstance(layer, nn.Module) else str(getattr(layer, "__name__", type(layer).__name__))
    )


def _parameters(layer: Any) -> list[nn.Parameter]:
    module = layer.module if isinstance(layer, TiedCall) else layer
    if isinstance(module, Segment):
        return module.parameters()
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def _num_parameters(layer: Any) -> int:
    """Of a spec too, without building it."""
    if isinstance(layer, LayerSpec):
        layer = layer.outline()
    if isinstance(layer, Segment):
        return layer.num_parameters
    if not isinstance(layer, nn.Module):
        return 0
    return sum(getattr(p, "_zoo_numel", None) or p.numel() for p in layer.parameters())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
    """What the section ``activation_checkpointing``, or ``configure``, says."""
    return DEFAULT.get("activation_checkpoint", "zoo")(function, *inputs)


def _add_note(error: BaseException, note: str) -> None:
    """As ``add_note``, which Python 3.10 has not."""
    if error.args and isinstance(error.args[0], str) and note not in error.args[0]:
        error.args = (f"{error.args[0]} ({note})", *error.args[1:])
