"""What signs leave out after many calls, by the factor a of their scale: ``python -m benchmarks.onebit.scale``.

s = a·mean |c| of a group at the workers, b·mean |c| at the servers, with what is left out fed back. Two loops, of D
ranks by hand in one process:

- *as given*: x_t = β·x_(t-1) + √(1 - β²)·noise on each rank, which does not depend on what is sent: gradients (β = 0),
  and momenta that each rank keeps for itself. Counted: RMS of what is owed, s + 1/D Σ e, over that of the mean of x.
- *fed back*: m = β·M + (1 - β)·noise, where M is what all ranks received the last time: what OnebitAdam and 0/1 Adam
  send. Counted: RMS of how far parameters are off, Σ (M - true momentum), over that of the true momentum.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.common import facts, machine, table, write_page

from zoo.comm.compression import OneBit
from zoo.comm.compression.errors import Error

Tensor = torch.Tensor
PAGE = Path(__file__).parent / "SCALE.md"
FACTORS = (0.7, 1.0, 1.25, 1.5, 1.75, 1.9)


class Mean:
    """A compressed mean over D ranks in one process; :attr:`owed` is what it leaves out of the next one."""

    def __init__(self, ranks: int, numel: int, worker: float, server: float) -> None:
        self.numel = numel
        self.codecs = [OneBit(OneBit.Config(factor=a)) for a in (worker, server)]
        self.workers, self.server = [Error(self.codecs[0]) for _ in range(ranks)], Error(self.codecs[1])

    def __call__(self, given: list[Tensor]) -> Tensor:
        """What all ranks see, (n,) fp32."""
        wires = torch.empty(len(given), self.codecs[0].wire_bytes(self.numel), dtype=torch.uint8)
        for x, error, wire in zip(given, self.workers, wires, strict=True):
            error.encode(x, [(slice(0, self.numel), wire)])
            error.commit()
        back, out = torch.empty(self.codecs[1].wire_bytes(self.numel), dtype=torch.uint8), torch.empty(self.numel)
        self.server.encode_mean(wires, self.numel, back)
        self.server.commit()
        self.codecs[1].decode_(out, back)
        return out

    @property
    def owed(self) -> Tensor:
        """s + 1/D Σ e, (n,) fp32."""
        parts = [error.value for error in self.workers]
        found = sum((part / len(parts) for part in parts if part is not None), torch.zeros(self.numel))
        return found if self.server.value is None else found + self.server.value


def as_given(mean: Mean, noise: Callable[[], Tensor], beta: float, steps: int) -> float:
    """RMS of what is owed over that of the mean of x, over the second half of the steps."""
    values = [noise() for _ in mean.workers]
    owed = size = 0.0
    for step in range(steps):
        values = [beta * x + (1 - beta**2) ** 0.5 * noise() for x in values]
        mean(values)
        if step >= steps // 2:
            owed += float(mean.owed.square().mean())
            size += float(torch.stack(values).mean(0).square().mean())
    return (owed / size) ** 0.5


def fed_back(mean: Mean, noise: Callable[[], Tensor], beta: float, steps: int) -> float:
    """RMS of how far parameters are off over that of the true momentum, over the second half of the steps."""
    momentum, true, off = (torch.zeros(mean.numel) for _ in range(3))
    far = size = 0.0
    for step in range(steps):
        grads = [noise() for _ in mean.workers]
        true = beta * true + (1 - beta) * torch.stack(grads).mean(0)
        momentum = mean([beta * momentum + (1 - beta) * g for g in grads])
        off += momentum - true
        if step >= steps // 2:
            far += float(off.square().mean())
            size += float(true.square().mean())
    return (far / size) ** 0.5


def grid(loop: Callable[..., float], beta: float, spread: float, args: argparse.Namespace) -> str:
    """A table: rows are a at the workers, columns b at the servers."""
    rows = []
    for worker in FACTORS:
        row = [f"a = {worker:g}"]
        for server in FACTORS:
            draw = torch.Generator().manual_seed(0)
            sizes = torch.exp(spread * torch.randn(args.numel, generator=draw))

            def noise(sizes: Tensor = sizes, draw: torch.Generator = draw) -> Tensor:
                return sizes * torch.randn(args.numel, generator=draw)

            row.append(f"{loop(Mean(args.ranks, args.numel, worker, server), noise, beta, args.steps):.2f}")
        rows.append(row)
    return table(["", *(f"b = {b:g}" for b in FACTORS)], rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write-results", action="store_true", help="write SCALE.md (its remarks are kept)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = [
        "# The scale of signs\n\nWritten by `python -m benchmarks.onebit.scale`, whose docstring says what is counted. "
        f"{args.ranks} ranks, {args.numel:,} elements in groups of 2,048, the second half of {args.steps} calls. "
        "*Magnitudes differ*: each element's noise is multiplied by exp(N(0, 1)).\n\n" + facts(machine(["torch"]))
    ]
    for name, loop, betas in (("As given", as_given, (0.0, 0.9, 0.99)), ("Fed back", fed_back, (0.9, 0.99))):
        for beta in betas:
            for spread, words in ((0.0, "equal magnitudes"), (1.0, "magnitudes differ")):
                parts.append(f"### {name}, β = {beta:g}, {words}\n\n{grid(loop, beta, spread, args)}")
                print(parts[-1], flush=True)
    if args.write_results:
        write_page(PAGE, "\n\n".join(parts))


if __name__ == "__main__":
    main()
