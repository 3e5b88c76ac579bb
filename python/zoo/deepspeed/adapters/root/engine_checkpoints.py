"""Checkpoints of an engine: what its methods are given, agreed on by all ranks before anything is read or written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.checkpointing import CheckpointError, alike, together
from zoo.checkpointing.format.disk import check_named
from zoo.checkpointing.listing import listing
from zoo.comm import Communicator
from zoo.deepspeed.adapters.configuration.documents import get_checkpoint_tag_validation_mode
from zoo.deepspeed.adapters.root.client_state import plain_state
from zoo.deepspeed.adapters.utilities.logs import warning_once
from zoo.engine.checkpoint.places import check_place

if TYPE_CHECKING:
    from zoo.deepspeed.adapters.root.engine import DeepSpeedEngine

_log = logging.getLogger("zoo.deepspeed")


class TagError(CheckpointError, AssertionError):
    """Ranks give other tags, which DeepSpeed asserts that they do not."""


def agreed(comm: Communicator, save_dir: Any, tag: Any, client_state: Any, mode: str) -> tuple[str | None, Any]:
    """(tag, client state) of a save. Collective.

    A checkpoint of zoo is one whole under one tag: where ranks give several, that of rank 0 counts.

    Args:
        mode: what becomes of several: "FAIL" is an error, "WARN" a warning on rank 0, "IGNORE" nothing.

    Raises:
        ValueError: (zoo.checkpointing.CheckpointError, on all ranks) the folder has no name, or the state cannot be
            saved.
        TagError: on all ranks, see ``mode``.
    """
    state: list[Any] = []

    def check() -> str | None:
        try:
            check_named(save_dir)
        except ValueError as error:
            raise CheckpointError(f"save_dir={error}") from None
        state.append(plain_state(client_state))
        return None if tag is None else str(tag)

    tags = together(comm, "save_checkpoint()", check)
    others = [f"{given!r} on rank {rank}" for rank, given in enumerate(tags) if given != tags[0]]
    if others:
        told = f"save_checkpoint(): the tag is {tags[0]!r} on rank 0 and {', '.join(others[:4])}"
        if mode == "FAIL":
            raise TagError(f"{told}, and checkpoint.tag_validation is 'Fail'. Give one tag on all ranks.")
        if mode == "WARN" and comm.rank == 0:
            _log.warning("%s; that of rank 0 counts.", told)
    return tags[0], state[0]


def save(
    engine: DeepSpeedEngine, save_dir: str | os.PathLike[str], tag: str | None, client_state: Mapping[str, Any] | None,
    save_latest: bool, exclude_frozen_parameters: bool,
) -> None:  # fmt: skip
    """See :meth:`~.engine.DeepSpeedEngine.save_checkpoint`. Collective."""
    mode = get_checkpoint_tag_validation_mode(engine.config.get("checkpoint") or {})
    tag, state = agreed(engine.engine.sharded.everyone, save_dir, tag, client_state, mode)
    engine._forget_empty_step()
    if engine.trains and (engine.engine.clock.micro_batch or engine.engine.optimizer.holds_gradients):
        warning_once(
            "save_checkpoint() in the middle of a step: the gradients of its micro-batches are not part of the "
            "checkpoint. Whoever loads it begins this step anew."
        )
    engine.engine.save_checkpoint(
        save_dir, tag, state, save_latest, exclude_frozen_parameters, asynchronous=False, within_step=True
    )


def load(
    engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], tag: str | None, strict: bool, optimizer_states: bool,
    schedule_states: bool, module_only: bool, custom_load_fn: Callable[..., Any] | None,
) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
    """See :meth:`~.engine.DeepSpeedEngine.load_checkpoint`. Collective."""
    everyone = engine.engine.sharded.everyone
    alike(everyone, "load_checkpoint()", lambda: check_place(load_dir))
    if tag is None and not any(everyone.all_gather_object(_has_checkpoint(load_dir))):
        _log.warning("load_checkpoint(%r): there is no checkpoint; nothing is loaded.", str(load_dir))
        return None, None
    path, client_state = engine.engine.load_checkpoint(
        load_dir, None if tag is None else str(tag), strict, optimizer_states, schedule_states, module_only,
        custom_load_fn,
    )  # fmt: skip
    engine.loaded_checkpoint_tag = Path(path).name
    return path, client_state


def _has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether this rank sees a checkpoint there, of either system; a store is asked when it is read."""
    place = Path(folder)
    return "://" in str(folder) or (
        place.is_dir()
        and ((place / "latest").exists() or (place / "latest_universal").exists() or bool(listing(place)))
    )


def state_dict_of(
    engine: DeepSpeedEngine, destination: Any, prefix: str, keep_vars: bool, exclude_frozen_parameters: bool
) -> dict[str, Any]:
    """See :meth:`~.engine.DeepSpeedEngine.module_state_dict`. Collective at stage 3."""
    if engine.zero_optimization_stage() == 3:
        return dict(engine.engine.module_state_dict(exclude_frozen_parameters))
    found: dict[str, Any] = engine.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if exclude_frozen_parameters:
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):  # under all names that it has
            if not parameter.requires_grad:
                found.pop(prefix + name, None)
    return found
