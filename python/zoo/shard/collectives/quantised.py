"""ZeRO++: parameters and gradients that travel as int8 or int4, and frozen parameters that are kept so.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", sections 3.1 (qwZ)
and 3.3 (qgZ). Imported only where an option asks for it, because it stands on the distribution zoo-kernels.

Legend: see ``placement/axes.py``. Q = 127 for int8, 7 for int4; G elements of a group, which share an fp32 scale; x_r
the gradient of rank r; A_r(i) = max |x_r| over the group of element i.

**Quantising** an element makes an error of at most A/(2Q): the scale is s = A/Q and the element is rounded to the
nearest multiple of it (``zoo/kernels/quantise/quantise.h``, with the fp32 rounding, relative 2^-21). So does each
hop:

    |sent_i - x_i| <= A(i) / (2Q)

**qwZ.** Every rank quantises its chunk once and all ranks, the owner too, compute with what arrived. |w' - w| is at
most max|w|/254 in its group; a rank sends 1 + 4/G bytes an element instead of 2 or 4. The chunk itself, which the
optimizer updates, is not rounded.

**qgZ.** Rank (n, l) of M nodes with L ranks each has to get Σ_r of chunk (n, l). First hop, within the node: x_r is
quantised piece by piece, pieces (·, l) go to rank l, which adds what it gets, in fp32 and in rank order:

    z_n = Σ_{r in n} y_r,   |z_n - Σ_{r in n} x_r| <= Σ_{r in n} A_r / (2Q)

Second hop, between nodes: z_n is quantised again and its piece (m, l) goes to rank (m, l), which adds M of them. As
|y_r| is at most A_r, max|z_n| over a group is at most Σ_{r in n} A_r, so the second hop adds at most Σ_{r in n} A_r /
(2Q), and for the mean over N ranks

    |g' - 1/N Σ_r x_r| <= h / (2Q) · 1/N Σ_r A_r,   h hops: 2, or 1 on one node or with one rank a node

plus fp32 rounding. A rank sends b/8 + 4/G bytes for an element of b bits: P (L-1)/L of them in the first hop and P/L
(M-1)/M between nodes. The swizzled layout (piece (n, l) at place (l, n)) makes both hops plain all-to-alls and lands
each piece on the rank that owns it.

**NaN and infinity** make their group's scale NaN or infinite and what arrives NaN, through both hops, so that an
overflow is seen by whoever owns any element of that group.

Departures from the paper: groups are of 256 elements (smaller where chunks are), symmetric; hops are not pipelined
with quantisation; the mean is taken once, after the last hop; resident parameters are not quantised in either
direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zoo.comm import Communicator, Handle, Then
from zoo.cost.collectives import Hop
from zoo.layout import FlatLayout
from zoo.shard.collectives.feedback import Lossy
from zoo.shard.collectives.routes import Gather, Reduce, Routes, with_replicas
from zoo.shard.placement.axes import Axes

try:
    from zoo.kernels.quantise import dequantise_, quantise
except ModuleNotFoundError as error:
    if error.name not in ("zoo.kernels", "zoo.kernels.quantise"):
        raise
    raise ImportError(
        "zero_quantized_weights, zero_quantized_gradients and zero_quantized_nontrainable_weights stand on the "
        "distribution zoo-kernels, which is not installed."
    ) from error

GROUP_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHT_BITS = 8


def group_size_of(chunk_numel: int) -> int:
    """G for a bucket whose chunks have this many elements: all of a chunk when it is smaller."""
    return min(GROUP_SIZE, chunk_numel) or GROUP_SIZE


class QuantisedGather:
    """qwZ: int8 and scales over any other way to gather."""

    def __init__(self, inner: Gather, group_size: int) -> None:
        self._inner, self._group_size = inner, group_size

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Gather`; also this rank's own chunk arrives rounded."""
        q, scales = quantise(shard, bits=_WEIGHT_BITS, group_size=self._group_size)
        return self.start_packed(full, q, scales, label)

    def start_packed(self, full: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, label: str) -> Handle:
        """``full`` (P,) = what the int8 ``q`` (n,) with ``scales`` (n/G,) of all ranks stand for."""
        all_q, all_scales = q.new_empty(full.numel()), scales.new_empty(full.numel() // self._group_size)
        handles = [
            self._inner.start(all_q, q, f"{label} as int8"),
            self._inner.start(all_scales, scales, f"scales of {label}"),
        ]

        def unpack() -> None:
            dequantise_(full, all_q, all_scales, bits=_WEIGHT_BITS, group_size=self._group_size)

        return Then(handles, unpack)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Gather`."""
        return self._inner.hops(numel, 1) + self._inner.hops(numel // self._group_size, 4)


class QuantisedReduce:
    """qgZ: an all-to-all within nodes and one between them, each of quantised pieces."""

    def __init__(self, axes: Axes, *, bits: int, group_size: int) -> None:
        self._local, self._across = axes.local, axes.across
        self._bits, self._group_size, self._scale = bits, group_size, 1.0 / axes.num_losses

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        near, far = self._local, self._across
        if near.size == 1 or far.size == 1:
            return self._hop(full, out, near if far.size == 1 else far, self._scale, label)
        sums = torch.empty(full.numel() // near.size, dtype=torch.float32, device=full.device)
        first = self._hop(full, sums, near, 1.0, f"{label}, within a node", (far.size, near.size))
        return Then([first], lambda: self._hop(sums, out, far, self._scale, f"{label}, between nodes"), staged=True)

    def _hop(
        self, x: torch.Tensor, out: torch.Tensor, comm: Communicator, factor: float, label: str,
        swizzle: tuple[int, int] = (1, 1),
    ) -> Handle:  # fmt: skip
        how = {"bits": self._bits, "group_size": self._group_size}
        q, scales = quantise(x, **how, swizzle=swizzle)
        arrived, its_scales = torch.empty_like(q), torch.empty_like(scales)
        handles = [
            comm.all_to_all(arrived, q, label=f"{label} as int{self._bits}"),
            comm.all_to_all(its_scales, scales, label=f"scales of {label}"),
        ]
        return Then(handles, lambda: dequantise_(out, arrived, its_scales, **how, ranks=comm.size, factor=factor))

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        near, far = self._local, self._across
        if near.size == 1 or far.size == 1:
            return self._messages(numel, near if far.size == 1 else far)
        return self._messages(numel, near) + self._messages(numel // near.size, far)

    def _messages(self, numel: int, comm: Communicator) -> list[Hop]:
        sizes = (numel * self._bits // 8, numel // self._group_size * 4)
        return [Hop("all_to_all", comm, size) for size in sizes]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A rank's chunk of a frozen bucket, kept as int8 and scales: y = q · s.

    ``raw`` (n + 4 n/G,) uint8 has the scales first, then q: one run of bytes, which any tier can hold.
    """

    raw: torch.Tensor
    group_size: int
    gather: QuantisedGather

    @property
    def nbytes(self) -> int:
        """n + 4 n/G."""
        return self.raw.nbytes

    @property
    def scales(self) -> torch.Tensor:
        """(n/G,) fp32."""
        return self.raw[: self._scale_bytes].view(torch.float32)

    @property
    def q(self) -> torch.Tensor:
        """(n,) int8."""
        return self.raw[self._scale_bytes :].view(torch.int8)

    @property
    def _scale_bytes(self) -> int:
        return self.raw.numel() // (self.group_size + 4) * 4

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Packed:
        """The same on another device."""
        return replace(self, raw=self.raw.to(device, non_blocking=non_blocking))

    def start(self, full: torch.Tensor, label: str) -> Handle:
        """Gather the values of all ranks into ``full``."""
        return self.gather.start_packed(full, self.q, self.scales, label)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """(n,) what is kept, in the parameters' dtype."""
        out = torch.empty(self.q.numel(), dtype=dtype, device=self.q.device)
        dequantise_(out, self.q, self.scales, bits=_WEIGHT_BITS, group_size=self.group_size)
        return out


class Packer:
    """Makes :class:`Packed` of chunks."""

    def __init__(self, inner: Gather, group_size: int) -> None:
        self._gather, self._group_size = QuantisedGather(inner, group_size), group_size

    def __call__(self, values: torch.Tensor) -> Packed:
        """Quantise (n,) ``values``."""
        q, scales = quantise(values, bits=_WEIGHT_BITS, group_size=self._group_size)
        return self.over(torch.cat([scales.view(torch.uint8), q.view(torch.uint8)]))

    def over(self, raw: torch.Tensor) -> Packed:
        """See :class:`~zoo.shard.collectives.routes.Packer`."""
        return Packed(raw=raw, group_size=self._group_size, gather=self._gather)

    def parts(self, numel: int, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        """See :class:`~zoo.shard.collectives.routes.Packer`: whole groups."""
        size, scale_bytes = self._group_size, numel // self._group_size * 4
        first, last = start // size, -(-stop // size)
        ranges = [(4 * first, 4 * last), (scale_bytes + first * size, scale_bytes + last * size)]
        return first * size, ranges

    def nbytes(self, numel: int) -> int:
        """Bytes of n packed elements."""
        return numel + numel // self._group_size * 4

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Gather`."""
        return self._gather.hops(numel, itemsize)


def quantised_routes(
    plain: Routes, group_size: int, *, weights: bool, stored: bool, gradient_bits: int | None,
    feedback: FlatLayout | None = None,
) -> Routes:  # fmt: skip
    """The routes of a bucket of which something is quantised.

    Args:
        weights: gather as int8.
        stored: keep the chunk as int8.
        gradient_bits: of gradients, None for their own dtype.
        feedback: keep what is lost of gradients for the next ones, of a bucket with this layout; None: forget it.

    Among a single rank nothing travels, and only ``stored`` rounds.
    """
    axes, found = plain.axes, plain
    if stored:
        packer = Packer(plain.exact, group_size)
        return replace(plain, pack=packer)
    if axes.shard.size == 1:
        return plain
    if weights:
        found = replace(found, gather=QuantisedGather(plain.exact, group_size))
    if gradient_bits is not None:
        reduce: Reduce = QuantisedReduce(axes, bits=gradient_bits, group_size=group_size)
        if feedback is not None:
            seen = partial(_seen, bits=gradient_bits, group_size=group_size)
            reduce = errors = Lossy(reduce, seen, axes, feedback)
            found = replace(found, feedback=errors)
        found = replace(found, reduce=with_replicas(reduce, axes))
    return found


def _seen(values: torch.Tensor, *, bits: int, group_size: int) -> torch.Tensor:
    """(P,) what the receivers of quantised ``values`` make of them, after the first hop."""
    q, scales = quantise(values, bits=bits, group_size=group_size)
    out = torch.empty_like(values)
    dequantise_(out, q, scales, bits=bits, group_size=group_size)
    return out


def check_dtypes(names: Sequence[str], *dtypes: torch.dtype | None) -> None:
    """Raise NotImplementedError for a dtype that cannot be quantised."""
    for dtype in dtypes:
        if dtype is not None and dtype not in DTYPES:
            raise NotImplementedError(
                f"quantised parameters and gradients have to be float32, bfloat16 or float16; {names[0]!r} would be "
                f"sent from {dtype}. Leave the zero_quantized_* options off, or convert the model."
            )
