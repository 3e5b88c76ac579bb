"""Decoder layers with few operations: norm, q·k·v, rotary positions and the cache, attention, out; norm, gate·up, down.

A layer keeps its identity, children, parameters and hooks and gets a subclass of its own class, whose forward computes
from the children's parameters as they are at that moment: nothing is copied, so nothing can be stale. Where gradients
are wanted, or anything is asked for that this forward does not know, the layer's own forward runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from zoo.inject.codes import by_codes
from zoo.inject.kinds import ATTENTIONS, Matrix, Norm, Pieces, Unfit, attention_function, norm_of, pieces_of
from zoo.inject.watch import is_plain
from zoo.kernels import loading
from zoo.kernels.activation import activate_
from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.decoder_layer import after_cache, attention, before_cache, feed_forward
from zoo.kernels.rms_norm import add_rms_norm, rms_norm
from zoo.kernels.rotary_cache import rotary_cache_
from zoo.kernels.thin_linear import FEW, linear, thin_linear, thin_linears
from zoo.nn import PackedLinear
from zoo.tensor.layers import Row

STATE = "_zoo_injected"
IGNORED = ("output_hidden_states",)
"""Arguments of the model that come to its layers and are none of theirs."""
Tensor = torch.Tensor


@dataclass(eq=False)
class State:
    """What an injected module knows. dtype: of its parameters when it was proved; None: of any. runs: how often the
    injected forward ran to its end. invariant: the bits of a token depend on nothing but the tokens that it sees.
    prepared: the layer within :func:`zoo.inject.prepared.prepared`, which is called first."""

    pieces: Pieces | None
    dtype: torch.dtype | None
    runs: int = 0
    invariant: bool = False
    norm: Norm | None = None
    prepared: Any = None


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
            if pieces is not None:
                pieces.join()
        except Unfit:  # it has got adapters since
            return found
        become(found, kind, replace(state, pieces=pieces, norm=norm, runs=0, prepared=None))
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
        if state is not None and state.prepared is not None and not torch.compiler.is_compiling():
            z = state.prepared(hidden_states, attention_mask, position_embeddings, cache, kwargs)
            if z is not None:
                state.runs += 1
                return z
        how = None if state is None or state.pieces is None else state.pieces.how()
        positions = position_embeddings
        if state is None or not _knows(self, state, hidden_states, attention_mask, positions, cache, kwargs, how):
            return _own(self, Decoder)(
                hidden_states, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
                use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        pieces: Any = state.pieces
        x = hidden_states.contiguous()
        few = x.numel() <= FEW * x.shape[-1]
        causal = attention_mask is None and how == "sdpa" and getattr(pieces.attention, "is_causal", True)
        call = _Call(x, attention_mask, cache, position_embeddings, causal, state.invariant)
        y = _in_two_calls(pieces, call) if few else None
        if y is None:
            y = _by_operations(pieces, call, thin=state.invariant or (few and pieces.is_thin()))
        state.runs += 1
        return y


class _Call(NamedTuple):
    """What a layer is called with. causal: no mask says so. invariant: see :class:`State`."""

    x: Tensor
    mask: Tensor | None
    cache: Any
    positions: tuple[Tensor, Tensor]
    causal: bool
    invariant: bool


def _by_operations(pieces: Pieces, call: _Call, *, thin: bool) -> Tensor:
    """The layer, one operation after the other."""
    product = partial(_product, pieces, thin=thin, invariant=call.invariant)
    first, second = pieces.norms
    h = rms_norm(call.x, first.weight, eps=first.eps, plus_one=first.plus_one)
    heads = _attend(pieces, product(h, pieces.qkv), call)
    out = product(heads, (pieces.out,))
    h, y = add_rms_norm(out, call.x, second.weight, eps=second.eps, plus_one=second.plus_one)
    both = product(h, pieces.gate_up)
    a = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    activate_(a, both, pieces.activation, gated=True)
    return y + product(a, (pieces.down,))


def _in_two_calls(pieces: Pieces, call: _Call) -> Tensor | None:
    """The layer of few tokens, with the bits of operations one by one; None where only those can do it."""
    x, mask, alone = call.x, call.mask, call.x.shape[1] == 1
    if not (call.invariant or alone) or not (call.causal or (alone and mask is None) or _is_shown(mask)):
        return None
    products = pieces.products()
    if products is None or not loading.runs("decoder_before_cache", x):
        return None
    qkv, out, gate_up, down = products
    first, second = pieces.norms
    cos, sin = call.positions
    layer, places = _placing(pieces, call)
    if pieces.order is None:
        made = before_cache(
            x, first.now(), qkv, cos.contiguous(), sin.contiguous(), heads=pieces.heads, groups=pieces.groups,
            head_norms=[] if pieces.head_norms is None else [norm.now() for norm in pieces.head_norms], cache=places,
        )  # fmt: skip
    else:  # heads that this rank's part has once, and its q use several times
        h = rms_norm(x, first.weight, eps=first.eps, plus_one=first.plus_one)
        made = thin_linears(h, qkv.weights, qkv.biases).index_select(-1, pieces.order.to(x.device))
        _turn(pieces, made, call, places)
    if places is None:
        q, k, v = _cached(pieces, made, call)
    else:
        width = pieces.heads * pieces.dim
        q = made[:, :, :width].view(*made.shape[:2], pieces.heads, pieces.dim).transpose(1, 2)
        seen = layer.placed(x.shape[1])
        k, v = places[0][:, :, :seen], places[1][:, :, :seen]
    shown = None if mask is None else mask[:, 0].expand(x.shape[0], x.shape[1], k.shape[2])
    rest: Any = {"gate_up": gate_up, "activation": pieces.activation, "down": down}
    if not pieces.split:
        return after_cache(x, q, k, v, shown, second.now(), scale=pieces.scaling, out=out, **rest)
    summed = _of_all_ranks(pieces.out, attention(q, k, v, shown, scale=pieces.scaling, out=out))
    made, y = feed_forward(summed, x, second.now(), **rest)
    return y.add_(_of_all_ranks(pieces.down, made))


def _of_all_ranks(matrix: Matrix, product: Tensor) -> Tensor:
    return matrix.add_up(product) if isinstance(matrix, Row) else product


def _placing(pieces: Pieces, call: _Call) -> tuple[Any, tuple[Tensor, Tensor, Tensor] | None]:
    """A layer of a cache that says where its next tokens go, as those of ``zoo.inference`` do, and that."""
    layers, index = getattr(call.cache, "layers", ()), pieces.attention.layer_idx
    layer = layers[index] if index < len(layers) else None
    place = getattr(layer, "place", None)
    if place is None:
        return layer, None
    return layer, place(call.x.shape[0], call.x.shape[1], pieces.groups, pieces.dim, call.x)


def _knows(
    layer: nn.Module, state: State, x: Tensor, mask: Any, positions: Any, cache: Any, others: dict[str, Any], how: Any
) -> bool:  # fmt: skip
    """Whether the injected forward computes what is asked for."""
    pieces = state.pieces
    return (
        pieces is not None
        and is_plain()
        and (not layer.training or _only_generates(pieces, x, cache))
        and type(x) is Tensor
        and x.dim() == 3
        and x.dtype is state.dtype
        and all(one.weight.dtype is state.dtype for one in pieces.dense[-1:])
        and all(value is None or name in IGNORED for name, value in others.items())
        and _knows_mask(pieces, mask, how)
        and knows_positions(positions, x)
        and pieces.watch.intact()
    )


def _only_generates(pieces: Pieces, x: Tensor, cache: Any) -> bool:
    """In training mode: one token behind others, and no dropout. Trainers generate so without eval()."""
    return cache is not None and x.dim() == 3 and x.shape[1] == 1 and not any(of.get(name) for of, name in pieces.drops)


def _knows_mask(pieces: Pieces, mask: Any, how: Any) -> bool:
    """sdpa takes booleans or numbers to be added, eager the latter; and sdpa is torch's."""
    if how not in ATTENTIONS or (how == "sdpa" and attention_function() is not pieces.function):
        return False
    if mask is None:
        return True
    plain = type(mask) is Tensor and mask.dim() == 4
    return plain and (mask.is_floating_point() or (how == "sdpa" and mask.dtype is torch.bool))


