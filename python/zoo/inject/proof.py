"""A layer is injected if that changes no more than rounding does: tried on a copy with random weights.

For each class of layer with its shapes and options, in the dtype of its parameters: the original and the injected copy
compute a prompt and tokens after it, with a cache, without one, with causal masks and with padding on the left and on
the right; both are compared with the original in fp64. With e the largest difference, as a share of the largest number,
the injected layer passes if e ≤ 2·e(original) + u, u the unit in the last place of the dtype. Where activations are
rounded to 8 bits, which would hide much, the layer is tried with exact ones before, and then as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.inject.decoder import Decoder, State, become
from zoo.inject.kinds import Pieces, Unfit, pieces_of
from zoo.nn import PackedLinear
from zoo.tensor.layers import LinearPart
from zoo.tensor.proof import exact

Tensor = torch.Tensor
_BATCH, _PROMPT, _TOKENS = 3, 5, (1, 2, 1)


@dataclass(frozen=True)
class Proof:
    """The largest differences to fp64. injected, original: of which layer. dtype: of its parameters."""

    dtype: torch.dtype
    injected: float
    original: float


def prove(layer: nn.Module, pieces: Pieces, known: dict[Any, Proof | str], *, invariant: bool = False) -> Proof:
    """Of a layer that is not injected. known: of equal layers of the same model; equal ones are proved once.

    Raises:
        Unfit: it has several dtypes, fails, or differs by more; with the numbers.
    """
    dtypes = {p.dtype for p in layer.parameters()}
    if len(dtypes) != 1:
        raise Unfit(f"its parameters are {', '.join(sorted(map(str, dtypes)))}, of more than one dtype")
    (dtype,) = dtypes
    # With tensors of its own a layer is like no other. Ranks of a split one wait for each other in a proof, so that
    # none may skip one.
    alone = pieces.split or _has_tensors(layer)
    key = id(layer) if alone else (dtype, invariant, *_facts(layer))
    if key not in known:
        try:
            known[key] = _prove(layer, dtype, invariant)
        except Unfit as error:
            known[key] = str(error)
    found = known[key]
    if isinstance(found, str):
        raise Unfit(found)
    return found


def _has_tensors(layer: nn.Module) -> bool:
    """Beside its parameters and codes: buffers, and attributes."""
    others = [module for module in layer.modules() if not isinstance(module, PackedLinear)]
    values = (value for module in others for value in module.__dict__.values())
    return any(module._buffers for module in others) or any(isinstance(value, Tensor) for value in values)


def _facts(layer: nn.Module) -> Iterator[Any]:
    """What equal layers have in common: classes, shapes, options; not which number they have."""
    for name, module in layer.named_modules():
        yield name, type(module)
        for key, value in sorted(module.__dict__.items()):
            if isinstance(value, (int, float, str, bool)) and key != "layer_idx":
                yield name, key, value
        if isinstance(module, PackedLinear):
            yield name, module.minima is None, None if module.left is None else module.left.shape
    for name, parameter in layer.named_parameters():
        yield name, tuple(parameter.shape)
    attention = next((m for m in layer.modules() if hasattr(m, "config")), None)
    if attention is not None:
        config: Any = attention.config
        yield config.to_json_string(use_diff=False), getattr(config, "_attn_implementation", None)


def _prove(layer: nn.Module, dtype: torch.dtype, invariant: bool) -> Proof:
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        return _compare(layer, dtype, invariant)


def _compare(layer: nn.Module, dtype: torch.dtype, invariant: bool) -> Proof:
    try:
        with torch.random.fork_rng(devices=[]):
            original = _on_cpu(layer).eval().requires_grad_(False)
    except Exception as error:
        raise Unfit(f"it cannot be copied ({type(error).__name__}: {error})") from error
    packed = [module for module in original.modules() if isinstance(module, PackedLinear)]
    if any(one.activations != "exact" for one in packed):
        with_exact = copy.deepcopy(original)
        for one in with_exact.modules():
            if isinstance(one, PackedLinear):
                one._activations = "exact"
        _try(with_exact, dtype, invariant)
    return _try(original, dtype, invariant)


def _try(original: nn.Module, dtype: torch.dtype, invariant: bool) -> Proof:
    generator = torch.Generator().manual_seed(0)
    for parameter in original.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * drawn if parameter.dim() == 1 else drawn / parameter.shape[-1] ** 0.5)
    injected, precise = copy.deepcopy(original), _with_numbers(copy.deepcopy(original)).double()
    pieces = pieces_of(injected)
    pieces.join()
    state = State(pieces, dtype, invariant=invariant)
    become(injected, Decoder, state)
    mine = theirs = 0.0
    try:
        for given in _cases(pieces_of(original), dtype):
            with torch.no_grad():
                with exact():
                    expected = _run(precise, given, torch.float64)
                before = state.runs
                found, own = _run(injected, given, dtype), _run(original, given, dtype)
                if state.runs != before + len(found):
                    raise Unfit("its pieces have a forward of their own, on the instance")
            for one, other, right in zip(found, own, expected, strict=True):
                scale = float(right.abs().max())
                mine = max(mine, float((one.double() - right).abs().max()) / scale)
                theirs = max(theirs, float((other.double() - right).abs().max()) / scale)
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"a copy with random weights fails ({type(error).__name__}: {error})") from error
    if not mine <= 2 * theirs + torch.finfo(dtype).eps:
        raise Unfit(
            f"injected it is off by {mine:.2g} of the largest number, the original by {theirs:.2g} in {dtype}: it "
            "computes something else than its kind"
        )
    return Proof(dtype, mine, theirs)


def _on_cpu(layer: nn.Module) -> nn.Module:
    """A copy without hooks: with some a layer runs its own forward, and without them, later, the injected one."""
    # Parameters of a bucket may have no values here (ZeRO stage 3), and a proof needs none of them.
    memo = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
        for p in layer.parameters() if hasattr(p, "_zoo_bucket")
    }  # fmt: skip
    found = copy.deepcopy(layer, memo)
    for module in found.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    if any(p.is_meta for p in found.parameters()):
        return found.to_empty(device="cpu")
    return found.cpu()


def _with_numbers(layer: nn.Module) -> nn.Module:
    """With ordinary matrices in the place of codes."""
    for above in list(layer.modules()):
        for name, child in above.named_children():
            if isinstance(child, PackedLinear):
                made = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                made.weight = nn.Parameter(child.dense(), requires_grad=False)
                made.bias = child.bias  # type: ignore[assignment]
                if isinstance(child, LinearPart):
                    child.hand_over(made)
                setattr(above, name, made)
    return layer


@dataclass(frozen=True)
class _Given:
    """One row of calls. hidden, angles: of each call. masks: None where a layer gets none."""

    hidden: list[Tensor]
    angles: list[Tensor]
    masks: list[Tensor | None]
    cached: bool


def _cases(pieces: Pieces, dtype: torch.dtype) -> Iterator[_Given]:
    generator = torch.Generator().manual_seed(1)
    features, rotary = len(pieces.norms[0].weight), _rotary(pieces)
    total = _PROMPT + sum(_TOKENS)
    x = torch.randn(_BATCH, total, features, generator=generator).to(dtype)
    angles = torch.rand(1, total, rotary // 2, generator=generator) * 6
    angles = torch.cat([angles, angles], -1)
    ends = [_PROMPT]
    for count in _TOKENS:
        ends.append(ends[-1] + count)
    begins = [0, *ends[:-1]]
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    left, right = causal.repeat(_BATCH, 1, 1), causal.repeat(_BATCH, 1, 1)
    left[1, :, :2] = right[2, :, _PROMPT - 2 : _PROMPT] = False
    left[1, [0, 1], [0, 1]] = True  # a row that sees nothing has no number
    for seen in (None, left, right):
        masks = [
            None if seen is None or (begin == 0 and end == 1) else seen[:, None, begin:end, :end].contiguous()
            for begin, end in zip(begins, ends, strict=True)
        ]
        if seen is None:  # causal where there are several tokens after others, which says a mask
            masks = [
                causal[None, None, b:e, :e] if b and e - b > 1 else None for b, e in zip(begins, ends, strict=True)
            ]
        yield _Given(
            [x[:, b:e] for b, e in zip(begins, ends, strict=True)],
            [angles[:, b:e] for b, e in zip(begins, ends, strict=True)], masks, True,
        )  # fmt: skip
    yield _Given([x], [angles], [None], False)
    yield _Given([x], [angles], [left[:, None]], False)


def _rotary(pieces: Pieces) -> int:
    """R: how many numbers of a head turn."""
    config: Any = getattr(pieces.attention, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    share = getattr(config, "partial_rotary_factor", None)
    if share is None and isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor")
    return int(pieces.dim * (share or 1.0)) // 2 * 2


def _run(layer: nn.Module, given: _Given, dtype: torch.dtype) -> list[Tensor]:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    attention: Any = pieces_of(layer).attention
    cache = DynamicCache() if given.cached else None
    found = []
    for hidden, angles, mask in zip(given.hidden, given.angles, given.masks, strict=True):
        eager, several = attention.config._attn_implementation == "eager", hidden.shape[1] > 1
        if eager and several and mask is None:  # a model gives one then
            mask = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        if eager and mask is not None:
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        while cache is not None and len(cache.layers) < attention.layer_idx:
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
        y = layer(
            hidden.to(dtype), attention_mask=mask, cache=cache,
            position_embeddings=(angles.to(dtype).cos(), angles.to(dtype).sin()),
        )  # fmt: skip
        if not isinstance(y, Tensor):
            raise TypeError(f"the layer returns a {type(y).__name__}, not a tensor")
        found.append(y)
    return found
