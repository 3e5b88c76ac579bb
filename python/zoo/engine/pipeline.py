"""The engine of a pipeline: whole batches only, and what a script asks of the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zoo.engine.batches import evaluating
from zoo.engine.engine import Engine

if TYPE_CHECKING:
    from zoo.pipe.runtime.runner import PipelineRunner


class PipelineEngine(Engine):
    """A model whose layers are on several ranks, in training: ``loss = engine.train_batch(batches)``.

    ``initialize`` makes one for a :class:`zoo.pipe.PipelineModule`. Each rank's batches are those of its data-parallel
    place: the ranks of one pipeline get the same ones, and only the first and the last stage look at them.
    """

    _runner: PipelineRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = GivenBatches(needed=self.is_first_stage() or self.is_last_stage())
        self.boundary.fix(True)  # it is driven batch by batch, and each ends in a step

    # -- whole batches ------------------------------------------------------------------------------------------------

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, *, lr_kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:  # fmt: skip
        """One step on the next ``gradient_accumulation_steps`` micro-batches of each pipeline.

        Args:
            data_iter: an iterator of batches, (inputs, labels) each, or a list of those of this step; on stages that
                are neither first nor last it may be None. Where it is not given: what :meth:`set_dataiterator` was
                given, or the engine's own data.
            lr_kwargs: arguments of the schedule's ``step``.

        Returns:
            The mean loss of all micro-batches and data-parallel ranks, a float32 scalar, the same on all ranks.

        Raises:
            StopIteration: the data are at their end, on all ranks.
            ValueError: they ended in the middle of the batch, or not on all ranks; or it is a loader, which would begin
                anew in each step.
        """
        batches = self._given.iterator(data_iter, own=self.dataloader is not None, whole_step=self.accumulation)
        return super().train_batch(batches, lr_kwargs=lr_kwargs)

    def eval_batch(
        self, data_iter: Any = None, return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """The loss of the next micro-batches, in evaluation mode and without gradients. Collective.

        Args:
            data_iter: as for :meth:`train_batch`.
            return_logits: return (loss, outputs), the outputs being a list with what the last stage returned for each
                micro-batch there, and None on other stages.
            compute_loss: False: only outputs; the loss is None. ``loss_fn`` is not called, and batches may be inputs
                without labels.
            reduce_output: "avg": the mean over micro-batches and data-parallel ranks; None: a list of this pipeline's
                losses, one for each micro-batch.
            bcast_loss: the loss is on all stages; otherwise on the last, and None elsewhere.
            num_micro_batches: how many; by default ``gradient_accumulation_steps``.

        Returns:
            The loss, a float32 scalar; see ``return_logits`` and ``reduce_output``.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"eval_batch got reduce_output={reduce_output!r}; allowed are 'avg' and None.")
        n = _number_of("eval_batch", num_micro_batches, self.accumulation)
        if self._destroyed:
            raise ValueError("eval_batch() after destroy(): this engine is no more. Call initialize again.")
        batches = self._given.iterator(data_iter, own=self.dataloader is not None)
        batches = self._batches.next_ones() if batches is None else batches
        with evaluating(self.module), torch.no_grad():
            outputs, losses = self._runner.forward(
                batches, n, outputs=return_logits or not compute_loss, losses=compute_loss
            )
        kept = outputs if self.is_last_stage() else None
        if not compute_loss:
            return (None, kept) if return_logits else kept
        loss = self._reduced(losses, n, reduce_output, everywhere=bcast_loss)
        return (loss, kept) if return_logits else loss

    def loss_of(self, batch: Any) -> torch.Tensor:
        """See :meth:`Engine.loss_of`: that of this pipeline's micro-batch, on all of its ranks."""
        found: torch.Tensor = self.eval_batch(iter([batch]), reduce_output=None, num_micro_batches=1)[0]
        return found

    def _reduced(self, losses: list[torch.Tensor], n: int, how: str | None, *, everywhere: bool) -> Any:
        last = self.is_last_stage()
        if last and len(losses) != n:
            raise ValueError(
                "eval_batch(compute_loss=True) of a pipeline without losses: give PipelineModule a loss_fn, or let its "
                "last layer return the loss."
            )
        values = torch.stack([x.reshape(()).float() for x in losses]) if last else torch.zeros(n, device=self.device)
        if how == "avg":
            values = values.mean().reshape(1)
            if last:
                self.comm.all_reduce(values).wait()
                values /= self.comm.size
        if everywhere:
            self._runner.broadcast(values)
        elif not last:
            return None
        return values.reshape(()) if how == "avg" else list(values.unbind())

    def set_dataiterator(self, iterator: Any) -> None:
        """Train on these batches from now on, where ``train_batch`` is given none; None: on the engine's own."""
        self._given.set(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """``fn(batch)`` → (inputs, labels), for each batch of the data; None for none."""
        self._runner.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Activations will have other shapes. Not needed where the inputs' shapes tell (they are compared every time).
        On all ranks."""
        self._runner.forget_shapes()

    # -- places -------------------------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """This rank has the first layers."""
        return bool(self.module.is_first_stage)

    def is_last_stage(self) -> bool:
        """This rank has the last layers and the loss."""
        return bool(self.module.is_last_stage)

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        found: Any = self.module.num_stages
        return int(found)

    @property
    def stage_id(self) -> int:
        """This rank's place among them."""
        found: Any = self.module.stage_id
        return int(found)

    @property
    def timeline(self) -> list[Any]:
        """The computations of the latest batch on this rank, where :meth:`time_computations` was asked for."""
        return self._runner.timeline

    @property
    def timeline_began_s(self) -> float:
        """The zero of :attr:`timeline`, as ``time.perf_counter`` of this rank; ranks of one Linux machine share it."""
        return self._runner.began_s

    def time_computations(self, on: bool = True) -> None:
        """Whether the time of each computation is taken from now on: ``engine.timeline``."""
        self._runner.times = on

    def get_additional_losses(self) -> dict[str, float] | None:
        """Means of the latest batch, by name; None where there are none."""
        return self._runner.additional_losses or None

    # -- what a pipeline has not --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: no rank has the whole model. See :meth:`train_batch` and :meth:`eval_batch`."""
        _refuse("forward")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse("step")

    def no_sync(self) -> NoReturn:
        """Refused: the section ``pipeline`` says when gradients are reduced."""
        _refuse("no_sync")

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> NoReturn:
        """Refused: each batch ends in a step."""
        _refuse("set_gradient_accumulation_boundary")

    def destroy(self) -> None:
        """As :meth:`Engine.destroy`; channels are closed too. On all ranks."""
        if not self._destroyed:
            self._runner.close()
        super().destroy()


def _number_of(what: str, given: int | None, otherwise: int) -> int:
    if given is None:
        return otherwise
    from zoo.engine.numbers import whole

    return whole(f"num_micro_batches of {what}()", given)


class GivenBatches:
    """What a script gives a pipeline to train on, where its ranks do not take the engine's own data.

    Args:
        needed: this rank has a stage that looks at batches, the first or the last.
    """

    def __init__(self, *, needed: bool) -> None:
        self._needed, self._set = needed, None

    _set: Iterator[Any] | None

    def set(self, batches: Any) -> None:
        """From now on these, where none are given; None: none."""
        self._set = None if batches is None else iter(batches)

    def iterator(self, given: Any, *, own: bool, whole_step: int = 0) -> Any:
        """Of the batches of a call; None: the engine's ``own`` data. What is wrong is raised where all ranks are
        told: when the first is taken.

        Args:
            whole_step: what is no iterator has so many batches; 0: it may have any number.
        """
        found: Any = self._set if given is None else given
        if found is None and own:
            return None
        if found is None and not self._needed:
            return _NO_BATCHES
        if hasattr(found, "__next__"):
            return found  # iter() of a loader that is its own iterator would begin anew
        if whole_step and hasattr(found, "__iter__"):
            number = len(found) if hasattr(found, "__len__") else None
            if number != whole_step:
                return _Wrong(found, _begins_anew(found, number, whole_step))
        try:
            return iter(found)
        except TypeError:
            return _Wrong(found)


def _begins_anew(given: Any, number: int | None, whole_step: int) -> str:
    many = "" if number is None else f" of {number} batches"
    return (
        f"train_batch got a {type(given).__name__}{many}; it takes an iterator of batches: give iter(loader), made "
        f"once, so that the next step goes on where this one ends, or a list of the {whole_step} batches of this step."
    )


class _NoBatches:
    """Of a stage that needs none."""

    empty = True

    def __iter__(self) -> _NoBatches:
        return self

    def __next__(self) -> NoReturn:
        raise AssertionError("a stage that needs no batches asked for one.")


class _Wrong:
    """In the place of batches that there are not."""

    def __init__(self, given: Any, why: str = "") -> None:
        what = "no batches" if given is None else f"something of type {type(given).__name__}"
        self._why = why or (
            f"a first or last stage of a pipeline got {what}; it needs an iterator of batches, by "
            "train_batch(batches) or set_dataiterator(batches), or data given to initialize(training_data=...)."
        )

    def __next__(self) -> NoReturn:
        raise ValueError(self._why)


_NO_BATCHES = _NoBatches()


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"engine.{what} of a pipeline: no rank has the whole model, and a schedule orders the micro-batches. Use "
        "engine.train_batch(batches) and engine.eval_batch(batches)."
    )