def knows_positions(positions: Any, x: Tensor) -> bool:
    """They are cos and sin, of one row or of each."""
    if not isinstance(positions, tuple) or len(positions) != 2:
        return False
    cos = positions[0]
    return type(cos) is Tensor and cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[1]


def _product(pieces: Pieces, x: Tensor, matrices: tuple[Matrix, ...], *, thin: bool, invariant: bool) -> Tensor:
    """Of x and several matrices. As many tokens are multiplied by torch, and parts of matrices by those who have split
    them; codes by their kernel."""
    joined = None if pieces.split else pieces.joint.get(matrices)  # parts have more to do than their product
    if joined is not None and joined.intact():
        return by_codes(x, joined.weight, joined.bias(), joined.activations, invariant=invariant)
    dense = [one for one in matrices if not isinstance(one, PackedLinear)]
    if thin and len(dense) == len(matrices):
        weights, biases = [one.weight.contiguous() for one in dense], [one.bias for one in dense]
        return thin_linears(x, weights, [bias for bias in biases if bias is not None])
    if invariant:
        found = [
            thin_linear(x, one.weight.contiguous(), one.bias) if not isinstance(one, PackedLinear)
            else by_codes(x, one.packed, one.bias, one.activations, invariant=True) if one.left is None
            else one(x)  # what stands beside codes since it was injected is multiplied by torch
            for one in matrices
        ]  # fmt: skip
    else:
        found = [one(x) for one in matrices]
    return torch.cat(found, -1) if len(found) > 1 else found[0]


