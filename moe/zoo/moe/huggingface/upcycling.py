"""``upcycle``: the MLPs of a dense model become mixtures of experts that compute the same at first.

Legend: D hidden size, H intermediate size, E experts, L of them here, k experts of a token.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.layout import enter_mesh
from zoo.moe.dispatch import place_of_rank
from zoo.moe.experts.base import AXIS, Experts
from zoo.moe.experts.grouped import GroupedExperts
from zoo.moe.experts.modules import ModuleExperts
from zoo.moe.gates.topk import TopKGate
from zoo.moe.huggingface.presets import name_of_activation
from zoo.moe.mixture import Capacity, MixtureOfExperts

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MLPPreset:
    """An MLP of which grouped experts can be made: a class, or attributes, that all have to be there.

    Its maps are ``nn.Linear``, or have a weight (in, out) as ``Conv1D`` of GPT-2.
    """

    up: str
    """D → H."""
    down: str
    """H → D."""
    gate: str | None = None
    """D → H, through the activation; None: that of ``up`` goes through it."""
    activation: str = "act_fn"
    """Attribute: φ."""
    dropout: str | None = None
    """Attribute: a module after the second map."""
    mlp: str | None = None
    """Name of the class; None for any that has all the attributes."""


MLP_PRESETS: tuple[MLPPreset, ...] = (
    MLPPreset(up="up_proj", down="down_proj", gate="gate_proj"),
    MLPPreset(up="c_fc", down="c_proj", activation="act", dropout="dropout"),
    MLPPreset(up="dense_h_to_4h", down="dense_4h_to_h", activation="act"),
    MLPPreset(up="fc1", down="fc2", activation="activation_fn"),
)
"""Llama, Mistral, Qwen, Gemma and many others; GPT-2; GPT-NeoX and Falcon; Phi and others."""


class _Balance:
    """What the last forward came to; a copy of the layer begins without."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Balance:
        return _Balance()

    def __reduce__(self) -> tuple[type[_Balance], tuple[()]]:
        return _Balance, ()


