"""Experts of transformers with another forward: sorted by expert, grouped products, expert parallelism.

Legend: T tokens, D hidden size, E experts, L of them here, k choices of a token, R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import declare_axis, declare_unit
from zoo.moe.counted import CountedLayer
from zoo.moe.dispatch import Dispatcher
from zoo.moe.experts.base import AXIS, LocalExperts, check_ep_size
from zoo.moe.experts.perceptron import Linear, gate, perceptron
from zoo.moe.huggingface.presets import ExpertsPreset, name_of_activation
from zoo.moe.part import MoEPart
from zoo.moe.routing import packed
from zoo.parts import declare_part

Tensor = torch.Tensor


class ParallelExperts(CountedLayer, LocalExperts):
    """What :func:`parallelise` makes of a module of experts: the same module, of a class derived from its own.

    Its parameters keep names and layout; with expert parallelism each rank has rows [first, first + num_local) of them.
    A state dict of the whole model can be loaded at any ``ep_size``.
    """

    _preset: ExpertsPreset
    _dispatch: Dispatcher
    _named: str | None
    """The activation by its name among those that :mod:`zoo.moe.experts.grouped_mlp` has; None for others."""
    _bias: tuple[nn.Module, str] | None
    _bias_speed: float
    _low_rank: dict[str, list[tuple[Tensor, Tensor, float]]]
    """Of adapters, while their forward runs: factors (L, D_in, r) and (L, r, D_out) of what a weight changes by, and
    the scale."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Σ_j w_tj f_{e_tj}(x_t) of (T, D) tokens with the experts (T, k) and weights (T, k) that the router gave; an
        expert of the number E is none."""
        if top_k_index.shape != top_k_weights.shape or top_k_index.shape[:-1] != hidden_states.shape[:-1]:
            raise ValueError(
                f"{type(self).__name__} got tokens {tuple(hidden_states.shape)}, experts {tuple(top_k_index.shape)} "
                f"and weights {tuple(top_k_weights.shape)}; they are (T, D), (T, k) and (T, k)."
            )
        self._check_adapters()
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, weights = (t.reshape(-1, t.shape[-1]).contiguous() for t in (top_k_index, top_k_weights))
        at = packed(experts.to(torch.int64), weights, self.num_experts)
        y, _ = self._dispatch(_Rows(self), x, at)
        self.count(at.counts, at.counts)
        return y.to(hidden_states.dtype).view(hidden_states.shape)

    def rows(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """This rank's experts, or some of them, on (R, D) that are sorted by expert."""
        preset = self._preset
        up, down = self._linear(preset.up, preset.up_bias), self._linear(preset.down, preset.down_bias)
        return perceptron(x, counts, which, up, down, self._between, named=self._named, gated=preset.gated)

    def _between(self, h: Tensor) -> Tensor:
        preset = self._preset
        if preset.gated and preset.join is not None and hasattr(self, preset.join):
            joined: Tensor = getattr(self, preset.join)(h)
            return joined
        activation = getattr(self, preset.activation)
        return gate(h, activation) if preset.gated else activation(h)

    def _linear(self, weight: str, bias: str | None) -> Linear:
        return Linear(
            getattr(self, weight), None if bias is None else getattr(self, bias), not self._preset.transposed,
            self._low_rank.get(weight, ()),
        )  # fmt: skip

    def enter_mesh(self, mesh: Any) -> None:
        """See :meth:`zoo.moe.dispatch.Dispatcher.enter_mesh`."""
        self.declare()
        self._dispatch.enter_mesh(mesh, self.expert_parameters())

    def _parts(self) -> Iterator[Tensor]:
        """Those that nobody has taken over already."""
        return (parameter for parameter in self.parameters() if type(parameter) is nn.Parameter)

    @property
    def expert_ranks(self) -> Communicator | None:
        """See :class:`CountedLayer`."""
        return self._dispatch.comm

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """See :class:`CountedLayer`."""
        return self.parameters()

    @property
    def ep_size(self) -> int:
        """Ranks that share the experts."""
        return self._dispatch.ep_size

    @property
    def chunks(self) -> int:
        """See :func:`parallelise`."""
        return self._dispatch.chunks

    @property
    def has_bias(self) -> bool:
        """See :class:`CountedLayer`."""
        return self._bias is not None and self._bias_speed > 0

    @torch.no_grad()
    def commit(self, demand: Tensor) -> None:
        """b_e ← b_e + u sign(c̄ - c_e): see :class:`zoo.moe.LossFreeGate`."""
        if self._bias is not None:
            bias = getattr(*self._bias)
            if bias.itemsize < 4:  # load_state_dict(assign=True) of a state in 16 bits
                bias = bias.float()
                setattr(*self._bias, bias)
            wide = demand.to(torch.float64)
            bias.add_(torch.sign(wide.mean() - wide).to(bias), alpha=self._bias_speed)

    def _check_adapters(self) -> None:
        """Raise ValueError for LoRA that took this rank's experts for all."""
        if self.ep_size > 1:
            foreign = sorted(getattr(self, "parametrizations", {}))
            if foreign:
                raise ValueError(
                    f"{', '.join(foreign)} of {type(self).__name__} got an adapter after parallelise, of this "
                    f"rank's experts only. At ep_size={self.ep_size} adapters come first: "
                    "parallelise(get_peft_model(model, config), ep_size=...)."
                )


