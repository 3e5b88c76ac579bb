"""All gates: a new one is admitted by a line here, and then has to pass what every gate does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zoo.moe import ExpertChoiceGate, Gate, GroupLimitedGate, LossFreeGate, Top1Gate, Top2Gate, TopKGate


@dataclass(frozen=True)
class Made:
    """One gate in one form; ``make(hidden_size, num_experts, k)``."""

    name: str
    make: Callable[[int, int, int], Gate]
    max_k: int | None = None


GATES = [
    Made("top1", lambda d, e, k: Top1Gate(d, e), 1),
    Made("top1 jitter", lambda d, e, k: Top1Gate(d, e, noise="Jitter"), 1),
    Made("top1 sampled", lambda d, e, k: Top1Gate(d, e, noise="RSample", random_tokens=False), 1),
    Made("top2", lambda d, e, k: Top2Gate(d, e), 1),
    Made("top2 plain", lambda d, e, k: Top2Gate(d, e, sample_second=False), 1),
    Made("topk", lambda d, e, k: TopKGate(d, e, k=k)),
    Made("topk sampled", lambda d, e, k: TopKGate(d, e, k=k, noise="RSample", renormalise=False)),
    Made("expert choice", lambda d, e, k: ExpertChoiceGate(d, e, k=k)),
    Made("loss free", lambda d, e, k: LossFreeGate(d, e, k=k)),
    Made("loss free softmax", lambda d, e, k: LossFreeGate(d, e, k=k, score="softmax", renormalise=False, scale=2.0)),
    Made(
        "group limited",
        lambda d, e, k: GroupLimitedGate(d, e, k=min(k, e // 2), num_groups=2, top_groups=1, of_group=min(2, e // 2)),
    ),
]
