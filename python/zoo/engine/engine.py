"""The engine: forward, backward and step with accumulation, and the checkpoint of all of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import StateSlice, load, save, together
from zoo.config import Config
from zoo.engine.loader import ShardedLoader
from zoo.engine.saving import save_model
from zoo.engine.state import (
    buffer_slices,
    check_fits,
    engine_meta,
    load_buffers,
    random_state,
    restore_meta,
    restore_options,
    set_random_state,
)
from zoo.zero import ZeroOptimizer


class Engine:
    """A model in training.

    ``loss = engine(x, y)``, ``engine.backward(loss)``, ``engine.step()`` for each micro-batch: parameters move once in
    ``gradient_accumulation_steps`` micro-batches, the *boundary*. Or :meth:`train_batch`, which does one whole step.

    Attributes:
        module: the model. config: the configuration. optimizer, lr_scheduler, dataloader: as ``initialize`` returned
        them.
        global_steps: steps taken, skipped ones included. skipped_steps: those skipped for an overflow.
        micro_steps: micro-batches that went through :meth:`step`.
        comm: the communicator of the data-parallel group.
    """

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        dataloader: ShardedLoader[Any] | None,
        lr_scheduler: Any,
    ) -> None:
        self.config, self.module, self.optimizer = config, module, optimizer
        self.dataloader, self.lr_scheduler = dataloader, lr_scheduler
        self.comm = optimizer.comm
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self._batches: Iterator[Any] | None = None

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Micro-batches in one step."""
        return int(self.config.gradient_accumulation_steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; tensors come to its device, floating-point ones into its precision."""
        return self.module(*self._placed(args), **self._placed(kwargs))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its step."""
        return (self.micro_steps + 1) % self.accumulation == 0

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of ``loss`` (the mean over this micro-batch), added to those of the step so far.

        Divides by the number of micro-batches in a step. At stages 0 and 1 only the boundary communicates; at 2 and 3
        every micro-batch does, because no rank has room for gradients that are not its own.
        """
        local = self.config.zero_optimization.stage <= 1 and not self.is_gradient_accumulation_boundary()
        with self.optimizer.no_sync() if local else contextlib.nullcontext():
            self.optimizer.backward(loss / self.accumulation if self.accumulation > 1 else loss)

    def step(self) -> None:
        """Count the micro-batch; at the boundary, move the parameters and the learning rate, and clear the
        gradients."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        if self.optimizer.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def train_batch(self, iterator: Iterator[Any] | None = None) -> torch.Tensor:
        """One whole step on the next ``gradient_accumulation_steps`` micro-batches; the model returns its mean loss.

        Args:
            iterator: of batches: a tuple or list becomes positional arguments of the model, a mapping keyword
                arguments, anything else its one argument. The engine's own data loader, epoch after epoch, if not
                given.

        Returns:
            The loss, averaged over micro-batches and ranks: a float32 scalar tensor, the same on all ranks. A
            collective.
        """
        if iterator is None:
            iterator = self._own_batches()
        self.module.train()
        total = torch.zeros((), dtype=torch.float32)
        for _ in range(self.accumulation):
            loss = self.run(next(iterator))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ValueError(
                    f"train_batch got {_kind(loss)} from the model; it must return its mean loss, a tensor of one "
                    "element. "
                    "Otherwise compute the loss outside and use engine(...), engine.backward(loss), engine.step()."
                )
            self.backward(loss)
            total = total.to(loss.device) + loss.detach().float().reshape(())
            self.step()
        total /= self.accumulation
        self.comm.all_reduce(total).wait()
        return total / self.comm.size

    def eval_batch(self, batch: Any) -> Any:
        """The model's output for one batch, in evaluation mode and without gradients; nothing is averaged over ranks.

        At stage 3 a collective: all ranks evaluate the same number of batches.
        """
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self.run(batch)
        finally:
            self.module.train(was_training)

    def run(self, batch: Any) -> Any:
        """Forward of a batch, unpacked as :meth:`train_batch` says."""
        if isinstance(batch, (tuple, list)):
            return self(*batch)
        return self(**batch) if isinstance(batch, Mapping) else self(batch)

    # -- what a script asks -----------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.module.parameters()).device

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, directory: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> str:
        """Write parameters, optimizer, schedule, position in the data, random numbers and ``client_state``. A
        collective.

        Args:
            tag: ``global_step<N>`` if not given.
            client_state: plain values (zoo.checkpointing.exact says which); :meth:`load_checkpoint` gives them back
                exactly.

        Returns:
            The checkpoint's directory.

        Raises:
            ValueError: in the middle of a step, or (zoo.checkpointing.CheckpointError) what kept some rank from saving.
        """
        if self.micro_steps % self.accumulation:
            raise ValueError(
                f"save_checkpoint was called after {self.micro_steps % self.accumulation} of {self.accumulation} "
                f"micro-batches "
                "of a step: their gradients are not part of a checkpoint. Save at the boundary."
            )
        slices: list[StateSlice] = [*self.optimizer.state_slices(), *buffer_slices(self.module, self.comm)]
        meta = {"engine": engine_meta(self), "client": dict(client_state or {})}
        tag = tag if tag is not None else f"global_step{self.global_steps}"
        scalars = self.optimizer.state_scalars()
        return str(save(directory, tag, slices, scalars, meta, self.comm, rank_state=random_state()))

    def load_checkpoint(self, directory: str | os.PathLike[str], tag: str | None = None) -> tuple[str, dict[str, Any]]:
        """Continue from a checkpoint, written at any world size and stage. A collective.

        At the world size that it was written at, everything goes on as if it had never stopped. At another one the
        random number generators stay as they are, and the data goes on at the same sample.

        Args:
            tag: the latest checkpoint if not given.

        Returns:
            (the checkpoint's directory, client_state).

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError) what is wrong with it; or a model, an optimizer or a data
                set that it does not fit.
        """
        found = load(directory, tag, self.comm)
        what = f"loading the checkpoint {found.tag!r} into this model"
        together(self.comm, what, lambda: check_fits(found, self.optimizer.state_slices()))
        restore_options(self, found)
        self.optimizer.load_state(found.read, found.scalars)
        load_buffers(self.module, found)
        restore_meta(self, found)
        if found.world_size == self.comm.size:
            set_random_state(found.rank_state(self.comm.rank))
        client = found.meta.get("client", {})
        return str(found.path), dict(client)

    def save_16bit_model(
        self,
        folder: str | os.PathLike[str],
        filename: str = "model.safetensors",
        *,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights, whole, as one safetensors file, for whoever uses the model without zoo.

        Rank 0 writes; the others help to gather, so all ranks call it. Parameters have the dtype that the model
        computes with: bf16 or fp16 where the configuration enables one of them; an fp32 model is saved in fp32, which
        the log says. Parameters pass bucket by bucket: no rank ever holds all of them for this. A file of the same
        name stays as it was until the new one is whole.

        The keys are those of ``module.state_dict()``. A parameter that is tied is there once, under its first name,
        and the header names the others: ``safetensors.torch.load_model`` reads that. What ``get_extra_state`` returns
        is not saved.

        Args:
            folder: made if it does not exist.
            filename: of a file in that folder, ending in ".safetensors".
            exclude_frozen_parameters: leave out those that were frozen when the optimizer was built.

        Returns:
            Whether a model was saved, the same on all ranks: False at stage 3 unless
            ``gather_16bit_weights_on_model_save`` is true, with a warning in rank 0's log.

        Raises:
            ValueError: ``filename`` cannot be used; or (zoo.checkpointing.CheckpointError, on all ranks) what kept some
                rank from saving.
        """
        return save_model(self.module, self.optimizer, Path(folder), filename, exclude_frozen=exclude_frozen_parameters)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _own_batches(self) -> Iterator[Any]:
        if self.dataloader is None:
            raise ValueError(
                "train_batch() needs an iterator of batches, or a dataset given to initialize(dataset=...)."
            )
        if self._batches is None:
            self._batches = self.dataloader.forever()
        return self._batches

    def _placed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            parameter = next(self.module.parameters())
            return value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self._placed(item) for item in value)
        if isinstance(value, list):
            return [self._placed(item) for item in value]
        if isinstance(value, dict):
            return {key: self._placed(item) for key, item in value.items()}
        return value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
