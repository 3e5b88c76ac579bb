"""What decoder layers are made of, as data: a kind names the children of a layer, whatever family it is of.

Names cannot say everything (a factor on a residual, a cap on scores); what they leave open is decided by the proof.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zoo.inject.codes import Joined, joined
from zoo.inject.watch import Watch, watch
from zoo.kernels import loading
from zoo.kernels.activation import reference as activation
from zoo.kernels.decoder_layer import Product, RmsNorm
from zoo.kernels.rms_norm import reference as rms_norm
from zoo.nn import PackedLinear
from zoo.tensor.layers import Column, Layer, Row, part_of
from zoo.tensor.proof import exact


@dataclass(frozen=True)
class Kind:
    """A layer that computes y = x + out(attention(qkv(norm_1(x)))) and z = y + down(φ(gate) ⊙ up) of norm_2(y).

    Attributes:
        attention, mlp, norms: children of the layer.
        qkv: of the attention, the matrices that make q, k and v, in this order. head_norms: of q and of k, where the
            attention has them. out: the matrix behind the heads.
        gate_up: of the perceptron, the matrices that make gate and up. down: the matrix behind them. act: φ.
    """

    name: str
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    act: str = "act_fn"


KINDS = (
    Kind("llama"),  # Mistral, Qwen2, Qwen3, Gemma, SmolLM3 and others
    Kind("phi3", qkv=("qkv_proj",), gate_up=("gate_up_proj",), act="activation_fn"),
)


Matrix = nn.Linear | Column | Row | PackedLinear
"""What multiplies in a layer: whole, this rank's part, or codes."""


ATTENTIONS = ("sdpa", "eager")
"""Of ``attn_implementation``: those whose masks a layer gets as they are added to scores, or as booleans."""


def attention_function() -> Any:
    """What transformers calls for "sdpa" now: anybody may put another one there."""
    utils = sys.modules.get("transformers.modeling_utils")
    known = getattr(utils, "ALL_ATTENTION_FUNCTIONS", None)
    return None if known is None else known.get("sdpa")


class Unfit(Exception):
    """A layer is of no kind; the message says what it has that the nearest kind has not."""


@dataclass(eq=False)
class Norm:
    """A root mean square norm: its module, and what :func:`zoo.kernels.rms_norm.rms_norm` needs to know.

    Attributes:
        named: the attribute of the module that is ε. plus_one: it multiplies by 1 + w.
    """

    module: nn.Module
    named: str
    plus_one: bool

    @property
    def eps(self) -> float:
        """As it is now."""
        return float(getattr(self.module, self.named))

    @property
    def weight(self) -> torch.Tensor:
        """As it is now."""
        found: torch.Tensor = self.module._parameters["weight"]  # type: ignore[assignment]
        return found

    def now(self) -> RmsNorm:
        """As kernels take it."""
        return RmsNorm(self.weight, self.eps, self.plus_one)


