"""The checkpoints of an engine: what a script calls."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo import checkpointing

if TYPE_CHECKING:
    from zoo.checkpointing.constants import Constants
    from zoo.config import Config
    from zoo.engine.batches import OwnBatches
    from zoo.engine.checkpoint.contents import AnyCheckpoint
    from zoo.engine.checkpoint.partial_load import Wanted
    from zoo.engine.checkpoint.state_dicts import CustomLoad
    from zoo.engine.checkpoint.training_state import TrainingState
    from zoo.engine.records import Boundary, Records
    from zoo.shard import ShardedModel
    from zoo.zero import ZeroOptimizer


_log = logging.getLogger("zoo.engine")


class Checkpoints:
    """Saves and loads a model and its training.

    Args:
        config: whose section ``checkpoint``, where there is one, says how it is done.
        optimizer: None where the engine only evaluates.
        training: the optimizer, or a ValueError that says why there is none for what it is asked.
        records, boundary, batches, parts: what is saved beside tensors.

    Attributes:
        not_loaded, no_weights: why the state, or the weights, are half of a checkpoint; until one is loaded whole.
        registered: what else is saved and loaded, by name.
    """

    def __init__(
        self, module: nn.Module, sharded: ShardedModel, *, config: Config, optimizer: ZeroOptimizer | None,
        training: Callable[[str], ZeroOptimizer], records: Records, boundary: Boundary, batches: OwnBatches,
        parts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._module, self._sharded, self._everyone = module, sharded, sharded.everyone
        self._config, self._optimizer, self._training = config, optimizer, training
        self._records, self._boundary, self._batches, self._parts = records, boundary, batches, parts
        self.registered: dict[str, Any] = {}
        self.not_loaded = self.no_weights = ""
        self._saver: checkpointing.BackgroundSaver | None = None
        self._constants: Constants | None = None
        self._script_in: Path | None = None
        self._last_path: str | None = None  # of the checkpoint that was saved or loaded last

    @property
    def _section(self) -> Any:
        return getattr(self._config, "checkpoint", None)  # a program that saves nothing does not import it

    def _state(self, optimizer: ZeroOptimizer) -> TrainingState:
        from zoo.engine.checkpoint.training_state import TrainingState

        return TrainingState(
            module=self._module, optimizer=optimizer, records=self._records, boundary=self._boundary,
            batches=self._batches, parts=self._parts, registered=self.registered,
        )  # fmt: skip

    def register_state(self, name: str, state: Any) -> None:
        """Save and load ``state`` (with ``state_dict`` and ``load_state_dict``) in checkpoints, under ``name``."""
        if not callable(getattr(state, "state_dict", None)) or not callable(getattr(state, "load_state_dict", None)):
            raise ValueError(
                f"register_state({name!r}, a {type(state).__name__}); it needs state_dict() and load_state_dict(state)."
            )
        if not isinstance(name, str):
            from zoo.engine.numbers import shown

            raise ValueError(f"register_state() got {shown(name)}; a name is a text.")
        if name in self.registered:
            raise ValueError(f"register_state({name!r}, ...): the name is taken by a {type(self.registered[name])}.")
        self.registered[name] = state

    # -- saving -------------------------------------------------------------------------------------------------------

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
        from zoo.engine.checkpoint.module_state import buffer_slices, model_meta, own_buffers
        from zoo.engine.checkpoint.places import joined
        from zoo.engine.checkpoint.random_state import random_state

        self._records.read_outcome()
        module, sharded, everyone = self._module, self._sharded, self._everyone
        tag = tag if tag is not None else f"global_step{self._records.global_steps}"
        what = f"saving the checkpoint {tag!r}"
        sharded.members.agree(sharded.comm, everyone, what)
        # What one rank raises alone, all raise: the others would wait for it.
        scalars, states = checkpointing.alike(everyone, what, lambda: self._states(within_step))
        if getattr(self._section, "errors", "ranks") == "folded":
            states = list(self._training("save_checkpoint()").folded(states))
        slices: list[checkpointing.StateSlice] = [*states, *buffer_slices(module, sharded)]
        if exclude_frozen_parameters:
            frozen = {name for b in sharded.buckets if not b.spec.trainable for name in b.in_model()}
            slices = [item for item in slices if item.name not in frozen]
        meta: dict[str, Any] = {}
        clients: list[ClientState] = []

        asked = {
            "exclude_frozen_parameters": bool(exclude_frozen_parameters),
            "asynchronous": self._is_asynchronous(asynchronous),
        }

        def tell() -> tuple[bytes, dict[str, bool]]:
            clients.append(ClientState(client_state))
            self._tell(meta, directory, tag)
            return clients[0].digest, asked

        told = checkpointing.together(everyone, what, tell)
        from zoo.engine.checkpoint.places import check_asked

        check_asked([there for _, there in told])
        digests = [digest for digest, _ in told]
        meta.update(client=clients[0].value, **other_ranks(digests))
        meta["model"] = checkpointing.alike(everyone, what, lambda: model_meta(module, sharded))
        own = clients[0].of_rank() if digests[everyone.rank] != digests[0] else {}
        mine = {**random_state(), **own_buffers(module, sharded), **own}
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

    def _states(self, within_step: bool) -> tuple[Mapping[str, float], list[checkpointing.StateSlice]]:
        if not within_step:
            self._boundary.check_between_steps("save_checkpoint()")
        optimizer = self._training("save_checkpoint()")
        return optimizer.state_scalars(), list(optimizer.state_slices())

    def _tell(self, meta: dict[str, Any], directory: str | os.PathLike[str], tag: Any) -> None:
        """What goes beside tensors; and on rank 0 the script that makes fp32 weights of a checkpoint without zoo."""
        from zoo.checkpointing.consolidation import write_script
        from zoo.checkpointing.format.disk import make_directories, place_of
        from zoo.checkpointing.format.names import check_tag
        from zoo.engine.checkpoint.places import check_place

        check_place(directory)
        check_tag(tag)
        meta["engine"] = self._state(self._training("save_checkpoint()")).meta()
        disk, root = place_of(directory)
        if self._everyone.rank == 0 and self._script_in != root:
            make_directories(disk, root)
            write_script(root, disk=disk)
            self._script_in = root

    def _is_asynchronous(self, asked: bool | None) -> bool:
        return bool(getattr(self._section, "asynchronous", True) if asked is None else asked)

    def _in_background(self, asked: bool | None, slices: Iterable[checkpointing.StateSlice]) -> bool:
        wanted = self._is_asynchronous(asked)
        if not wanted or self._sharded.config.offload_param.device != "nvme":
            return wanted
        # Packed parameters are unpacked to be written, which needs the memory that they are kept out of.
        kept_out = any(item.is_kept_out for item in slices)
        if not any(self._everyone.all_gather_object(kept_out)):
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

    def close(self) -> None:
        """Wait for the save that is under way, and end its thread."""
        if self._saver is not None:
            self._saver.close()

    # -- loading ------------------------------------------------------------------------------------------------------

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
        from zoo.engine.checkpoint.foreign import open_checkpoint
        from zoo.engine.checkpoint.partial_load import Wanted
        from zoo.engine.checkpoint.places import check_place, joined

        self._records.read_outcome()
        if self._saver is not None:
            self._saver.settle()
        damaged: list[str] = []
        wanted = Wanted(
            module_strict=load_module_strict, optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states, module_only=load_module_only,
            custom=custom_load_fn is not None,
        )  # fmt: skip
        self._everyone.agree("load_checkpoint with", repr(wanted))
        self._check_custom(custom_load_fn)
        checkpointing.alike(self._everyone, "load_checkpoint()", lambda: check_place(directory, tag))
        found = open_checkpoint(
            self._module, self._sharded, self._optimizer, directory, tag, wanted,
            universal=getattr(self._section, "load_universal", False),
        )  # fmt: skip
        while True:
            try:
                with found:
                    loaded = self._load(found, wanted, custom_load_fn)
                    self._last_path = joined(directory, found.tag)
                    return (self._last_path if "://" in str(directory) else loaded[0]), loaded[1]
            except checkpointing.DamageError as error:
                if self.no_weights:
                    text = f"the checkpoint {found.tag!r} was found to be damaged while it was loaded."
                    self.not_loaded = self.no_weights = text
                damaged.append(found.tag)
                if tag is not None or isinstance(found, foreign.ForeignCheckpoint):
                    raise
                found = self._another(directory, damaged, error)

    def _another(
        self, directory: str | os.PathLike[str], damaged: list[str], error: checkpointing.DamageError
    ) -> checkpointing.Checkpoint:
        try:
            found = checkpointing.load(directory, None, self._everyone, skip=damaged)
        except checkpointing.CheckpointError:
            raise error from None
        if self._everyone.rank == 0:
            _log.warning("the checkpoint %r is passed over for %r: %s", damaged[-1], found.tag, error)
        return found

    def _load(
        self, found: AnyCheckpoint, wanted: Wanted, custom_load_fn: CustomLoad | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Take what is wanted of an open one; gives its path and the client state. Collective."""
        from zoo.engine.checkpoint.agreed_reader import Reads
        from zoo.engine.checkpoint.loading import Load

        reads = Reads(found)
        loaded = str(found.path), reads.client_state(self._everyone.rank)
        load = Load(
            module=self._module, sharded=self._sharded, found=found, reads=reads, wanted=wanted, custom=custom_load_fn
        )
        if self._optimizer is None:
            load.check_weights()
            with self._half_way(found):
                load.take_weights()
            self.not_loaded = self.no_weights = ""
            return loaded
        before, self.not_loaded = self.not_loaded, ""
        try:
            training = self._state(self._training("load_checkpoint()"))
        finally:
            self.not_loaded = before
        with self._half_way(found, begins=custom_load_fn is not None):
            mine = load.check(training)
        with self._half_way(found):
            load.take(training, mine)
        self.no_weights = ""
        if wanted.all_of_it:  # else what was left out is that of a damaged one still
            self.not_loaded = ""
        return loaded

    @contextlib.contextmanager
    def _half_way(self, found: AnyCheckpoint, begins: bool = True) -> Iterator[None]:
        """What fails in here leaves a part of a checkpoint behind, if it ``begins`` to take what is there."""
        try:
            yield
        except BaseException:
            if begins:
                self.not_loaded = self.no_weights = f"loading the checkpoint {found.tag!r} has failed half-way."
            raise

    def need_weights(self, what: str) -> None:
        """Raise ValueError where the weights are those of no checkpoint, since a load has failed half-way."""
        if self.no_weights:
            raise ValueError(f"{what} of an engine that is not loaded: {self.no_weights} Load another checkpoint.")

    def _check_custom(self, custom_load_fn: Any) -> None:
        """Raise ValueError where it cannot be called with the whole model; every rank gives one, or none does."""
        if custom_load_fn is not None:
            from zoo.engine.checkpoint.state_dicts import check_custom

            checkpointing.alike(
                self._everyone, "load with custom_load_fn", lambda: check_custom(custom_load_fn, self._sharded)
            )

    # -- weights alone ------------------------------------------------------------------------------------------------

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
        from zoo.engine.checkpoint.saving import save_model

        self.need_weights("save_16bit_model()")
        self._records.read_outcome()
        return save_model(self._module, self._sharded, folder, filename, exclude_frozen=exclude_frozen_parameters)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> OrderedDict[str, torch.Tensor]:
        """The whole model's parameters and persistent buffers, copied to the CPU, on every rank, whatever the stage.
        A collective.

        The keys are those of ``module.state_dict()``, but for what ``get_extra_state`` returns, which is not in it. Of
        a pipeline it is the whole model too, under its names there. Buffers are this rank's own. Parameters have the
        dtype that the model computes with; tied ones share their memory. Every rank holds the whole model for this:
        ``save_16bit_model`` does without, and ``save_checkpoint`` has what training goes on with.

        Args:
            exclude_frozen_parameters: leave out those that were frozen when the optimizer was built.
        """
        from zoo.engine.checkpoint.state_dicts import whole_state_dict

        self.need_weights("module_state_dict()")
        self._records.read_outcome()
        return whole_state_dict(self._module, self._sharded, frozen=not exclude_frozen_parameters)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any] | str | os.PathLike[str] | None, strict: bool = True,
        custom_load_fn: CustomLoad | None = None, fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Parameters and buffers take these values, in shards and fp32 masters too; everything else stays as it is. A
        collective: every rank gives the same.

        Args:
            checkpoint: a state_dict of whole tensors, as :meth:`module_state_dict` returns, or a dict that has it under
                "module"; or the path of a checkpoint, as :meth:`save_checkpoint` returns; None: of the one that this
                engine has saved or loaded last.
            strict: its names are those of the model. False: names that the model does not have are passed over, and
                parameters and buffers that it does not have stay as they are.
            custom_load_fn: as of :meth:`load_checkpoint`.
            fetch_z3_params: makes no difference: shards are filled without gathering, and for ``custom_load_fn``
                parameters are whole at every stage.

        Masters take values of 16 bits only where these differ from what they round to, so that what came from this
        model changes nothing.

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError, on all ranks) names or shapes that are not the model's,
                parameters that are not the same on all ranks, and whatever :meth:`load_checkpoint` raises of a path.
        """
        if checkpoint is None or isinstance(checkpoint, (str, os.PathLike)):
            self._load_weights_of(checkpoint, strict, custom_load_fn)
            return
        from zoo.engine.checkpoint.partial_load import Wanted
        from zoo.engine.checkpoint.state_dicts import open_state_dict

        self._records.read_outcome()
        custom = custom_load_fn is not None
        self._everyone.agree("load_module_state_dict() with strict, custom_load_fn", repr((strict, custom)))
        self._check_custom(custom_load_fn)
        found = open_state_dict(checkpoint, self._module, self._sharded, strict=strict, custom=custom)
        wanted = Wanted(module_strict=strict, module_only=True, custom=custom, given=True)
        self._load(found, wanted, custom_load_fn)

    def _load_weights_of(
        self, place: str | os.PathLike[str] | None, strict: bool, custom_load_fn: CustomLoad | None
    ) -> None:
        """See :meth:`load_module_state_dict`."""
        self.wait_for_checkpoint()
        place = place if place is not None else self._last_path
        if place is None:
            raise ValueError(
                "load_module_state_dict(None) of an engine that has neither saved nor loaded a checkpoint; give a "
                "state_dict, or the path of a checkpoint."
            )
        text = os.fspath(place).rstrip("/")
        directory, _, tag = (text if "://" in text else os.path.abspath(text)).rpartition("/")
        self.load_checkpoint(
            directory or "/", tag, load_module_strict=strict, load_module_only=True, custom_load_fn=custom_load_fn,
        )  # fmt: skip
