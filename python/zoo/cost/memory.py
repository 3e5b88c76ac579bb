"""What a rank holds: states of the model and of the optimizer, and what forward keeps for backward."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zoo.cost.step import Layout
from zoo.cost.transformer import Transformer, kept_of_layer

__all__ = ["Memory", "memory_of"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the rank that holds the most.

    Attributes:
        parameters, gradients, states: of the model, and the optimizer's (a copy in fp32 and two moments).
        activations: what forward keeps. gathered: whole parameters of stage 3 that are there for a while.
        head: logits and their gradient.
    """

    parameters: float
    gradients: float
    states: float
    activations: float
    gathered: float
    head: float

    @property
    def model_states(self) -> float:
        """Parameters, gradients and states."""
        return self.parameters + self.gradients + self.states

    @property
    def total(self) -> float:
        """The sum. The allocator's margin is not in it."""
        return self.model_states + self.activations + self.gathered + self.head

    def to_dict(self) -> dict[str, Any]:
        """Everything, and the sums."""
        return {**asdict(self), "model_states": self.model_states, "total": self.total}


def memory_of(
    model: Transformer, layout: Layout, *, parameter_bytes: int = 2, gradient_bytes: int = 2, state_bytes: int = 12,
    logit_bytes: int = 6,
) -> Memory:  # fmt: skip
    """Bytes of a rank of the first stage, and of the last one's logits where there is one stage.

    ZeRO's stage s divides by the ranks of ``data``: the states (s ≥ 1), the gradients (s ≥ 2), the parameters (s = 3).
    1F1B keeps what min(n, p) micro-batches of its layers need on the first of p stages; with v chunks what
    ``layers · (1 + (p - 1) / (p v))`` layers need, or what all n micro-batches need where that is less
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).

    Args:
        parameter_bytes, gradient_bytes, state_bytes: of one number each; 2, 2 and 12 are those of Adam with bf16.
        logit_bytes: of a logit: 6 for bf16 and a gradient in fp32; 16 where the loss copies it to fp32 too, keeps its
            logarithm and makes both gradients.
    """
    layout.check(model)
    split, p, v = layout.tensor, layout.pipeline, layout.chunks
    parameters = (model.layers // p * model.layer_parameters + model.embedding_parameters) / split
    if not model.tied and p == 1:
        parameters += model.vocab * model.hidden / split
    parts = [layout.data if layout.stage >= s else 1 for s in (3, 2, 1)]
    # Layers whose activations are there at the same time.
    most = model.layers * (1 + (p - 1) / (p * v)) if v > 1 else float(model.layers)
    alive = min(most, model.layers // p * layout.micro_batches)
    kept = kept_of_layer(
        model, layout.micro_batch, tensor=split, sequence_parallel=layout.sequence_parallel, recompute=layout.recompute
    )
    again = 0.0
    if layout.recompute == "full":  # the layer that is computed again
        again = kept_of_layer(model, layout.micro_batch, tensor=split, sequence_parallel=layout.sequence_parallel)
    tokens = layout.micro_batch * model.seq
    gathered = 0.0
    if layout.stage == 3 and layout.data > 1:  # what computes and the layer that comes, and gradients, in two bytes
        largest = max(model.layer_parameters, model.vocab * model.hidden)
        gathered = 2 * (2 * largest + model.layer_parameters) / split
    return Memory(
        parameters=parameter_bytes * parameters / parts[0], gradients=gradient_bytes * parameters / parts[1],
        states=state_bytes * parameters / parts[2], activations=alive * kept + again, gathered=gathered,
        head=logit_bytes * tokens * model.vocab / split if p == 1 else 0.0,
    )  # fmt: skip
