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
    """Bytes of a rank of the first stage of a pipeline, or of the last one where that holds more.

    The last one has the logits, and a head of its own, which is a copy of the embedding where they are tied.

    ZeRO's stage s divides by the ranks of ``data``: the states (s ≥ 1), the gradients (s ≥ 2), the parameters (s = 3).
    1F1B keeps what min(n, p) micro-batches of its layers need on the first of p stages; with v chunks what
    ``layers · (1 + (p - 1) / (p v))`` layers need, or what all n micro-batches need where that is less
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3). The last stage keeps what
    ``layers · (1 - (p - 1) / (p v))`` layers need.

    Args:
        parameter_bytes, gradient_bytes, state_bytes: of one number each; 2, 2 and 12 are those of Adam with bf16.
        logit_bytes: of a logit: 6 for bf16 and a gradient in fp32; 16 where the loss copies it to fp32 too, keeps its
            logarithm and makes both gradients.
    """
    layout.check(model)
    sizes = parameter_bytes, gradient_bytes, state_bytes, logit_bytes
    ends = [_of_stage(model, layout, *sizes, last=last) for last in (False, True)[: layout.pipeline]]
    return max(ends, key=lambda found: found.total)


def _of_stage(
    model: Transformer, layout: Layout, parameter_bytes: int, gradient_bytes: int, state_bytes: int, logit_bytes: int,
    *, last: bool,
) -> Memory:  # fmt: skip
    """Of the last stage, or of the first one, which is both where it is alone."""
    split, p, v = layout.tensor, layout.pipeline, layout.chunks
    table = model.vocab * model.hidden
    outside = table if last else model.embedding_parameters
    if not model.tied and p == 1:
        outside += table
    parameters = (model.layers // p * model.layer_parameters + outside) / split
    parts = [layout.data if layout.stage >= s else 1 for s in (3, 2, 1)]
    # Layers whose activations are there at the same time: of 1F1B those of p micro-batches on the first stage.
    more = (p - 1) / (p * v)
    most = model.layers * ((1 - more) if last else (1 + more if v > 1 else 1.0))
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
        head=logit_bytes * tokens * model.vocab / split if p == 1 or last else 0.0,
    )  # fmt: skip
