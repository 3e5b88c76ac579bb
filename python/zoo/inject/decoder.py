"""Decoder layers with few operations: norm, q·k·v, rotary positions and the cache, attention, out; norm, gate·up, down.

A layer keeps its identity, children, parameters and hooks and gets a subclass of its own class, whose forward computes
from the children's parameters as they are at that moment: nothing is copied, so nothing can be stale. Where gradients
are wanted, or anything is asked for that this forward does not know, the layer's own forward runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.inject.kinds import ATTENTIONS, Matrix, Norm, Pieces, Unfit, attention_function, norm_of, pieces_of
from zoo.inject.watch import is_plain
from zoo.kernels import loading
from zoo.kernels.activation import activate_
from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.rms_norm import add_rms_norm, rms_norm
from zoo.kernels.rotary_cache import rotary_cache_
from zoo.kernels.thin_linear import FEW, linear, thin_linear, thin_linears

STATE = "_zoo_injected"
IGNORED = ("output_hidden_states",)
"""Arguments of the model that come to its layers and are none of theirs."""
Tensor = torch.Tensor


@dataclass(eq=False)
class State:
    """What an injected module knows. dtype: of its parameters when it was proved; None: of any. runs: how often the
    injected forward ran to its end. invariant: the bits of a token depend on nothing but the tokens that it sees."""

    pieces: Pieces | None
    dtype: torch.dtype | None
    runs: int = 0
    invariant: bool = False
    norm: Norm | None = None


def become(module: nn.Module, kind: type[Injected], state: State) -> None:
    """Give ``module`` the forward of ``kind``: a subclass of its own class, which has the name of that."""
    own = type(module)
    known = _CLASSES.get((kind, own))
    if known is None:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        known = _CLASSES[kind, own] = type(own.__name__, (kind, own), names)
    module.__dict__[STATE] = state
    module.__class__ = known


def leave(module: nn.Module) -> None:
    """The module as it was before :func:`become`. One that has become something else since computes as it did too."""
    del module.__dict__[STATE]
    if type(module) in _CLASSES.values():
        module.__class__ = type(module).__bases__[1]


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
"""One for each pair, so that a compiler sees one class for equal layers."""


class Injected(nn.Module):
    """Base of injected modules: a copy is injected too, if it can be; one that was pickled is not, but has all else."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        ours = type(self) in _CLASSES.values()
        kind, own = type(self).__bases__ if ours else (None, type(self))
        found: Any = object.__new__(own)
        memo[id(self)] = found
        found.__setstate__(copy.deepcopy(self._without(), memo))
        state: State | None = self.__dict__.get(STATE)
        if kind is None or state is None:
            return found
        try:
            pieces = None if state.pieces is None else pieces_of(found)
            norm = None if state.norm is None else norm_of(found)
        except Unfit:  # it has got adapters since
            return found
        become(found, kind, replace(state, pieces=pieces, norm=norm, runs=0))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        ours = type(self) in _CLASSES.values()
        return _new, (type(self).__bases__[1] if ours else type(self),), self._without()

    def _without(self) -> dict[str, Any]:
        given: Any = getattr(super(), "__getstate__", None)
        state = given() if given is not None else dict(self.__dict__)
        return {key: value for key, value in state.items() if key != STATE}


def _own(module: nn.Module, kind: type[Injected]) -> Any:
    """The forward that a module has beside the injected one, also where that was bound before the module was left."""
    return super(kind, module).forward if isinstance(module, kind) else partial(type(module).forward, module)


