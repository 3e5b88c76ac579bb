"""What a training framework adds to the operations themselves, as numbers: what :mod:`zoo.cost.calibration` fits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EAGER", "LEAN", "SOFTWARE", "Software"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """Of a framework.

    Attributes:
        forward_s, backward_s: that the host needs to begin the operations of a layer. It runs ahead of the device: the
            longer of both counts.
        split_s: more of each where the layer is split over ranks.
        whole_softmax: the number of heads times sequences that the fused softmax needs a multiple of; 1 for any.
            unfused_s: more of each direction where it has none.
        micro_batch_s: of the host, for each micro-batch and stage. head_s: of the last stage, for the loss.
        gap_s: on the device, for each product: casts, copies and allocations around it.
        loss_bytes: read and written for each logit in forward and backward.
        update_bytes: read and written for each parameter of this rank in a step.
        reduce_part: of the gradients' reduction, what the backward does not hide.
        message_s: of a message between stages beside its bytes. step_s: of a step, whatever its size.
        contention: of the time in which communication runs beside computation, what the computation takes longer.
        gradient_bytes: of a gradient on the wire.
        attention_reached: of the device's peak, the part that attention in one operation reaches.
        link_reached: of the links' rates, the part that collectives over the data axis reach.
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    split_s: float = 0.0
    whole_softmax: int = 1
    unfused_s: float = 0.0
    micro_batch_s: float = 0.0
    head_s: float = 0.0
    gap_s: float = 5e-6
    loss_bytes: float = 20.0
    update_bytes: float = 30.0
    reduce_part: float = 1.0
    message_s: float = 1e-5
    step_s: float = 0.0
    contention: float = 0.0
    gradient_bytes: int = 2
    attention_reached: float = 0.45
    link_reached: float = 1.0


LEAN = Software(name="lean")
"""One whose host is never waited for. A kernel begins about 5 µs after the one before it."""
EAGER = Software(
    name="eager", gap_s=8e-5, loss_bytes=30.0, contention=0.6, link_reached=0.6, attention_reached=0.45, step_s=0.03
)
"""Blocks that are not compiled, under FSDP or ZeRO-3: fitted to 38 steps of llm-foundry on A100s (3.2 % mean
error), with the rate of attention that FlashAttention 2 has there (Dao 2023, arXiv:2307.08691, figure 4)."""
SOFTWARE = {found.name: found for found in (EAGER, LEAN)}
