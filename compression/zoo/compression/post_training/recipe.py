"""Quantisation of a trained model, block after block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from zoo.compression.attach import attach, attached_to, detach
from zoo.compression.patterns import matches, nothing_matches
from zoo.compression.post_training.chain import Chain, Run, call, first_of
from zoo.compression.post_training.gptq import Inputs, Quantised, check_weight, gptq, nearest
from zoo.compression.post_training.grids import Grid, Params, Uniform
from zoo.compression.post_training.lorc import low_rank
from zoo.compression.post_training.tokens import quantise_inputs
from zoo.compression.quantisers import straight_through
from zoo.compression.technique import Order, Site, Transform, inner_weights
from zoo.optim import Adam

Tensor = torch.Tensor
Rounding = Mapping[nn.Linear, Transform]
"""Of the inputs of layers."""
FOUR_BITS = Uniform(bits=4)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the linear layers of a model are quantised.

    Args:
        grid: of the weights.
        inputs: grid of what the same layers are called with, token by token
            (:func:`~zoo.compression.post_training.tokens.quantise_inputs`); None: it stays as it is.
        group_size: consecutive elements of a row that share a scale; 0 for whole rows.
        method: "nearest"; "gptq", which needs batches (:func:`~zoo.compression.post_training.gptq.gptq`).
        candidates: ranges of a group that are tried besides the whole one.
        damping, by_size: of GPTQ.
        low_rank: rank of the compensation (LoRC), 0 for none.
        distil_steps, distil_lr: of layer-by-layer distillation, which needs batches: before they are rounded, the
            weights of a block are trained, rounded straight through, to give what the block gave. Adam, on
            Σ(B(x) - B̂(x))²/n (Yao et al. 2022, "ZeroQuant", section 4.2).
        leave_out: patterns of names of layers that stay as they are (:func:`zoo.compression.patterns.matches`).
    """

    grid: Grid = FOUR_BITS
    inputs: Grid | None = None
    group_size: int = 64
    method: Literal["nearest", "gptq"] = "nearest"
    candidates: int = 0
    damping: float = 0.01
    by_size: bool = True
    low_rank: int = 0
    distil_steps: int = 0
    distil_lr: float = 1e-4
    leave_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.method not in ("nearest", "gptq"):
            raise ValueError(f"method={self.method!r}; it must be 'nearest' or 'gptq'.")
        for name in ("group_size", "candidates", "low_rank", "distil_steps"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be a whole number, 0 or more.")
        if not (self.damping > 0 and self.distil_lr > 0):
            raise ValueError(f"damping={self.damping}, distil_lr={self.distil_lr}; both must be positive.")
        if not all(hasattr(self.grid, name) for name in ("fit", "encode", "decode")):
            raise ValueError(f"grid={self.grid!r}; it must be a grid, such as Uniform(bits=4).")

    @property
    def needs_batches(self) -> bool:
        """It looks at what goes into layers."""
        return self.method == "gptq" or self.distil_steps > 0

    def size_for(self, width: int) -> int:
        """Elements of a group in rows of this width."""
        return self.group_size or width


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a linear layer became: its weight is Ŵ + U·V.

    Attributes:
        quantised: Ŵ.
        low_rank: U and V, where there are.
    """

    quantised: Quantised
    low_rank: tuple[Tensor, Tensor] | None = None

    @property
    def values(self) -> Tensor:
        """(N, K) fp32."""
        values = self.quantised.values
        return values if self.low_rank is None else values.addmm_(*self.low_rank)


def quantise(
    model: nn.Module, recipe: Recipe, *, blocks: Sequence[nn.Module] | None = None,
    batches: Sequence[Any] | None = None, run: Run = call,
) -> dict[str, Layer]:  # fmt: skip
    """Rounds the weights of linear layers in place; the model computes with them what packed layers compute.

    Without batches all linear layers of the model are rounded to nearest. With batches those of ``blocks`` are, one
    block after the other, each seeing what the blocks before it give when they are rounded (Frantar et al. 2023,
    section 4).

    Args:
        model: a whole one, on this rank; its mode is kept.
        blocks: that its forward calls one after the other, such as the layers of a decoder.
        batches: each is given to ``run``.
        run: (model, batch).

    Returns:
        The layers by name, as :func:`zoo.compression.packed.pack_model` takes them.

    Raises:
        ValueError: the recipe needs batches; a layer's input is quantised already; a pattern of ``leave_out`` that fits
            no layer; blocks that are not called like that; a layer, named, whose rows are no whole number of groups, or
            whose weight has NaN or infinite elements, no values, transforms, or is computed from others. Nothing is
            changed then.
    """
    batches = None if batches is None else list(batches)
    if recipe.needs_batches and not batches:
        raise ValueError(f"the recipe (method={recipe.method!r}, distil_steps={recipe.distil_steps}) needs batches.")
    if batches and not blocks:
        raise ValueError("with batches the blocks have to be named: blocks=model.layers, for instance.")
    names = chosen(model, recipe.leave_out)
    for module, name in names.items():
        _check(module, name, recipe.size_for(module.in_features))
    inside = {id(m) for block in blocks or () for m in block.modules()} if batches else set(map(id, names))
    rounding = _inputs_of(model, {m: name for m, name in names.items() if id(m) in inside}, recipe)
    modes = [(each, each.training) for each in model.modules()]
    try:
        if not batches:
            _switch(rounding, names, True)
            return {name: _write(m, _rounded(m, name, recipe, None), recipe) for m, name in names.items()}
        model.eval()
        return _block_by_block(Chain(model, list(blocks or ()), batches, run), names, recipe, rounding)
    except BaseException:
        detach(model, rounding.values())
        raise
    finally:
        for each, training in modes:
            each.training = training


def _check(module: nn.Linear, name: str, size: int) -> None:
    if size < 1 or module.in_features % size:
        raise ValueError(f"{name} has rows of {module.in_features}, no whole number of groups of {size}; leave it out.")
    if module._parameters.get("weight") is None:
        raise ValueError(
            f"{name} computes its weight from others (torch.nn.utils.parametrize, weight_norm), so that nothing can be "
            "written in its place; remove that, or leave the layer out."
        )
    if any(where == "weight" for where, _ in attached_to(module)):
        raise ValueError(f"{name} has transforms of its weight; call redundancy_clean first.")
    check_weight(module.weight, size, name)


def chosen(model: nn.Module, leave_out: Sequence[str]) -> dict[nn.Linear, str]:
    """The linear layers by name that no pattern fits, in the model's order.

    A layer whose weight another module has too (a tied head) or reads without calling it (the ``out_proj`` of
    ``nn.MultiheadAttention``) is left out: the other has no packed form.
    """
    found = {m: name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for pattern in leave_out:
        if not any(matches(pattern, name) for name in found.values()):
            raise nothing_matches("leave_out", pattern, found.values(), "fits no linear layer")
    owners, inside = dict[int, int](), inner_weights(model)
    for module in model.modules():
        for p in module._parameters.values():
            owners[id(p)] = owners.get(id(p), 0) + 1
    alone = {m: name for m, name in found.items() if owners.get(id(m.weight), 1) == 1 and id(m) not in inside}
    return {m: name for m, name in alone.items() if not any(matches(pattern, name) for pattern in leave_out)}


def _rounded(
    module: nn.Linear, name: str, recipe: Recipe, inputs: Inputs | None, params: Params | None = None
) -> Quantised:  # fmt: skip
    size, weight = recipe.size_for(module.in_features), module.weight.detach()
    if recipe.method == "nearest" or inputs is None:
        return nearest(weight, recipe.grid, group_size=size, candidates=recipe.candidates, params=params)
    return gptq(
        weight, inputs.hessian, recipe.grid, group_size=size, damping=recipe.damping, by_size=recipe.by_size,
        candidates=recipe.candidates, name=name,
    )  # fmt: skip


@torch.no_grad()
def _write(module: nn.Linear, quantised: Quantised, recipe: Recipe) -> Layer:
    rank = min(recipe.low_rank, *module.weight.shape)
    thin = low_rank(module.weight, quantised.values, rank) if rank else None
    layer = Layer(quantised=quantised, low_rank=thin)
    module.weight.copy_(layer.values)
    return layer


def _inputs_of(model: nn.Module, names: Mapping[nn.Linear, str], recipe: Recipe) -> Rounding:
    """The rounding of inputs, switched off."""
    if recipe.inputs is None:
        return {}
    rounding = dict(zip(names, quantise_inputs(model, names.values(), recipe.inputs), strict=True))
    _switch(rounding, rounding, False)
    return rounding


def _switch(rounding: Rounding, layers: Iterable[nn.Linear], on: bool) -> None:
    for module in layers:
        if module in rounding:
            rounding[module].active = on


def _block_by_block(
    chain: Chain, names: Mapping[nn.Linear, str], recipe: Recipe, rounding: Rounding
) -> dict[str, Layer]:  # fmt: skip
    found: dict[str, Layer] = {}
    for block in chain.blocks:
        layers = [m for m in block.modules() if isinstance(m, nn.Linear) and m in names]
        targets = chain.outputs() if recipe.distil_steps and layers else []
        _switch(rounding, layers, True)
        trained = _distil(chain, layers, names, recipe, targets) if targets else {}
        inputs = _inputs(chain, layers) if recipe.method == "gptq" else {}
        for module in layers:
            name = names[module]
            rounded = _rounded(module, name, recipe, inputs.get(module), trained.get(module))
            found[name] = _write(module, rounded, recipe)
        chain.on(chain.outputs())
    return found


def _inputs(chain: Chain, layers: Sequence[nn.Linear]) -> dict[nn.Linear, Inputs]:
    found = {module: Inputs(module.in_features) for module in layers}
    handles = [
        module.register_forward_pre_hook(lambda m, args: found[m].add(_multiplied(m, args[0]))) for module in layers
    ]  # fmt: skip
    try:
        chain.outputs()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _multiplied(module: nn.Linear, x: Tensor) -> Tensor:
    """What the layer multiplies."""
    for transform in attached_to(module).get(("input", ""), ()):
        x = transform(x) if transform.active else x
    return x


def _distil(
    chain: Chain, layers: Sequence[nn.Linear], names: Mapping[nn.Linear, str], recipe: Recipe,
    targets: Sequence[Tensor],
) -> dict[nn.Linear, Params | None]:  # fmt: skip
    """Trains the weights of a block so that, rounded, they give what the block gave.

    Returns the numbers of the groups that they were trained for: rounded with others, they lose what they learned.
    """
    optimizer = Adam([m.weight for m in layers], lr=recipe.distil_lr)
    before = [(p, p.requires_grad, p.grad) for p in chain.block.parameters()]
    for p, _, _ in before:
        p.grad = None
        p.requires_grad_(False)
    for module in layers:
        module.weight.requires_grad_(True)
    shadows = [_Rounding(Site(module=names[m], where="weight", parameter="weight"), recipe) for m in layers]
    try:
        for module, shadow in zip(layers, shadows, strict=True):
            attach(module, "weight", "weight", shadow)
        with torch.enable_grad():
            for step in range(recipe.distil_steps):
                which = step % len(targets)
                each = chain.calls[which]
                output = first_of(chain.block(each.hidden, *each.args, **each.kwargs))
                optimizer.zero_grad()
                F.mse_loss(output.float(), targets[which].float()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    finally:
        detach(chain.block, shadows)
        for p, requires, grad in before:
            p.requires_grad_(requires)
            p.grad = grad
    return {module: shadow.params for module, shadow in zip(layers, shadows, strict=True)}


class _Rounding(Transform):
    """w → the nearest weight of the recipe, straight through, with the ranges of the weights at the beginning."""

    order = Order.QUANTISER

    def __init__(self, site: Site, recipe: Recipe) -> None:
        self.recipe = recipe
        self.params: Params | None = None
        super().__init__(site)

    def __call__(self, value: Tensor) -> Tensor:
        recipe = self.recipe
        size = recipe.size_for(value.shape[1])
        found = nearest(value, recipe.grid, group_size=size, candidates=recipe.candidates, params=self.params)
        self.params = found.params
        return straight_through(value, found.values.to(value.dtype))
