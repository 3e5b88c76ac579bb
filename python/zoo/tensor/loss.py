"""Cross entropy over a vocabulary that is dealt to ranks, without gathering the logits.

With z (N, V) the logits, y (N) the words and N' those that count:

    loss = 1/N' Σ_i (log Σ_v exp(z_iv - m_i) + m_i - z_i,y_i),    m_i = max_v z_iv

Each rank has V_r columns. Four numbers a token travel: m_i (a maximum over ranks), then in one sum that of
exponentials, the logit of the word, and how many ranks have the word, which is one. Gathering would be V numbers.
Megatron-LM (Shoeybi et al. 2019, section 3) fuses the head and the loss in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.comm import Communicator
from zoo.tensor.adapters import base_of
from zoo.tensor.layers import KEEP, part_of
from zoo.tensor.region import Region


class Parts:
    """Outputs of which every rank has its own columns, where a model would return all of them.

    :meth:`gather` makes one tensor of them, on all ranks together. Nothing else can be done with it by mistake: it is
    no tensor.
    """

    def __init__(self, local: torch.Tensor, region: Region, sizes: tuple[int, ...]) -> None:
        self.local, self._region, self._sizes = local, region, sizes

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return torch.Size((*self.local.shape[:-1], sum(self._sizes)))

    def gather(self) -> torch.Tensor:
        """(…, V) on every rank. Collective over the axis: all its ranks call it."""
        return self._region.gather(self.local, list(self._sizes))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of logits that are in parts over the tensor-parallel ranks; call logits.gather() on all of "
            "them, or forward without labels."
        )


@cache
def _register() -> None:
    """Let whoever looks for tensors in outputs find the part."""
    pytree.register_pytree_node(
        Parts,
        lambda parts: ([parts.local], (parts._region, parts._sizes)),
        lambda found, known: Parts(next(iter(found)), *known),
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, start: int, comm: Communicator
    ) -> torch.Tensor:  # fmt: skip
        """(N,) losses of (N, V_r) logits and (N,) words; anything where they do not count."""
        most = logits.amax(dim=-1)
        comm.all_reduce(most, "max").wait()
        exps = (logits - most.unsqueeze(-1)).exp_()
        mine = (labels >= start) & (labels < start + logits.shape[-1])
        place = (labels - start).masked_fill(~mine, 0).unsqueeze(-1)
        own = (logits.gather(-1, place).squeeze(-1) - most).masked_fill(~mine, 0.0)
        # With t ranks the last row sums to t where a word does not count, to t + 1 where one rank has it, and to
        # nothing else: all ranks see the same sums, and raise together.
        has = torch.where(counts, mine * (comm.size + 1), 1).to(exps.dtype)
        sums = torch.stack([exps.sum(dim=-1), own, has])
        comm.all_reduce(sums).wait()
        _check_words(sums[2], comm.size)
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), place, mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # what is saved knows nothing of the logits: gradients of this would be zeros
            raise NotImplementedError(
                "backward(create_graph=True) of a loss in parts: there are no gradients of its gradients. Gather the "
                "logits: leave zoo.tensor.in_parts, vocab_parallel_lm_head, out."
            )
        probabilities, place, mine = ctx.saved_tensors
        grads = probabilities.clone()
        grads.scatter_add_(-1, place, -mine.to(grads.dtype).unsqueeze(-1))
        return grads.mul_(grad.unsqueeze(-1)), None, None, None, None


def _check_words(has: torch.Tensor, size: int) -> None:
    """A word that no rank has would be a wrong loss in silence."""
    fine = ((has == size) | (has == size + 1)).all()
    if has.device.type != "cpu":  # nothing waits for the device
        torch._assert_async(fine, "labels outside of the vocabulary, or other ones on some tensor-parallel ranks")
    elif not bool(fine):
        raise IndexError(
            "labels that are outside of the vocabulary and are not ignore_index, or that are other ones on some "
            "tensor-parallel ranks, which all see the same batch."
        )


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, start: int, comm: Communicator, *, ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """As ``torch.nn.functional.cross_entropy``, of this rank's columns of the logits. Collective over ``comm``.

    Args:
        logits: (N, V_r) of this rank, in fp32 or fp64.
        labels: (N,) the words; ``ignore_index`` for those that do not count.
        start: the first word of this rank.
        reduction: "mean" (over those that count), "sum" or "none".

    Raises:
        ValueError: a reduction that does not exist, or shapes that do not fit.
        IndexError: a label is no word, or ranks have other labels.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}; allowed are 'mean', 'sum' and 'none'.")
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}; they are (N, V_r) and (N,).")
    counts = labels != ignore_index
    losses: torch.Tensor = _CrossEntropy.apply(logits, labels.masked_fill(~counts, start), counts, start, comm)
    losses = losses.masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def causal_lm_loss(
    logits: torch.Tensor, labels: torch.Tensor, start: int, comm: Communicator, *, shift_labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None, ignore_index: int,
) -> torch.Tensor:  # fmt: skip
    """The loss of the next word, as models of transformers compute it, of logits (…, T, V_r); in fp32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if shift_labels is None:
        end = labels.new_full((*labels.shape[:-1], 1), ignore_index)
        shift_labels = torch.cat([labels[..., 1:], end], dim=-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(
        logits.flatten(0, -2), shift_labels.flatten().to(logits.device), start, comm,
        ignore_index=ignore_index, reduction=reduction,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


class ModelLoss:
    """What :func:`in_parts` puts in the place of a model's ``loss_function``."""

    def __init__(self, own: Any, head: nn.Module) -> None:
        self._own, self._head = own, head

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        part = part_of(self._head)
        if part is None or not self._head.__dict__.get(KEEP, False):
            return self._own(  # type: ignore[no-any-return]
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index, shift_labels=shift_labels, **kwargs,
            )  # fmt: skip
        return causal_lm_loss(
            logits, labels, part.cut.runs[0][0], part.region.comm, shift_labels=shift_labels,
            num_items_in_batch=num_items_in_batch, ignore_index=ignore_index,
        )  # fmt: skip