def _attend(pieces: Pieces, qkv: Tensor, call: _Call) -> Tensor:
    """(batch, tokens, heads · dim)."""
    batch, tokens = qkv.shape[:2]
    heads, groups, dim = pieces.heads, pieces.groups, pieces.dim
    _turn(pieces, qkv, call, None)
    q, k, v = _cached(pieces, qkv, call)
    mask, causal = call.mask, call.causal
    alone = tokens == 1 and loading.runs("cached_attention", q)  # the reference is for its bits, and slow
    if (call.invariant or alone) and (causal or _is_shown(mask) or (mask is None and tokens == 1)):
        shown = None if mask is None else mask[:, 0].expand(batch, tokens, k.shape[2])
        return cached_attention(q, k, v, shown, scale=pieces.scaling)
    found = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and tokens > 1, scale=pieces.scaling, enable_gqa=heads != groups
    )
    return found.transpose(1, 2).reshape(batch, tokens, heads * dim)


def _turn(pieces: Pieces, qkv: Tensor, call: _Call, places: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """Norms of heads, then rotation to their positions, in place; k and v go to their places in a cache too."""
    heads, groups = pieces.heads, pieces.groups
    if pieces.head_norms is not None:
        parts = qkv.view(*qkv.shape[:2], heads + 2 * groups, pieces.dim)
        _norm_heads(parts[:, :, :heads], pieces.head_norms[0])
        _norm_heads(parts[:, :, heads : heads + groups], pieces.head_norms[1])
    cos, sin = call.positions
    keys, values, where = places or (None, None, None)
    rotary_cache_(
        qkv, cos.contiguous(), sin.contiguous(), keys=keys, values=values, places=where, q_heads=heads, kv_heads=groups
    )


def _is_shown(mask: Tensor | None) -> bool:
    """The mask says which keys a query sees, the same ones in all heads."""
    return mask is not None and mask.dtype is torch.bool and mask.shape[1] == 1


def _cached(pieces: Pieces, qkv: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """q (batch, heads, tokens, dim), and k and v of all tokens so far."""
    batch, tokens = qkv.shape[:2]
    parts = qkv.view(batch, tokens, pieces.heads + 2 * pieces.groups, pieces.dim).transpose(1, 2)
    q, k, v = parts.split_with_sizes([pieces.heads, pieces.groups, pieces.groups], 1)
    if call.cache is not None:
        k, v = call.cache.update(k, v, pieces.attention.layer_idx, kwargs={})
    if call.causal and tokens > 1:
        k, v = k[:, :, :tokens], v[:, :, :tokens]  # of a cache that is longer the rest is empty
    return q, k, v


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


class PackedHead(Injected):
    """y = x·Ŵᵀ + b of codes, with bits that depend on the token alone."""

    def forward(self, x: Tensor) -> Tensor:
        """As PackedLinear."""
        state: State | None = self.__dict__.get(STATE)
        own: Any = self
        if state is None or not is_plain() or type(x) is not Tensor or own.left is not None:
            found: Tensor = _own(self, PackedHead)(x)
            return found
        return by_codes(x, own.packed, own.bias, own.activations, invariant=state.invariant)


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
