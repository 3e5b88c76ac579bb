"""The curvature of a loss by blocks of weights: largest eigenvalues of Hessians, by power iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.comm import Communicator
from zoo.compression.attach import attach, detach, transforms_of
from zoo.compression.planning import holders_of
from zoo.compression.quantisers import noise
from zoo.compression.technique import Order, Site, Transform
from zoo.layout import logical_name

HALF_SCALE = 1024.0
"""What a loss is multiplied by where a block is in fp16, whose gradients would vanish else."""


def power_iteration(
    product: Callable[[Tensor], Tensor], start: Tensor, *, max_iter: int = 100, tol: float = 1e-2,
    stability: float = 1e-6,
) -> float:  # fmt: skip
    """|λ| of the eigenvalue of largest magnitude of a symmetric H.

    v ← Hv/(|Hv| + stability), λ = vᵀHv/vᵀv, until |λ_k - λ_(k-1)| ≤ tol·|λ_k|, at most ``max_iter`` products.

    Args:
        product: v → Hv, (n,).
        start: v_0, (n,), not 0.

    Returns:
        |λ|, NaN or infinity where a product has such elements; 0 where Hv is.
    """
    v, before = start / start.norm(), float("nan")
    for _ in range(max_iter):
        found, square = product(v), float(v.dot(v))
        if square == 0:  # |Hv| far below ``stability`` has shrunk v until nothing was left
            return abs(before)
        now = float(v.dot(found)) / square
        size = float(found.norm())
        if size == 0 or not size < float("inf") or abs(now - before) <= tol * abs(now):
            return abs(now)
        v, before = found / (size + stability), now
    return abs(now)


def eigenvalues(
    model: nn.Module, loss: Callable[[], Tensor], blocks: Mapping[str, Sequence[nn.Parameter]], *,
    max_iter: int = 100, tol: float = 1e-2, stability: float = 1e-6, seed: int = 0, comm: Communicator | None = None,
) -> dict[str, float]:  # fmt: skip
    """λ_B = the largest |eigenvalue| of ∂²L/∂W_B², for each block B of weights alone.

        Hv ≈ (∇L(w + h·v) - ∇L(w - h·v)) / 2h,   |v| = 1,   h = ε^(1/3)·|W_B|, ε of the dtype of the weights

    by differences of gradients, because kernels of zoo differentiate once. W_B is what the model computes with: rounded
    where it is rounded. The model is in evaluation mode meanwhile, inputs are not rounded, every evaluation draws the
    same random numbers, and L is the mean over ranks. Afterwards weights, gradients, buffers, random states and
    transforms are as they were. Nothing is written to a weight: h·v is added where a forward reads it, so that it may
    be sharded. Collective, where there are ranks; each has v and Hv of one block, whole, in fp32, and pays two forwards
    and backwards for each product. Weights that the forward does not read count as flat.

    Yao et al. 2020, "PyHessian", algorithm 2; per layer as in Shen et al. 2020, "Q-BERT", section 3.1, which do it by
    differentiating twice.

    Args:
        model: as it trains; wrapped by ZeRO or not.
        loss: calls the model and returns a scalar, the same graph each time.
        blocks: name → parameters of modules that call themselves (linear layers, ...); tied ones are moved together.
        max_iter, tol, stability: see :func:`power_iteration`.
        seed: of v_0, with the names of the parameters.
        comm: ranks whose losses are averaged; None: this one alone.

    Raises:
        ValueError: a parameter that is none of the model, or a module that cannot have transforms.
    """
    names = {id(p): logical_name(model, name) for name, p in model.named_parameters()}
    holders, shifts = holders_of(model), {}
    for block, parameters in blocks.items():
        for p in parameters:
            if id(p) not in holders:
                raise ValueError(f"block {block!r}: a parameter of shape {tuple(p.shape)} is none of the model.")
            shifts[id(p)] = Shift(Site(module=names[id(p)], where="weight", technique="eigenvalue"), tuple(p.shape))
    found: dict[str, float] = {}
    with _quiet(model):
        try:
            for key, shift in shifts.items():
                for module, path in holders[key]:
                    attach(module, "weight", path, shift)
            same = _repeatable(loss)
            with torch.no_grad():
                same()
            _agree(list(shifts.values()), comm)
            for block, parameters in blocks.items():
                mine = [shifts[key] for key in dict.fromkeys(map(id, parameters)) if shifts[key].seen]
                found[block] = 0.0
                if mine:
                    start = torch.cat([shift.start(seed) for shift in mine])
                    product = _product(same, mine, comm)
                    found[block] = power_iteration(product, start, max_iter=max_iter, tol=tol, stability=stability)
        finally:
            detach(model, shifts.values())
    return found


class Shift(Transform):
    """w → w + δ, δ a leaf whose gradient is that of the loss by what the model computes with.

    Attributes:
        seen: some rank has called it; then ``device`` and ``dtype`` are those of w, ``square`` is |w|².
    """

    order: ClassVar[Order] = Order.LAST

    def __init__(self, site: Site, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.delta: Tensor | None = None
        self.seen, self.square = False, 0.0
        self.device, self.dtype = torch.device("cpu"), torch.float32
        super().__init__(site)

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        if self.delta is None:
            if not self.seen:
                self.seen, self.square = True, float(value.detach().double().square().sum())
                self.device, self.dtype = value.device, value.dtype
            return value
        return (value.detach().to(self.delta.dtype) + self.delta).to(value.dtype)

    @property
    def wide(self) -> torch.dtype:
        """Of δ: fp32, or fp64 where w is."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def start(self, seed: int) -> Tensor:
        """Where v begins, (n,), uniform in [-1/2, 1/2)."""
        like = torch.empty(self.shape, dtype=self.wide, device=self.device)
        return noise(like, seed=seed, step=0, name=self.site.name).flatten() - 0.5