class _Rows:
    """A module of experts as the dispatcher calls it."""

    def __init__(self, module: ParallelExperts) -> None:
        self._module = module

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        return self._module.rows(x, counts)

    def part(self, chunk: int, chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        return functools.partial(self._module.rows, which=self._module.chunk(chunk, chunks))


def _name_of(module: nn.Module, preset: ExpertsPreset) -> str | None:
    join = getattr(type(module), preset.join, None) if preset.gated and preset.join is not None else None
    if join is not None and getattr(join, "__name__", "") != "_default_apply_gate":  # one of its own
        return None
    return name_of_activation(getattr(module, preset.activation, None))


@functools.cache
def _class_of(original: type[nn.Module]) -> type[ParallelExperts]:
    return type(f"Parallel{original.__name__}", (ParallelExperts, original), {"__module__": original.__module__})


def sizes_of(module: nn.Module, preset: ExpertsPreset) -> Mapping[str, nn.Parameter]:
    """The parameters of the experts by name, checked: E is their first size.

    Raises:
        ValueError: some are missing, others are there, or sizes do not fit.
    """
    wanted = [name for name in (preset.up, preset.down, preset.up_bias, preset.down_bias) if name is not None]
    found = dict(module.named_parameters())
    what = type(module).__name__
    if set(found) != set(wanted):
        raise ValueError(
            f"{what} has the parameters {sorted(found)}, and its preset says {sorted(wanted)}. Experts as lists of "
            "modules (transformers before version 5) and quantised ones are not supported; others can be described by "
            "a zoo.moe.ExpertsPreset."
        )
    up, down = (found[name].shape for name in (preset.up, preset.down))
    out, into = (up[-1], down[-2]) if preset.transposed else (up[-2], down[-1])
    if len(up) != 3 or len(down) != 3 or up[0] != down[0] or out != into * (2 if preset.gated else 1):
        raise ValueError(
            f"{what} has {preset.up} of shape {tuple(up)} and {preset.down} of shape {tuple(down)}, which its preset "
            f"(transposed={preset.transposed}, gated={preset.gated}) does not fit."
        )
    return found


def convert(
    module: nn.Module, preset: ExpertsPreset, around: nn.Module, *, ep_size: int, ep_rank: int, chunks: int,
    bias_speed: float,
) -> ParallelExperts:  # fmt: skip
    """Turn a module of experts into :class:`ParallelExperts`, in place.

    Args:
        around: the module that has it as its child.
    """
    parameters = sizes_of(module, preset)
    num_experts = parameters[preset.up].shape[0]
    num_local = check_ep_size(num_experts, ep_size, f" of {type(module).__name__}")
    first = ep_rank * num_local
    dispatch = Dispatcher(num_experts, num_local, first, chunks=chunks)
    bias = None if preset.balance_bias is None else _buffer(around, preset.balance_bias)
    if bias is not None:
        _keep_wide(*bias)
    for parameter in parameters.values() if ep_size > 1 else ():
        _keep(parameter, first, num_local)
    cls: Any = type(module)
    module.__class__ = _class_of(cls)
    module.__dict__.update(
        num_experts=num_experts,
        num_local=num_local,
        first=first,
        _whole=True,
        _preset=preset,
        _dispatch=dispatch,
        _bias=bias,
        _bias_speed=bias_speed,
        _low_rank={},
        _named=_name_of(module, preset),
    )
    made: Any = module
    declare_unit(made)
    declare_part(made, "moe", MoEPart)
    if ep_size > 1:
        declare_axis(made, AXIS, ep_size)
    made.declare()
    found: ParallelExperts = made
    return found


class KeepsBias(nn.Module):
    """A router whose bias stays in single precision, whatever the model is converted to, as transformers loads it: in
    16 bits small steps of it would be lost."""

    _name_of_bias: str

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> KeepsBias:
        """``to`` and its kind."""
        kept = getattr(self, self._name_of_bias)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = getattr(self, self._name_of_bias)
        if now.is_floating_point() and now.itemsize < 4:
            setattr(self, self._name_of_bias, kept.to(now.device))
        return self


@functools.cache
def _keeping(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Parallel{original.__name__}", (KeepsBias, original), {"__module__": original.__module__})


def _keep_wide(router: nn.Module, name: str) -> None:
    bias = getattr(router, name)
    if isinstance(router, KeepsBias) or not bias.is_floating_point():
        return
    if bias.itemsize < 4:
        setattr(router, name, bias.float())
    cls: Any = type(router)
    router.__class__ = _keeping(cls)
    router.__dict__["_name_of_bias"] = name


@torch.no_grad()
def _keep(parameter: nn.Parameter, first: int, num: int) -> None:
    """These rows alone; the memory of the others is free then."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data[first : first + num].clone()
    if gradient is not None:
        parameter.grad = gradient[first : first + num].clone()


def _buffer(around: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    try:
        found = around.get_submodule(owner)
        found.get_buffer(name)
    except AttributeError as error:
        raise ValueError(f"{type(around).__name__} has no buffer {path!r}, which the preset names: {error}.") from None
    return found, name