@dataclass(eq=False)
class Pieces:
    """The pieces of one layer.

    Attributes:
        heads, groups, dim: heads of q, heads of k and v, of this rank; numbers of a head. activation: φ, one of
            ``zoo.kernels.activation.ops.FORMS``.
        split: some matrices are parts of ones that zoo.tensor has split, which know how their product goes on.
        watch: whether the layer still is what it was. function: what transformers calls for sdpa.
        drops: (attributes of a module, name) of each rate of dropout.
        joint: codes that lie one behind the other, by the matrices of a product. ready: the products of the last call,
            and the tensors that they were made of.
    """

    attention: Any
    norms: tuple[Norm, Norm]
    qkv: tuple[Matrix, ...]
    head_norms: tuple[Norm, Norm] | None
    out: Matrix
    gate_up: tuple[Matrix, ...]
    down: Matrix
    heads: int
    groups: int
    dim: int
    activation: str
    split: bool
    watch: Watch
    function: Any
    drops: tuple[tuple[dict[str, Any], str], ...] = ()
    joint: dict[tuple[nn.Module, ...], Joined] = field(default_factory=dict)
    ready: tuple[list[tuple[dict[str, Any], str, Any]], tuple[Product, ...]] | None = None

    def join(self) -> None:
        """Lay codes that are multiplied together one behind the other."""
        for matrices in (self.qkv, self.gate_up):
            found = joined(matrices)
            if found is not None:
                self.joint[matrices] = found

    @property
    def scaling(self) -> float:
        """Of scores, as it is now."""
        found = getattr(self.attention, "scaling", None)
        return float(found) if isinstance(found, (int, float)) else float(self.dim**-0.5)

    def is_thin(self) -> bool:
        """Its matrices are whole, on a CPU and contiguous, as a thin product reads them, and it is compiled."""
        return (
            not self.split
            and all(one.weight.is_contiguous() and one.weight.device.type == "cpu" for one in self.dense)
            and all(loading.runs("thin_linear", one.weight) for one in self.dense[:1])
        )

    def how(self) -> Any:
        """``attn_implementation``, as it is now."""
        return self.attention.config._attn_implementation

    def products(self) -> tuple[Product, ...] | None:
        """What q·k·v, out, gate·up and down are multiplied by now, of a layer that is split on this rank; None where a
        product is none of one kernel."""
        if self.ready is not None:
            sources, known = self.ready
            for children, name, tensor in sources:
                if children[name] is not tensor or not (tensor is None or tensor.is_contiguous()):
                    break
            else:
                if all(joint.intact() for joint in self.joint.values()):
                    return known
        self.ready = None
        found = [self._product_of(matrices) for matrices in (self.qkv, (self.out,), self.gate_up, (self.down,))]
        products = tuple(one for one in found if one is not None)
        if len(products) < len(found):
            return None
        if all(joint.bias() is None for joint in self.joint.values()):  # what was copied could be stale
            holders = [children for one in self.matrices for children in (one._parameters, one._buffers)]
            self.ready = [(children, name, children[name]) for children in holders for name in children], products
        return products

    def _product_of(self, matrices: tuple[Matrix, ...]) -> Product | None:
        parts = [part for one in matrices if (part := part_of(one)) is not None]
        if any(part.turned or part.rows or part.sizes or part.scatter or part.region.pieces > 1 for part in parts):
            return None
        if any(part.take for part in parts) and (matrices is not self.qkv or isinstance(matrices[0], PackedLinear)):
            return None
        if not isinstance(matrices[0], PackedLinear):
            if len(matrices) > 1 and any(isinstance(one, PackedLinear) for one in matrices):
                return None
            weights: list[Any] = [one._parameters["weight"] for one in matrices]
            if not all(weight.is_contiguous() for weight in weights):
                return None
            biases: list[Any] = [bias for one in matrices if (bias := one._parameters["bias"]) is not None]
            if isinstance(matrices[0], Row):
                biases = []  # once, behind the sum over ranks
            return Product(weights, biases, [])
        joint = self.joint.get(matrices)
        if joint is not None and joint.intact():
            return Product.of_codes(joint.weight, joint.bias(), activations=joint.activations)
        only: Any = matrices[0]
        if len(matrices) > 1 or only.left is not None:
            return None
        bias = None if isinstance(only, Row) else only.bias
        return Product.of_codes(only.packed, bias, activations=only.activations)

    @cached_property
    def order(self) -> torch.Tensor | None:
        """In which order features of the products of q, k and v follow each other; None as they are."""
        taken = [getattr(part_of(one), "take", None) for one in self.qkv]
        if not any(taken):
            return None
        ends = list(accumulate(map(_rows, self.qkv), initial=0))
        runs = [
            [(begin + start, begin + stop) for start, stop in take or ((0, end - begin),)]
            for take, begin, end in zip(taken, ends, ends[1:], strict=False)
        ]
        return torch.cat([torch.arange(start, stop) for each in runs for start, stop in each])

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them."""
        return (*self.qkv, self.out, *self.gate_up, self.down)

    @cached_property
    def dense(self) -> list[nn.Linear | Column | Row]:
        """Those that are numbers, not codes."""
        return [one for one in self.matrices if not isinstance(one, PackedLinear)]


def pieces_of(layer: nn.Module) -> Pieces:
    """Of a layer of one of :data:`KINDS`.

    Raises:
        Unfit: it is of none.
    """
    if "forward" in layer.__dict__:
        raise Unfit("it has a forward of its own, on the instance")
    reasons: list[tuple[int, int, str]] = []
    for kind in KINDS:
        try:
            return _pieces(layer, kind)
        except Unfit as error:
            reasons.append((_missing(layer, kind), len(reasons), f"{error} (kind {kind.name!r})"))
    raise Unfit(min(reasons)[2])


def _missing(layer: nn.Module, kind: Kind) -> int:
    """How many of the names of a kind a layer has not."""
    inner = [f"{kind.attention}.{name}" for name in (*kind.qkv, kind.out)]
    inner += [f"{kind.mlp}.{name}" for name in (*kind.gate_up, kind.down, kind.act)]
    known = {name for name, _ in layer.named_modules()}
    return sum(name not in known for name in (*kind.norms, kind.attention, kind.mlp, *inner))


def _pieces(layer: nn.Module, kind: Kind) -> Pieces:
    children = _children(layer, (kind.attention, kind.mlp, *kind.norms), "")
    attention, mlp = children[kind.attention], children[kind.mlp]
    has_norms = all(name in dict(attention.named_children()) for name in kind.head_norms)
    inner = _children(attention, (*kind.qkv, kind.out, *(kind.head_norms if has_norms else ())), f"{kind.attention}.")
    others = _children(mlp, (*kind.gate_up, kind.down, kind.act), f"{kind.mlp}.")
    qkv, gate_up = (
        tuple(_linear(of, name) for name in names) for of, names in ((inner, kind.qkv), (others, kind.gate_up))
    )
    for group in (qkv, gate_up):
        if len({one.bias is None for one in group}) > 1:
            raise Unfit("some matrices of one product have a bias and some have none")
    out, down = _linear(inner, kind.out), _linear(others, kind.down)
    dim, width = getattr(attention, "head_dim", None), sum(map(_features, qkv))
    if not isinstance(dim, int) or dim < 1:
        raise Unfit(f"head_dim of {kind.attention} is {dim!r}")
    heads = (_features(qkv[0]) if len(qkv) == 3 else _inputs(out)) // dim
    groups, left = divmod(width - heads * dim, 2 * dim)
    if left or groups < 1 or heads % groups or (len(qkv) == 3 and _features(qkv[1]) != groups * dim):
        raise Unfit(f"q, k and v have {width} features, which are no heads of {dim} beside {heads} of q")
    first, second = (norm_of(children[name]) for name in kind.norms)
    head_norms = (norm_of(inner[kind.head_norms[0]]), norm_of(inner[kind.head_norms[1]])) if has_norms else None
    return Pieces(
        attention=attention, norms=(first, second), qkv=qkv, head_norms=head_norms, out=out,
        gate_up=gate_up, down=down, heads=heads, groups=groups, dim=dim,
        activation=_activation(others[kind.act]),
        split=any(isinstance(one, Layer) for one in (*qkv, out, *gate_up, down)), watch=watch(layer, (attention, mlp)),
        function=attention_function(), drops=tuple(_rates(layer)),
    )  # fmt: skip


def _rates(layer: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    for module in layer.modules():
        for name, value in vars(module).items():
            if isinstance(value, (int, float)) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                yield vars(module), name


def _children(module: nn.Module, names: tuple[str, ...], where: str) -> dict[str, nn.Module]:
    found = dict(module.named_children())
    missing = [name for name in names if name not in found]
    if missing:
        raise Unfit(f"there is no {where}{missing[0]}")
    for name, child in found.items():
        if name not in names and not isinstance(child, (nn.Dropout, nn.Identity)):
            raise Unfit(f"there is {where}{name} besides")
    if where and next(module.parameters(recurse=False), None) is not None:
        raise Unfit(f"{where[:-1]} has parameters of its own")
    return found


def _linear(children: dict[str, nn.Module], name: str) -> Matrix:
    found = children[name]
    if isinstance(found, (Column, Row)) and {nn.Linear, PackedLinear} & set(type(found).__mro__):
        return found
    if isinstance(found, PackedLinear) and type(found) is PackedLinear:
        return found
    if type(found) is not nn.Linear:
        raise Unfit(f"{name} is a {type(found).__name__}, not a Linear")
    return found


def _inputs(matrix: Matrix) -> int:
    return matrix.in_features if isinstance(matrix, PackedLinear) else matrix.weight.shape[1]


def _rows(matrix: Matrix) -> int:
    """Of the weight that this rank has."""
    return matrix.out_features if isinstance(matrix, PackedLinear) else len(matrix.weight)


def _features(matrix: Matrix) -> int:
    """Of what it returns, on this rank."""
    part = part_of(matrix)
    if part is None or isinstance(matrix, Row):
        return _rows(matrix)
    if part.sizes is not None:
        return sum(part.sizes)
    runs = part.take or part.rows
    return _rows(matrix) if runs is None else sum(stop - start for start, stop in runs)


def norm_of(module: nn.Module) -> Norm:
    """Which norm it is, by what it computes.

    Raises:
        Unfit: another one than the root mean square.
    """
    weight = getattr(module, "weight", None)
    named = next((n for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or named is None:
        raise Unfit(f"{type(module).__name__} is no root mean square norm with a weight")
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        x, w = (torch.randn(3, len(weight), generator=generator, dtype=torch.float64) for _ in range(2))
    # A copy: the module itself may be computing in another thread.
    alone = copy.copy(module)
    alone.__dict__["_parameters"] = module._parameters | {"weight": nn.Parameter(w[0], requires_grad=False)}
    eps = float(getattr(module, named))
    try:
        with exact(), torch.no_grad():
            y = type(module).forward(alone, x)
    except Exception as error:
        raise Unfit(f"{type(module).__name__} fails alone ({type(error).__name__}: {error})") from error
    for plus_one in (False, True):
        mine = rms_norm.rms_norm(x, w[0], eps, plus_one)
        if isinstance(y, torch.Tensor) and y.shape == x.shape and bool(((y - mine).abs() <= 1e-9).all()):
            return Norm(module, named, plus_one)
    raise Unfit(f"{type(module).__name__} computes another norm than the root mean square")


def _activation(module: nn.Module) -> str:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, device="cpu")
    with exact(), torch.no_grad():
        y = module(x)
    for form in ("silu", "gelu_tanh", "gelu", "relu"):
        if bool(((y - activation.activate(x, form, False)).abs() <= 1e-9).all()):
            return form
    raise Unfit(f"{type(module).__name__} is another activation than silu, gelu and relu")