class UpcycledMLP(MixtureOfExperts):
    """A mixture in the place of an MLP: (…, D) → (…, D). Its balance loss waits for :func:`balance_loss`."""

    def __init__(self, *args: Any, dropout: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = dropout
        self._balance = _Balance()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Mix."""
        found = super().forward(x)
        if self.training and torch.is_grad_enabled() and not _computes_again():
            self._balance.loss = found.balance
        y: Tensor = found.output if self.dropout is None else self.dropout(found.output)
        return y


def _computes_again() -> bool:
    """Whether activation checkpointing runs this forward within a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def balance_loss(*models: nn.Module) -> Tensor:
    """Σ of the balance losses of all upcycled layers, of the forward that has just been; a graph output.

    ::

        loss = model(input_ids=ids, labels=ids).loss + 0.01 * zoo.moe.balance_loss(model)

    Each layer's is 1 where experts are used evenly (:func:`zoo.moe.losses.balance`, over all k choices). What was taken
    is forgotten, so that no loss counts twice; a layer that was called several times counts by its last call. A section
    ``moe`` with ``balance_coefficient`` adds it by itself.

    Raises:
        ValueError: there are no such layers, or no training forward since the last time.
    """
    layers = [m for model in models for m in model.modules() if isinstance(m, UpcycledMLP)]
    losses = [layer._balance.loss for layer in layers if layer._balance.loss is not None]
    for layer in layers:
        layer._balance.loss = None
    if not losses:
        why = "no forward in training mode with gradients since the last time" if layers else "no upcycled layers"
        raise ValueError(
            f"balance_loss found {why}; call it once after each forward of a model of zoo.moe.upcycle. Activation "
            "checkpointing runs forwards without gradients if use_reentrant=True: use False."
        )
    found = losses[0].to(torch.promote_types(losses[0].dtype, torch.float32))
    for loss in losses[1:]:
        found = found + loss.to(found)
    return found


def upcycle(
    model: nn.Module, num_experts: int, *, k: int = 2, modules: Sequence[str] = ("*",), every: int = 1,
    presets: Iterable[MLPPreset] = (), router_std: float = 0.02, seed: int = 0,
    capacity: Capacity | Mapping[str, Any] | None = None, ep_size: int = 1, mesh: Any = None, chunks: int = 1,
) -> nn.Module:  # fmt: skip
    """Make the MLPs of a dense model into mixtures of ``num_experts`` copies of them (Komatsuzaki et al. 2023, "Sparse
    Upcycling", section 3), in place, before there is an optimizer.

    Each token goes to the k experts of greatest probability, weighed by their probabilities divided by their sum. All
    experts are the same and the weights sum to 1, so that the model computes the same function at first (the paper's
    "combine weights after normalisation"); nothing is dropped unless a ``capacity`` is given. Routers are drawn from
    N(0, router_std²), by seed and path, the same on every rank. Experts begin to differ because routers send them
    different tokens with different weights. With k = 1 the weight is always 1, and routers learn from
    :func:`balance_loss` only.

    ``model.config`` gets ``upcycled``, a dict of what was asked for, which ``save_pretrained`` writes: a dense model
    made anew is upcycled by ``upcycle(dense, **config.upcycled)``, with ``presets`` again where there were some, and
    then loads the weights.

    Args:
        model: any with MLPs that are modules of their own: (…, D) → (…, D).
        num_experts: E.
        modules: patterns (``fnmatch``) of their paths. Those that no preset fits are left out, unless a pattern is
            their very path: then the experts are copies of the module (which is slower).
        every: 2: only every second one of them, the last among them, as the paper does; and so on.
        presets: descriptions of further MLPs; they go before ``zoo.moe.MLP_PRESETS``.
        router_std: 0.02 in the paper.
        capacity: see :class:`~zoo.moe.MixtureOfExperts`; or the arguments of a :class:`~zoo.moe.Capacity`.
        ep_size, mesh, chunks: see :func:`~zoo.moe.parallelise`.

    Returns:
        ``model``.

    Raises:
        ValueError: no MLP was found, or sizes that cannot be.
    """
    if every < 1 or ep_size < 1 or not router_std >= 0:
        raise ValueError(
            f"every={every}, ep_size={ep_size} and router_std={router_std}; at least 1, at least 1, and not negative."
        )
    if isinstance(capacity, Mapping):
        capacity = Capacity(**capacity)
    known = (*presets, *MLP_PRESETS)
    found = _found(model, modules, known)[::-1][::every][::-1]
    if not found:
        raise ValueError(
            f"no MLP was found in {type(model).__name__} by the patterns {list(modules)}; known are modules with "
            f"{', '.join('/'.join(_names(p)) for p in known)}. Describe others by presets=(zoo.moe.MLPPreset(...),), "
            "or give the paths of modules."
        )
    rank = place_of_rank(ep_size) if mesh is None else int(mesh.get_local_rank(AXIS)) if ep_size > 1 else 0
    for path, mlp, preset in found:
        width = _width(model, mlp, preset)
        like = next(mlp.parameters())
        with torch.device("meta"):  # no memory and no random numbers for values that are replaced
            gate = TopKGate(width, num_experts, k=k, renormalise=True)
        experts = _experts(mlp, preset, width, num_experts, ep_size, rank)
        layer = UpcycledMLP(
            gate, experts, capacity=capacity, chunks=chunks,
            dropout=None if preset is None or preset.dropout is None else getattr(mlp, preset.dropout),
        )  # fmt: skip
        gate.to_empty(device=like.device).to(like.dtype)
        _draw(gate.weight, router_std, zlib.crc32(f"{seed} {path}".encode()))
        layer.train(mlp.training)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.upcycled = {
            "num_experts": num_experts, "k": k, "modules": [path for path, *_ in found], "router_std": router_std,
            "seed": seed, "capacity": None if capacity is None else dataclasses.asdict(capacity),
        }  # fmt: skip
    if mesh is not None:
        enter_mesh(model, mesh)
    return model


def _names(preset: MLPPreset) -> tuple[str, ...]:
    return tuple(n for n in (preset.gate, preset.up, preset.down, preset.activation, preset.dropout) if n is not None)


def _found(
    model: nn.Module, patterns: Sequence[str], presets: Sequence[MLPPreset]
) -> list[tuple[str, nn.Module, MLPPreset | None]]:
    """Path, module and preset of each MLP, in the model's order."""
    if isinstance(patterns, str):
        raise ValueError(f"modules={patterns!r}; it is a sequence of patterns: ({patterns!r},).")
    found: list[tuple[str, nn.Module, MLPPreset | None]] = []
    for path, module in model.named_modules():
        if not path or not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            continue
        preset = next((preset for preset in presets if _fits(module, preset)), None)
        if preset is not None or path in patterns:
            found.append((path, module, preset))
    return found


def _fits(module: nn.Module, preset: MLPPreset) -> bool:
    if preset.mlp is not None and preset.mlp not in {cls.__name__ for cls in type(module).__mro__}:
        return False
    if not all(hasattr(module, name) for name in _names(preset)):
        return False
    maps = [getattr(module, name) for name in (preset.gate, preset.up, preset.down) if name is not None]
    known = {id(p) for m in maps for p in m.parameters()} if all(isinstance(m, nn.Module) for m in maps) else set()
    return (
        all(isinstance(getattr(m, "weight", None), Tensor) and m.weight.ndim == 2 for m in maps)
        and {id(p) for p in module.parameters()} <= known
    )  # fmt: skip


def _width(model: nn.Module, mlp: nn.Module, preset: MLPPreset | None) -> int:
    if preset is not None:
        return int(_weight(getattr(mlp, preset.up)).shape[0])
    size = getattr(getattr(model, "config", None), "hidden_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"the width of {type(mlp).__name__} is not known, because model.config has no hidden_size. Describe it by "
            "a zoo.moe.MLPPreset."
        )
    return size


def _weight(linear: nn.Module) -> Tensor:
    """(in, out)."""
    weight: Any = linear.weight
    return weight.detach().t() if isinstance(linear, nn.Linear) else weight.detach()  # type: ignore[no-any-return]


@torch.no_grad()
def _experts(
    mlp: nn.Module, preset: MLPPreset | None, width: int, num_experts: int, ep_size: int, ep_rank: int
) -> Experts:
    if preset is None:
        here = num_experts // ep_size if ep_size > 0 and not num_experts % ep_size else num_experts
        copies = [copy.deepcopy(mlp) for _ in range(here)]
        return ModuleExperts(copies, num_experts, ep_size=ep_size, ep_rank=ep_rank)
    activation = getattr(mlp, preset.activation)
    first = [getattr(mlp, name) for name in (preset.gate, preset.up) if name is not None]
    last = getattr(mlp, preset.down)
    up = torch.cat([_weight(linear) for linear in first], 1)
    like = next(mlp.parameters())
    with torch.device("meta"):
        made = GroupedExperts(
            num_experts, width, _weight(last).shape[0], activation=name_of_activation(activation) or activation,
            gated=preset.gate is not None, bias=True, ep_size=ep_size, ep_rank=ep_rank,
        )  # fmt: skip
    made.to_empty(device=like.device).to(like.dtype)
    made.up.copy_(up)
    made.down.copy_(_weight(last))
    made.up_bias = _biases(made.up_bias, first)
    made.down_bias = _biases(made.down_bias, [last])
    for parameter in made.parameters():
        parameter.requires_grad_(like.requires_grad)
    return made


def _biases(into: nn.Parameter | None, linears: Sequence[nn.Module]) -> nn.Parameter | None:
    given = [getattr(linear, "bias", None) for linear in linears]
    if into is None or all(bias is None for bias in given):
        return None
    sizes = [_weight(linear).shape[1] for linear in linears]
    wide = [into.new_zeros(n) if b is None else b.detach() for n, b in zip(sizes, given, strict=True)]
    into.copy_(torch.cat(wide))
    return into


@torch.no_grad()
def _draw(weight: Tensor, std: float, seed: int) -> None:
    """The same on every rank and device."""
    if weight.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(seed)
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)
