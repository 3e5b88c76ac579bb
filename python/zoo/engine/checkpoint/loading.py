"""One load of an open checkpoint into a model and its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zoo import checkpointing
from zoo.engine.checkpoint.agreed_reader import Reads
from zoo.engine.checkpoint.contents import AnyCheckpoint
from zoo.engine.checkpoint.fitting import beginning, check_model, check_names, check_training
from zoo.engine.checkpoint.module_state import load_buffers, load_extra_state, load_own_buffers
from zoo.engine.checkpoint.partial_load import Kept, Wanted
from zoo.engine.checkpoint.random_state import set_random_state
from zoo.engine.checkpoint.state_dicts import CustomLoad, load_custom
from zoo.engine.checkpoint.training_state import TrainingState
from zoo.shard import ShardedModel
from zoo.zero.state.logical import fill_frozen, parameters_of, slices_of


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is wanted of a checkpoint goes where it belongs; every method is a collective.

    First :meth:`check`, which changes nothing, then :meth:`take`; or, of an engine that only evaluates,
    :meth:`check_weights` and :meth:`take_weights`.
    """

    module: nn.Module
    sharded: ShardedModel
    found: AnyCheckpoint
    reads: Reads
    """Of ``found``."""
    wanted: Wanted
    custom: CustomLoad | None
    """Writes parameters and buffers in the place of ``load_state_dict``."""

    @property
    def _what(self) -> str:
        return f"loading the checkpoint {self.found.tag!r} into this model"

    def check(self, training: TrainingState) -> Mapping[str, torch.Tensor]:
        """Raise for what does not fit, drop gradients, and let a function of the user write. Returns this rank's own
        state."""
        everyone, found, wanted, optimizer = self.sharded.everyone, self.found, self.wanted, training.optimizer

        def check() -> None:
            check_model(found, self.module, self.sharded, wanted)
            check_training(training, found, wanted)
            self._check_what_stays(training)

        checkpointing.together(everyone, self._what, check)
        check_names(found, self.module, self.sharded, wanted)
        if not optimizer.config.update_in_backward:  # there load_state ends what a backward has begun
            optimizer.zero_grad()
            training.records.restart_counts()
        goes_on = found.world_size == everyone.size and not wanted.module_only
        mine = self.reads.rank_state(everyone.rank) if goes_on else {}
        if self.custom is not None:
            load_custom(self.module, self.reads, found, self.custom, everyone, self._what, mine)
        return mine

    def _check_what_stays(self, training: TrainingState) -> None:
        """Raise CheckpointError where parameters that the checkpoint does not give are not the same on all ranks."""
        meetings = training.optimizer.updater.meetings
        if meetings is None or meetings.agreed:
            return
        runs = parameters_of([b for b in self.sharded.buckets if b.spec.trainable])
        stays = self.custom is not None or not all(self.wanted.has(self.found, run) for run in runs)
        if stays:
            raise checkpointing.CheckpointError(
                "it does not give all parameters, and those that stay are each rank's own between two steps by which "
                "ranks agree on them. Load after a step that ends with an agreement, before the first step, or all "
                "parameters"
            )

    def take(self, training: TrainingState, mine: Mapping[str, torch.Tensor]) -> None:
        """What is wanted of a checkpoint that fits. ``mine``: what :meth:`check` has returned."""
        optimizer, wanted, found = training.optimizer, self.wanted, self.found
        if wanted.optimizer:
            training.restore_options(found)
        live = [] if wanted.all_of_it else optimizer.held_slices(owned=False)
        begins = beginning(optimizer, found) if wanted.optimizer else set()
        follow = optimizer.states.that_follow
        kept = Kept(self.reads, found, wanted, live, self._dtypes(), beginning=begins, follow=follow)
        del live
        optimizer.load_state(kept.read, kept.scalars(optimizer.held_scalars()), new_weights=not wanted.optimizer)
        if self.custom is None:
            load_buffers(self.module, self.reads, wanted)
        self.reads.agree(self.sharded.everyone, self._what)
        checkpointing.alike(self.sharded.everyone, self._what, lambda: self._take_the_rest(training, mine))

    def _take_the_rest(self, training: TrainingState, mine: Mapping[str, torch.Tensor]) -> None:
        """What is beside parameters and states."""
        if self.custom is None:
            load_extra_state(self.module, self.found)
        if not self.wanted.module_only:
            training.restore(self.found, schedule=self.wanted.lr_scheduler_states)
        if mine:
            if self.custom is None:
                load_own_buffers(self.module, mine)
            set_random_state(mine)

    def check_weights(self) -> None:
        """Raise for what does not fit an engine that only evaluates."""
        found, wanted = self.found, self.wanted
        everyone, module, sharded = self.sharded.everyone, self.module, self.sharded
        checkpointing.together(everyone, self._what, lambda: check_model(found, module, sharded, wanted))
        check_names(found, self.module, self.sharded, wanted)

    def take_weights(self) -> None:
        """Into an engine that only evaluates."""
        buckets, everyone, found, wanted = self.sharded.buckets, self.sharded.everyone, self.found, self.wanted
        held = list(slices_of([], buckets, owned=False))
        if self.custom is not None:
            load_custom(self.module, self.reads, found, self.custom, everyone, self._what, {})
        else:
            fill_frozen(buckets, Kept(self.reads, found, wanted, held, self._dtypes()).read)
            self.sharded.runtime.updated()
            load_buffers(self.module, self.reads, wanted)
        self.reads.agree(everyone, self._what)
        if self.custom is None:
            checkpointing.alike(everyone, self._what, lambda: load_extra_state(self.module, found))

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {b.logical(name)[0]: b.spec.dtype for b in self.sharded.buckets for name in b.spec.names}