def _new(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(kind)


class Decoder(Injected):
    """z = y + down(φ(gate) ⊙ up), y = x + out(attention). Shapes: x, z (batch, tokens, features)."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Any = None, use_cache: bool | None = False, position_embeddings: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As transformers calls a decoder layer."""
        state: State | None = self.__dict__.get(STATE)
        if cache is None and kwargs:
            cache = kwargs.pop("past_key_values", None)
        if state is None or not _knows(self, state, hidden_states, attention_mask, position_embeddings, kwargs):
            return _own(self, Decoder)(
                hidden_states, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        pieces: Any = state.pieces
        x = hidden_states.contiguous()
        few = x.numel() <= FEW * x.shape[-1] and pieces.is_thin()
        product = _thin if state.invariant or few else _by_modules
        first, second = pieces.norms
        h = rms_norm(x, first.weight, eps=first.eps, plus_one=first.plus_one)
        qkv = product(h, pieces.qkv)
        heads = _attend(pieces, qkv, attention_mask, cache, position_embeddings, invariant=state.invariant)
        out = product(heads, (pieces.out,))
        h, y = add_rms_norm(out, x, second.weight, eps=second.eps, plus_one=second.plus_one)
        both = product(h, pieces.gate_up)
        a = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        activate_(a, both, pieces.activation, gated=True)
        state.runs += 1
        return y + product(a, (pieces.down,))


def _knows(
    layer: nn.Module, state: State, x: Tensor, mask: Any, positions: Any, others: dict[str, Any]
) -> bool:  # fmt: skip
    """Whether the injected forward computes what is asked for."""
    pieces = state.pieces
    return (
        pieces is not None
        and is_plain()
        and not layer.training  # dropout, and what is computed again in backward
        and type(x) is Tensor
        and x.dim() == 3
        and x.dtype is state.dtype
        and pieces.down.weight.dtype is state.dtype
        and all(value is None or name in IGNORED for name, value in others.items())
        and _knows_mask(pieces, mask)
        and _knows_positions(positions, x)
        and pieces.watch.intact()
    )


def _knows_mask(pieces: Pieces, mask: Any) -> bool:
    """sdpa takes booleans or numbers to be added, eager the latter; and sdpa is torch's."""
    how = pieces.attention.config._attn_implementation
    if how not in ATTENTIONS or (how == "sdpa" and attention_function() is not pieces.function):
        return False
    if mask is None:
        return True
    plain = type(mask) is Tensor and mask.dim() == 4
    return plain and (mask.is_floating_point() or (how == "sdpa" and mask.dtype is torch.bool))


def _knows_positions(positions: Any, x: Tensor) -> bool:
    if not isinstance(positions, tuple) or len(positions) != 2:
        return False
    cos = positions[0]
    return type(cos) is Tensor and cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[1]


def _thin(x: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
    biases: list[Tensor | None] = [one.bias for one in matrices]
    weights = [one.weight.contiguous() for one in matrices]
    return thin_linears(x, weights, [bias for bias in biases if bias is not None])


def _by_modules(x: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
    """As many tokens are multiplied by torch, and parts of matrices by those who have split them."""
    found = [one(x) for one in matrices]
    return torch.cat(found, -1) if len(found) > 1 else found[0]


def _attend(
    pieces: Pieces, qkv: Tensor, mask: Tensor | None, cache: Any, positions: tuple[Tensor, Tensor], *, invariant: bool
) -> Tensor:  # fmt: skip
    """(batch, tokens, heads · dim)."""
    batch, tokens = qkv.shape[:2]
    heads, groups, dim = pieces.heads, pieces.groups, pieces.dim
    parts = qkv.view(batch, tokens, heads + 2 * groups, dim)
    if pieces.head_norms is not None:
        _norm_heads(parts[:, :, :heads], pieces.head_norms[0])
        _norm_heads(parts[:, :, heads : heads + groups], pieces.head_norms[1])
    cos, sin = positions
    rotary_cache_(qkv, cos.contiguous(), sin.contiguous(), q_heads=heads, kv_heads=groups)
    q, k, v = torch.split(parts.transpose(1, 2), [heads, groups, groups], 1)
    if cache is not None:
        k, v = cache.update(k, v, pieces.attention.layer_idx, kwargs={})
    attention = pieces.attention
    causal = mask is None and attention.config._attn_implementation == "sdpa" and getattr(attention, "is_causal", True)
    if causal and tokens > 1:
        k, v = k[:, :, :tokens], v[:, :, :tokens]  # of a cache that is longer the rest is empty
    shown = None if mask is None or mask.dtype is not torch.bool or mask.shape[1] != 1 else mask[:, 0]
    alone = tokens == 1 and loading.runs("cached_attention", q)  # the reference is for its bits, and slow
    if (invariant or alone) and (causal or shown is not None or (mask is None and tokens == 1)):
        shown = None if shown is None else shown.expand(batch, tokens, k.shape[2])
        return cached_attention(q, k, v, shown, scale=pieces.scaling)
    found = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and tokens > 1, scale=pieces.scaling, enable_gqa=heads != groups
    )
    return found.transpose(1, 2).reshape(batch, tokens, heads * dim)


def _norm_heads(x: Tensor, norm: Norm) -> None:
    x.copy_(rms_norm(x.contiguous(), norm.weight, eps=norm.eps, plus_one=norm.plus_one))


class Head(Injected):
    """y = x·Wᵀ + b: of few tokens by a thin product."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        state: State | None = self.__dict__.get(STATE)
        plain = state is not None and is_plain() and type(input) is Tensor and self.weight.layout is torch.strided
        if state is None or not plain or input.dtype is not self.weight.dtype:
            found: Tensor = _own(self, Head)(input)
            return found
        if not state.invariant:
            return linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.contiguous()
        return thin_linear(input, self.weight.contiguous(), bias)


class Normed(Injected):
    """A root mean square norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the norms of transformers."""
        state: State | None = self.__dict__.get(STATE)
        norm = None if state is None else state.norm
        known = norm is not None and is_plain() and type(hidden_states) is Tensor
        if norm is None or not known or norm.weight.dtype is not hidden_states.dtype or not norm.weight.is_contiguous():
            found: Tensor = _own(self, Normed)(hidden_states)
            return found
        return rms_norm(hidden_states.contiguous(), norm.weight, eps=norm.eps, plus_one=norm.plus_one)