def in_parts(model: nn.Module, head: str = "lm_head") -> None:
    """Let a causal language model of transformers compute its loss from parts of the logits.

    Where a forward with gradients has ``labels``, ``logits`` of what it returns are :class:`Parts`. A forward without
    labels, or without gradients, gathers them as before.

    Raises:
        ValueError: the head is not split, or the model has another loss than that of the next word.
    """
    _, base = base_of(model)
    layer = base.get_submodule(head)
    part = part_of(layer)
    if part is None or part.sizes is None:
        raise ValueError(f"{head} is not split with gathered outputs; there is nothing to keep in parts.")
    own = getattr(base, "loss_function", None)
    if isinstance(own, ModelLoss):
        raise ValueError(
            f"{type(base).__name__} computes its loss in parts already, by in_parts or vocab_parallel_lm_head; leave "
            "one of them out."
        )
    if getattr(own, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"{type(base).__name__} has the loss {getattr(own, '__name__', own)!r}; in parts is computed that of a "
            "causal language model alone."
        )
    base.loss_function = ModelLoss(own, layer)  # type: ignore[assignment]
    _register()
    keeping = _Keeping(layer, part.region, part.sizes)
    callers: list[Any] = [base] if base is model else [base, model.base_model]  # which of them peft calls depends
    for called in callers:
        called.register_forward_pre_hook(keeping.begin, with_kwargs=True, prepend=True)
        called.register_forward_hook(keeping.end, always_call=True)


def head_in_parts(model: nn.Module) -> nn.Module | None:
    """The layer that makes a model's logits, where each rank makes those of its own words and gathers the others';
    None where it does not."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    part = None if head is None else part_of(head)
    return head if part is not None and part.sizes is not None and len(part.cut.runs) == 1 else None


@contextmanager
def parts_kept(head: nn.Module) -> Iterator[None]:
    """Inside, the layer gives this rank's part of its outputs."""
    head.__dict__[KEEP] = True
    try:
        yield
    finally:
        head.__dict__.pop(KEEP, None)


class _Keeping:
    """Hooks of a model: its head keeps parts of logits for as long as a forward with labels and gradients runs."""

    def __init__(self, head: nn.Module, region: Region, sizes: tuple[int, ...]) -> None:
        self._head, self._region, self._sizes = head, region, sizes

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None and torch.is_grad_enabled():
            self._head.__dict__[KEEP] = True

    def end(self, model: nn.Module, args: Any, found: Any) -> Any:
        if not self._head.__dict__.pop(KEEP, False) or found is None:
            return None
        if isinstance(found, tuple):
            return (found[0], Parts(found[1], self._region, self._sizes), *found[2:])
        found["logits"] = Parts(found["logits"], self._region, self._sizes)
        return found
