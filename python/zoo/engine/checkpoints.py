"""The checkpoints of an engine."""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zoo import checkpointing
from zoo.comm import Communicator
from zoo.engine.state_dicts import CustomLoad, WholeStates, check_place, joined, load_custom
from zoo.shard import ShardedModel
from zoo.zero import ZeroOptimizer
from zoo.zero.state.logical import fill_frozen, slices_of

if TYPE_CHECKING:
    from zoo.checkpointing.constants import Constants
    from zoo.engine.agreed_reader import AnyCheckpoint, Reads
    from zoo.engine.engine import Engine
    from zoo.engine.partial_load import Wanted


_log = logging.getLogger("zoo.engine")


class Checkpoints(WholeStates):
    """The part of :class:`~zoo.engine.Engine` that saves and loads."""

    module: nn.Module
    comm: Communicator
    sharded: ShardedModel
    global_steps: int
    _optimizer: ZeroOptimizer | None
    _saver: checkpointing.BackgroundSaver | None = None
    _constants: Constants | None = None
    _script_in: Path | None = None
    _last_path: str | None = None
    """Of the checkpoint that was saved or loaded last."""
    _not_loaded = ""
    """Why the state is that of no checkpoint: one was damaged, and a part of it is here already."""

    @abc.abstractmethod
    def training(self, what: str) -> ZeroOptimizer:
        """See :class:`~zoo.engine.Engine`."""

    @abc.abstractmethod
    def check_between_steps(self, what: str) -> None:
        """See :class:`~zoo.engine.Engine`."""

    @property
    def _engine(self) -> Engine:
        return cast("Engine", self)

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
        within_step: bool = False,
    ) -> str:
        """Write parameters, optimizer, schedule, position in the data, random numbers and ``client_state``. A
        collective, for the thread that trains.

        Args:
            tag: ``global_step<N>`` if not given.
            client_state: plain values (zoo.checkpointing.format.exact says which), which may be others on each rank;
                :meth:`load_checkpoint` gives them back exactly.
            save_latest: whether it becomes the one that is loaded where no tag is given.
            exclude_frozen_parameters: leave out what was frozen when the optimizer was built. Whoever loads it keeps
                his own, with ``load_module_strict=False``.
            asynchronous: return when this rank's state is copied to host memory; the rest happens while training goes
                on, and is over when :meth:`wait_for_checkpoint` returns. By default as the section ``checkpoint`` says.
                The next save, a load and :meth:`destroy` wait for it. States on NVMe are not copied: an update waits
                before it overwrites one that is not written yet. Quantised parameters on NVMe are written before it
                returns.
            within_step: also where some micro-batches of a step are over. Their gradients are not part of it: whoever
                loads it goes on at the beginning of that step. Here training goes on as if nothing had been saved.

        Returns:
            The checkpoint's directory.

        Raises:
            ValueError: in the middle of a step, or (zoo.checkpointing.CheckpointError, on all ranks) what kept some
                rank from saving this one, or the one before it.
        """
        from zoo.checkpointing.client_state import ClientState, other_ranks
        from zoo.engine.state import buffer_slices, model_meta, own_buffers, random_state

        self._engine.read_outcome()
        everyone = self.sharded.everyone
        tag = tag if tag is not None else f"global_step{self.global_steps}"
        what = f"saving the checkpoint {tag!r}"
        self.sharded.members.agree(self.comm, everyone, what)
        # What one rank raises alone, all raise: the others would wait for it.
        scalars, states = checkpointing.alike(everyone, what, lambda: self._state(within_step))
        if getattr(getattr(self._engine.config, "checkpoint", None), "errors", "ranks") == "folded":
            states = list(self.training("save_checkpoint()").folded(states))
        slices: list[checkpointing.StateSlice] = [*states, *buffer_slices(self.module, self.sharded)]
        if exclude_frozen_parameters:
            frozen = {name for b in self.sharded.buckets if not b.spec.trainable for name in b.in_model()}
            slices = [item for item in slices if item.name not in frozen]
        meta: dict[str, Any] = {}
        clients: list[ClientState] = []

        def tell() -> bytes:
            clients.append(ClientState(client_state))
            self._tell(meta, directory, tag)
            return clients[0].digest

        digests = checkpointing.together(everyone, what, tell)
        meta.update(client=clients[0].value, **other_ranks(digests))
        meta["model"] = checkpointing.alike(everyone, what, lambda: model_meta(self.module, self.sharded))
        own = clients[0].of_rank() if digests[everyone.rank] != digests[0] else {}
        mine = {**random_state(), **own_buffers(self.module, self.sharded), **own}
        if self._in_background(asynchronous, slices):
            if self._saver is None:
                self._saver = checkpointing.BackgroundSaver(everyone)
            path = self._saver.save(directory, tag, slices, scalars, meta, rank_state=mine, latest=save_latest)
        else:
            self.wait_for_checkpoint()
            if self._constants is None:
                from zoo.checkpointing.constants import Constants

                self._constants = Constants()
            path = checkpointing.save(
                directory, tag, slices, scalars, meta, everyone, rank_state=mine, latest=save_latest,
                constants=self._constants,
            )  # fmt: skip
        self._last_path = joined(directory, tag)
        return str(path) if "://" not in str(directory) else self._last_path

    def _state(self, within_step: bool) -> tuple[Mapping[str, float], list[checkpointing.StateSlice]]:
        if not within_step:
            self.check_between_steps("save_checkpoint()")
        optimizer = self.training("save_checkpoint()")
        return optimizer.state_scalars(), list(optimizer.state_slices())

    def _tell(self, meta: dict[str, Any], directory: str | os.PathLike[str], tag: Any) -> None:
        """What goes beside tensors; and on rank 0 the script that makes fp32 weights of a checkpoint without zoo."""
        from zoo.checkpointing.consolidation import write_script
        from zoo.checkpointing.format.disk import make_directories, place_of
        from zoo.checkpointing.format.names import check_tag
        from zoo.engine.state import engine_meta

        check_place(directory)
        check_tag(tag)
        meta["engine"] = engine_meta(self._engine)
        disk, root = place_of(directory)
        if self.sharded.everyone.rank == 0 and self._script_in != root:
            make_directories(disk, root)
            write_script(root, disk=disk)
            self._script_in = root

    def _in_background(self, asked: bool | None, slices: Iterable[checkpointing.StateSlice]) -> bool:
        section = getattr(self._engine.config, "checkpoint", None)
        wanted = getattr(section, "asynchronous", True) if asked is None else asked
        if not wanted or self.sharded.config.offload_param.device != "nvme":
            return wanted
        # Packed parameters are unpacked to be written, which needs the memory that they are kept out of.
        kept_out = any(item.is_kept_out for item in slices)
        if not any(self.sharded.everyone.all_gather_object(kept_out)):
            return True
        if asked:
            raise ValueError(
                "save_checkpoint(asynchronous=True) where quantised parameters are on NVMe: a copy of them would need "
                "the memory that they are kept out of. Leave it out; the save then returns when it is written."
            )
        return False

    def wait_for_checkpoint(self) -> None:
        """Return when no save is under way any more. On all ranks.

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError, on all ranks) the save that was under way has failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def load_checkpoint(
        self, directory: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """Continue from a checkpoint, written at any world size and stage, by zoo or by DeepSpeed. A collective.

        At the world size that it was written at, everything goes on as if it had never stopped: generators of random
        numbers (torch's, Python's, numpy's) and buffers of each rank too. At another one the generators stay as they
        are, buffers are those of rank 0, and the data goes on at the same sample. An engine that only
        evaluates takes parameters and buffers. Gradients of a step that has begun are dropped.

        What is read is compared with its checksums. Where that finds damage on any rank, all ranks hear of it; without
        a tag the newest whole checkpoint before that one is loaded, and the log says so. Where there is none, the
        engine counts as not loaded: it refuses to train until a checkpoint was loaded whole.

        Of DeepSpeed's (ZeRO stages 0 to 3, or universal: ``checkpoint.load_universal`` says which comes first)
        parameters, masters, states and options of the optimizer, the loss scale, the schedule, counters, buffers and
        client state are taken over; the data and random numbers begin anew, which the log says.

        Args:
            tag: the latest checkpoint if not given; it must be where the folder has those of both systems.
            load_module_strict: False: parameters and buffers that the checkpoint does not have stay as they are, and
                those that the model does not have are left; the log says which.
            load_optimizer_states: False: moments, step counts, the loss scale and the options of parameter groups stay
                as they are; masters are those of the checkpoint.
            load_lr_scheduler_states: False: the learning-rate schedule stays where it is.
            load_module_only: parameters and buffers alone, such as for a warm start: optimizer, schedule, counters,
                position in the data, parts and random numbers stay as they are.
            custom_load_fn: ``custom_load_fn(src=state_dict, dst=module)`` writes parameters and buffers in the place of
                ``load_state_dict``, on every rank: ``src`` has the checkpoint's, whole, on the CPU (masters in fp32),
                and ``dst`` the model, whose parameters are whole meanwhile, at stage 3 too; rank 0's values count.
                Masters take what was written, in the checkpoint's precision where it is the checkpoint's value. What is
                not written stays. States of the optimizer are the checkpoint's, for parameters of the same name and
                shape, and zero for others. After an exception in it parameters are as they were.

        Returns:
            (the checkpoint's directory, client_state): what this rank has kept; at another world size what the rank of
            this number has, and where there was none what rank 0 has.

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError) what is wrong with it; or a model, an optimizer or a data
                set that it does not fit.
        """
        from zoo.checkpointing import foreign
        from zoo.engine.foreign import open_checkpoint
        from zoo.engine.partial_load import Wanted

        self._engine.read_outcome()
        if self._saver is not None:
            self._saver.settle()
        damaged: list[str] = []
        wanted = Wanted(
            module_strict=load_module_strict, optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states, module_only=load_module_only,
            custom=custom_load_fn is not None,
        )  # fmt: skip
        self.sharded.everyone.agree("load_checkpoint with", repr(wanted))
        self.check_custom(custom_load_fn)
        checkpointing.alike(self.sharded.everyone, "load_checkpoint()", lambda: check_place(directory, tag))
        found = open_checkpoint(self._engine, directory, tag, wanted)
        while True:
            try:
                with found:
                    loaded = self.load_opened(found, wanted, custom_load_fn)
                    self._last_path = joined(directory, found.tag)
                    return (self._last_path if "://" in str(directory) else loaded[0]), loaded[1]
            except checkpointing.DamageError as error:
                self._not_loaded = f"the checkpoint {found.tag!r} was found to be damaged while it was loaded."
                damaged.append(found.tag)
                if tag is not None or isinstance(found, foreign.ForeignCheckpoint):
                    raise
                found = self._another(directory, damaged, error)

    def _another(
        self, directory: str | os.PathLike[str], damaged: list[str], error: checkpointing.DamageError
    ) -> checkpointing.Checkpoint:
        try:
            found = checkpointing.load(directory, None, self.sharded.everyone, skip=damaged)
        except checkpointing.CheckpointError:
            raise error from None
        if self.sharded.everyone.rank == 0:
            _log.warning("the checkpoint %r is passed over for %r: %s", damaged[-1], found.tag, error)
        return found

    def load_opened(
        self, found: AnyCheckpoint, wanted: Wanted, custom_load_fn: CustomLoad | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Take what is wanted of it; gives its path and the client state. Collective."""
        from zoo.engine.agreed_reader import Reads
        from zoo.engine.checks import check_engine, check_names

        everyone, reads = self.sharded.everyone, Reads(found)
        what = f"loading the checkpoint {found.tag!r} into this model"
        loaded = str(found.path), reads.client_state(everyone.rank)
        if self._optimizer is None:
            self._load_weights(reads, found, wanted, custom_load_fn, what)
            return loaded
        before, self._not_loaded = self._not_loaded, ""
        try:
            optimizer = self.training("load_checkpoint()")
            checkpointing.together(everyone, what, lambda: check_engine(self._engine, found, wanted))
            check_names(found, self.module, self.sharded, wanted)
            if not optimizer.config.update_in_backward:  # there load_state ends what a backward has begun
                self._engine.zero_grad()
            goes_on = found.world_size == everyone.size and not wanted.module_only
            mine = reads.rank_state(everyone.rank) if goes_on else {}
            if custom_load_fn is not None:
                load_custom(self.module, reads, found, custom_load_fn, everyone, what, mine)
        except BaseException:
            self._not_loaded = before
            raise
        try:
            self._take(found, reads, wanted, mine, custom=custom_load_fn is not None, what=what)
        except BaseException:
            self._not_loaded = f"loading the checkpoint {found.tag!r} has failed half-way."
            raise
        return loaded

    def _take(
        self, found: AnyCheckpoint, reads: Reads, wanted: Wanted, mine: Mapping[str, torch.Tensor], *, custom: bool,
        what: str,
    ) -> None:  # fmt: skip
        """What is wanted of a checkpoint that fits."""
        from zoo.engine.checks import beginning
        from zoo.engine.partial_load import Kept
        from zoo.engine.state import load_buffers, restore_options

        optimizer, everyone = self.training("load_checkpoint()"), self.sharded.everyone
        if wanted.optimizer:
            restore_options(self._engine, found)
        live = [] if wanted.all_of_it else optimizer.held_slices(owned=False)
        begins = beginning(optimizer, found) if wanted.optimizer else set()
        kept = Kept(reads, found, wanted, live, self._dtypes(), beginning=begins)
        del live
        optimizer.load_state(kept.read, kept.scalars(optimizer.held_scalars()))
        if not custom:
            load_buffers(self.module, reads, wanted)
        reads.agree(everyone, what)
        checkpointing.alike(everyone, what, lambda: self._restore(found, wanted, mine))

    def _restore(self, found: AnyCheckpoint, wanted: Wanted, mine: Mapping[str, torch.Tensor]) -> None:
        """What is beside parameters and states."""
        from zoo.engine.state import load_extra_state, load_own_buffers, restore_meta, set_random_state

        if not wanted.custom:
            load_extra_state(self.module, found)
        if not wanted.module_only:
            restore_meta(self._engine, found, schedule=wanted.lr_scheduler_states)
        if mine:
            if not wanted.custom:
                load_own_buffers(self.module, mine)
            set_random_state(mine)

    def _load_weights(
        self, reads: Reads, found: AnyCheckpoint, wanted: Wanted, custom_load_fn: CustomLoad | None, what: str
    ) -> None:
        """Into an engine that only evaluates."""
        from zoo.engine.checks import check_model, check_names
        from zoo.engine.partial_load import Kept
        from zoo.engine.state import load_buffers, load_extra_state

        buckets, everyone = self.sharded.buckets, self.sharded.everyone
        held = list(slices_of([], buckets, owned=False))
        checkpointing.together(everyone, what, lambda: check_model(found, self.module, self.sharded, wanted))
        check_names(found, self.module, self.sharded, wanted)
        if custom_load_fn is not None:
            load_custom(self.module, reads, found, custom_load_fn, everyone, what, {})
        else:
            fill_frozen(buckets, Kept(reads, found, wanted, held, self._dtypes()).read)
            self.sharded.runtime.updated()
            load_buffers(self.module, reads, wanted)
        reads.agree(everyone, what)
        if custom_load_fn is None:
            checkpointing.alike(everyone, what, lambda: load_extra_state(self.module, found))
        self._not_loaded = ""

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {b.logical(name)[0]: b.spec.dtype for b in self.sharded.buckets for name in b.spec.names}

    def check_custom(self, custom_load_fn: Any) -> None:
        """Raise ValueError where it cannot be called with the whole model; every rank gives one, or none does."""
        if custom_load_fn is not None:
            checkpointing.alike(
                self.sharded.everyone, "load with custom_load_fn", lambda: self._check_custom(custom_load_fn)
            )

    def _check_custom(self, custom_load_fn: Any) -> None:
        if not callable(custom_load_fn):
            raise ValueError(
                f"custom_load_fn is a {type(custom_load_fn).__name__}; it is called as "
                "custom_load_fn(src=state_dict, dst=module)."
            )
        axes = sorted({axis for bucket in self.sharded.buckets for axis in bucket.spec.axes})
        if self.sharded.layers is not None or axes:
            split = "over the stages of a pipeline" if not axes else f"along the mesh axes {', '.join(axes)}"
            raise ValueError(
                f"custom_load_fn with a model that is split {split}: no rank has all of it to be written to. Leave it "
                "out; load_module_strict=False lets stay what the checkpoint lacks."
            )

    def save_16bit_model(
        self,
        folder: str | os.PathLike[str],
        filename: str = "model.safetensors",
        *,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights, whole, as one file, for whoever uses the model without zoo: in the safetensors
        format, or, where ``filename`` ends in ".bin", ".pt", ".pth" or ".ckpt", in the one that
        ``torch.load(weights_only=True)`` reads.

        Rank 0 writes; the others help to gather, so all ranks call it. Parameters have the dtype that the model
        computes with: bf16 or fp16 where the configuration enables one of them; an fp32 model is saved in fp32, which
        the log says. Parameters pass bucket by bucket: no rank ever holds all of them for this. A file of the same
        name stays as it was until the new one is whole.

        The keys are those of ``module.state_dict()``. A parameter that is tied is there once, under its first name,
        and the header names the others: ``safetensors.torch.load_model`` reads that. In torch's it is there under all
        its names, as one storage. What ``get_extra_state`` returns
        is not saved.

        Args:
            folder: made if it does not exist.
            filename: of a file in that folder, ending in ".safetensors", ".bin", ".pt", ".pth" or ".ckpt".
            exclude_frozen_parameters: leave out those that were frozen when the optimizer was built.

        Returns:
            Whether a model was saved, the same on all ranks: False at stage 3 unless
            ``gather_16bit_weights_on_model_save`` is true, with a warning in rank 0's log.

        Raises:
            ValueError: ``filename`` cannot be used; or (zoo.checkpointing.CheckpointError, on all ranks) what kept some
                rank from saving.
        """
        from zoo.engine.saving import save_model

        self._engine.read_outcome()
        return save_model(self.module, self.sharded, folder, filename, exclude_frozen=exclude_frozen_parameters)
