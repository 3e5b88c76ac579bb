"""Decoder layers with few operations: norm, q·k·v, rotary positions and the cache, attention, out; norm, gate·up, down.

A layer keeps its identity, children, parameters and hooks and gets a subclass of its own class, whose forward computes
from the children's parameters as they are at that moment: nothing is copied, so nothing can be stale. Where gradients
are wanted, or anything is asked for that this forward does not know, the layer's own forward runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from zoo.inject.kinds import Matrix, Norm, Pieces, norm_of, pieces_of
from zoo.kernels.activation import activate_
from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.rms_norm import add_rms_norm, rms_norm
from zoo.kernels.rotary_cache import rotary_cache_
from zoo.kernels.thin_linear import FEW, linear, linears, thin_linear, thin_linears

STATE = "_zoo_injected"
ATTENTIONS = ("sdpa", "eager")
"""Of ``attn_implementation``: those whose masks a layer gets as they are added to scores, or as booleans."""
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
    """The module as it was before :func:`become`."""
    del module.__dict__[STATE]
    module.__class__ = type(module).__bases__[1]


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
"""One for each pair, so that a compiler sees one class for equal layers."""


class Injected(nn.Module):
    """Base of injected modules: a copy is injected too; one that was pickled is not, but has all else."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind, own = type(self).__bases__
        found: Any = object.__new__(own)
        memo[id(self)] = found
        state: State = self.__dict__[STATE]
        found.__setstate__(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != STATE}, memo))
        pieces = None if state.pieces is None else pieces_of(found)
        norm = None if state.norm is None else norm_of(found)
        become(found, kind, replace(state, pieces=pieces, norm=norm, runs=0))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != STATE}
        return _new, (type(self).__bases__[1],), state


def _new(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(kind)


def _plain() -> bool:
    """Whether nobody looks at what happens inside of a layer."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
    )


class Decoder(Injected):
    """z = y + down(φ(gate) ⊙ up), y = x + out(attention). Shapes: x, z (batch, tokens, features)."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Any = None, use_cache: bool | None = False, position_embeddings: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As transformers calls a decoder layer."""
        state: State = self.__dict__[STATE]
        pieces = state.pieces
        if cache is None and kwargs:
            cache = kwargs.pop("past_key_values", None)
        if pieces is None or not (
            _plain()
            and position_embeddings is not None
            and hidden_states.dtype is state.dtype
            and hidden_states.dim() == 3
            and pieces.down.weight.dtype is state.dtype
            and (attention_mask is None or attention_mask.dim() == 4)
            and pieces.attention.config._attn_implementation in ATTENTIONS
            and not any(
                value is not None and value is not False and name not in IGNORED for name, value in kwargs.items()
            )
            and pieces.intact()
        ):
            return super().forward(
                hidden_states, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        x = hidden_states.contiguous()
        if pieces.split:
            product = _of_parts
        elif state.invariant:
            product = _thin
        else:
            product = _thin if x.numel() <= FEW * x.shape[-1] and pieces.is_thin() else _whole
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


def _thin(x: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
    return thin_linears(x, [one.weight for one in matrices], _biases(matrices))


def _whole(x: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
    return linears(x, [one.weight for one in matrices], _biases(matrices))


def _biases(matrices: tuple[Matrix, ...]) -> list[Tensor]:
    found: list[Tensor | None] = [one.bias for one in matrices]
    return [bias for bias in found if bias is not None]


def _of_parts(x: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
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
        k, v = cache.update(k, v, pieces.attention.layer_idx)
    attention = pieces.attention
    causal = mask is None and attention.config._attn_implementation == "sdpa" and getattr(attention, "is_causal", True)
    if causal and tokens > 1:
        k, v = k[:, :, :tokens], v[:, :, :tokens]  # of a cache that is longer the rest is empty
    shown = None if mask is None or mask.dtype is not torch.bool or mask.shape[1] != 1 else mask[:, 0]
    if (invariant or batch * tokens <= FEW) and (causal or shown is not None or (mask is None and tokens == 1)):
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

    def forward(self, x: Tensor) -> Tensor:
        if not _plain():
            found: Tensor = super().forward(x)
            return found
        state: State = self.__dict__[STATE]
        return thin_linear(x, self.weight, self.bias) if state.invariant else linear(x, self.weight, self.bias)


class Normed(Injected):
    """A root mean square norm."""

    def forward(self, x: Tensor) -> Tensor:
        state: State = self.__dict__[STATE]
        norm = state.norm
        if norm is None or not _plain() or norm.weight.dtype is not x.dtype:
            found: Tensor = super().forward(x)
            return found
        return rms_norm(x.contiguous(), norm.weight, eps=norm.eps, plus_one=norm.plus_one)