def _agree(shifts: Sequence[Shift], comm: Communicator | None) -> None:
    """All ranks know the same of each weight, though some may not have used it in their batch."""
    if comm is None or comm.size == 1 or not shifts:
        return
    known = torch.tensor([[s.square, float(s.seen)] for s in shifts], dtype=torch.float64, device=comm.device)
    comm.all_reduce(known, "max").wait()
    for shift, (square, seen) in zip(shifts, known.tolist(), strict=True):
        if seen and not shift.seen:
            first = next((s for s in shifts if s.seen), None)
            if first is not None:
                shift.device, shift.dtype = first.device, first.dtype
        shift.square, shift.seen = square, bool(seen)


def _product(loss: Callable[[], Tensor], shifts: Sequence[Shift], comm: Communicator | None) -> Callable[..., Tensor]:
    """v → Hv of one block."""
    size = sum(s.square for s in shifts) ** 0.5
    epsilon = max(torch.finfo(s.dtype).eps for s in shifts)
    h: float = epsilon ** (1 / 3) * (size if size > 0 else 1.0)
    scale = HALF_SCALE if any(s.dtype is torch.float16 for s in shifts) else 1.0
    counts = [_count(s.shape) for s in shifts]

    def gradient(delta: Tensor) -> Tensor:
        parts = [part.reshape(s.shape).to(s.device) for s, part in zip(shifts, torch.split(delta, counts), strict=True)]
        leaves = [part.detach().requires_grad_() for part in parts]
        try:
            for shift, leaf in zip(shifts, leaves, strict=True):
                shift.delta = leaf
            with torch.enable_grad():
                value = loss()
            if not value.requires_grad:
                return torch.zeros_like(delta)
            grads: Sequence[Tensor | None] = torch.autograd.grad(value * scale, leaves, allow_unused=True)
        finally:
            for shift in shifts:
                shift.delta = None
        full = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
        whole: Tensor = torch.cat([g.flatten().to(delta) for g in full]) / scale
        return whole

    def product(v: Tensor) -> Tensor:
        step = v * h
        found = (gradient(step) - gradient(-step)) / (2 * h)
        if comm is not None and comm.size > 1:
            found = found.to(comm.device)
            comm.all_reduce(found).wait()
            found = (found / comm.size).to(v.device)
        return found

    return product


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _repeatable(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Each call draws the same."""
    cpu = torch.get_rng_state()
    devices = {i: torch.cuda.get_rng_state(i) for i in _devices()}

    def same() -> Tensor:
        torch.set_rng_state(cpu)
        for i, state in devices.items():
            torch.cuda.set_rng_state(state, i)
        return loss()

    return same


def _devices() -> list[int]:
    begun = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.current_device()] if begun else []


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and unrounded inputs; afterwards everything is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(t, t.active, t.training, t.used) for t in transforms_of(model)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=_devices()):
        try:
            for module, _ in modes:
                module.training = False
            for transform, *_ in flags:
                transform.active = transform.active and transform.site.where == "weight"
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for transform, active, training, used in flags:
                transform.active, transform.training, transform.used = active, training, used
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
