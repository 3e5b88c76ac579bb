"""Which files one backward and one step go through: how far a reader has to follow a gradient.

    python -m scripts.crossings                    # stage 2, two linears, two simulated ranks
    python -m scripts.crossings --stage 3 --files  # and which files, with the number of calls in each

A *file crossed* is one of zoo.zero or zoo.shard in which a function is called; a *switch* is a call or return between
two of them. Rank 0 is counted, in its second step, when nothing is built any more.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from types import FrameType
from typing import Any

ROOMS = ("/zoo/zero/", "/zoo/shard/")


class Crossings:
    """A profile function of one thread.

    Attributes:
        calls: file → functions called in it. switches: between files.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.switches = 0
        self._last: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See ``sys.setprofile``."""
        if event not in ("call", "return"):
            return
        path = frame.f_code.co_filename
        room = next((room for room in ROOMS if room in path), None)
        if room is None:
            return
        name = path[path.index(room) + 1 :]
        if event == "call":
            self.calls[name] += 1
        if self._last is not None and name != self._last:
            self.switches += 1
        self._last = name

    def __enter__(self) -> Crossings:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def count(stage: int) -> dict[str, Crossings]:
    """Of rank 0: forward, backward, and step."""
    import torch
    from torch import nn

    from zoo import sim
    from zoo.zero import ZeroOptimizer

    found = {name: Crossings() for name in ("forward", "backward", "step")}

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer: Any = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.AdamW, lr=0.1, clip_norm=1.0, param_persistence_threshold=0,
        )  # fmt: skip

        def watched(name: str, *, counts: bool) -> contextlib.AbstractContextManager[Any]:
            return found[name] if counts else contextlib.nullcontext()

        for number in range(3):
            counts = rank == 0 and number == 2
            with watched("forward", counts=counts):
                loss = model(torch.randn(2, 64)).square().mean()
            with watched("backward", counts=counts):
                loss.backward()
            with watched("step", counts=counts):
                optimizer.step()
            optimizer.zero_grad()

    sim.run(2, job)
    return found


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="python -m scripts.crossings"
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--files", action="store_true", help="with the calls in each file")
    args = parser.parse_args()
    found = count(args.stage)
    for name, crossings in found.items():
        calls = crossings.calls
        print(f"{name}: {sum(calls.values())} calls, {len(calls)} files, {crossings.switches} switches")
        if args.files:
            for file, number in calls.most_common():
                print(f"  {number:5d}  {file}")
    both = found["backward"].calls | found["step"].calls
    print(f"backward and step together: {len(both)} files")


if __name__ == "__main__":
    main()
