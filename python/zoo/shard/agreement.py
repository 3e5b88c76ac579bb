"""What ranks settle when they construct: what a group is, what all give alike, and whether all have kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from zoo.comm import CollectiveMismatchError, Communicator, agree_none_failed

CONSTRUCTION = "construction of a ZeRO optimizer"
PARAMETERS = "the parameters and their groups"
_log = logging.getLogger("zoo.zero")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum, PurePath, BaseModel)


def check_group(group: Any, *, name: str = "group") -> None:
    """Raise ValueError for what is no group; ``name``: what it is called."""
    numbers = isinstance(group, (int, float, str, list, tuple, dict, set, range))
    if numbers and group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{name}={group!r} is a {type(group).__name__}; allowed are a process group (torch.distributed.new_group "
            "makes one of a list of ranks), a DeviceMesh, a zoo.comm.Communicator, or None for all ranks."
        )


def described(value: Any) -> str:
    """What can be compared between processes: values of numbers, texts and lists of them, of others the class."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() == 1 and not value.is_meta else f"tensor of {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(item)}" for key, item in value.items()) + "}"
    if dataclasses.is_dataclass(value):
        return type(value).__name__ + described({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return type(value).__name__


def short_digest(value: Any) -> str:
    """16 letters that stand for a value, as its ``repr`` has it."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def listed(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1 and 3 more"."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def of_object(value: Any, is_part: Callable[[Any], bool] = lambda _: False) -> str:
    """An object of the user's as ranks compare it: its class and its numbers and texts, and so what it is made of.

    ``is_part``: whether an attribute is an object to be told in the same way; others that are no numbers are left out.
    """
    if not hasattr(value, "__dict__"):
        return described(value)
    told = {
        name: of_object(item, is_part) if is_part(item) else described(item)
        for name, item in sorted(vars(value).items())
        if is_part(item) or isinstance(item, (*_PLAIN, list, tuple))
    }
    return f"{type(value).__module__}.{type(value).__qualname__} {told}"


def of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of parameter groups, by name; of several groups with the number of each."""
    several = len(groups) > 1
    return {
        f"{key} of group {i}" if several else key: value
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def all_ranks(group: Any, mesh: Any) -> Communicator | None:
    """Those that construct together, before they make groups of their own; None where these are not known."""
    if not dist.is_initialized():
        return None
    if mesh is None:
        return group if isinstance(group, Communicator) else Communicator(group)
    if mesh.size() == dist.get_world_size():
        return Communicator()
    return Communicator(mesh) if mesh.ndim == 1 else None


def agree(
    comm: Communicator, layout: str, arguments: Mapping[str, Any], parameters: Callable[[], Mapping[str, str]]
) -> None:
    """Compare the layout of the model and the arguments of all ranks: one all-gather of 8 bytes.

    Args:
        layout: stands for the parameters and their groups. parameters: by name what there is to say of each, for the
            error.

    Raises:
        CollectiveMismatchError: they differ; on all ranks, with what differs.
        RankFailedError: some rank has failed before it came here, with what it raises.
    """
    mine = {PARAMETERS: layout} | {k: described(v) for k, v in arguments.items()}
    digest = short_digest(sorted(mine.items()))
    try:
        agree_none_failed(comm, CONSTRUCTION, alike=f"with parameters and options {digest}")
    except CollectiveMismatchError as error:
        differing = _differing(comm, mine)
        told = _sentences(differing)
        if PARAMETERS in differing and (models := _differing(comm, parameters(), absent="not there")):
            # Else only their order, or what is packed together, differs.
            first = next(told_by_rank(repr(name), values) for name, values in models.items())
            more = f", and {len(models) - 1} more differ" if len(models) > 1 else ""
            told[0] = f"{PARAMETERS}: {first.replace(': ', ' is ', 1)}{more}"
        raise CollectiveMismatchError(
            f"the ranks construct a ZeRO optimizer in different ways: {'; '.join(told)}."
        ) from error


@contextlib.contextmanager
def raise_together_alike(comm: Communicator | None, what: str, needed: Mapping[str, Any]) -> Iterator[None]:
    """As :func:`zoo.comm.raise_together`, with its one all-gather of 8 bytes; and ranks have to come to its end with
    the same values.

    Args:
        comm: the ranks; None for this one alone.
        what: a call, as "initialize".
        needed: what ranks need alike, by name; it may be filled inside.

    Raises:
        CollectiveMismatchError: no rank has failed, and values differ; on all of them, with what differs.
    """
    try:
        yield
    except BaseException as error:
        agree_none_failed(comm, what, error)
        raise
    mine = {name: described(value) for name, value in needed.items()}
    try:
        agree_none_failed(comm, what, alike=f"with {short_digest(sorted(mine.items()))}")
    except CollectiveMismatchError as error:
        if comm is None:
            raise
        told = "; ".join(_sentences(_differing(comm, mine)))
        raise CollectiveMismatchError(
            f"the ranks call {what}() with different configurations: {told}. Give all of them the same."
        ) from error


def _differing(
    comm: Communicator, mine: Mapping[str, str], absent: str | None = None
) -> dict[str, list[str | None]]:  # fmt: skip
    """What differs between ranks: by name the values of all of them, ``absent`` where there is none. Collective."""
    everyone: list[Any] = [None] * comm.size  # all ranks have seen that something does
    # Not by the communicator, whose check may be what differs.
    dist.all_gather_object(everyone, dict(mine), group=comm.group)
    names = dict.fromkeys(name for given in everyone for name in given)
    found = {name: [given.get(name, absent) for given in everyone] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _sentences(differing: Mapping[str, list[str | None]]) -> list[str]:
    """About the first of these."""
    return [told_by_rank(name, values) for name, values in list(differing.items())[:5]]


def told_by_rank(name: str, values: Sequence[str | None], ranks: Sequence[int] | None = None) -> str:
    """Which ranks (default: 0, 1, ...) have which value."""
    by_value: dict[str | None, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    parts = [f"{'not given' if value is None else value} on {listed(of)}" for value, of in by_value.items()]
    return f"{name}: {', '.join(parts)}"


# Compiled kernels are settled before the first step needs them. A rank without them would compute the same numbers in
# plain torch, but every step of the job would last as long as its own; and where it must not, it would fail in the
# middle of a step that other ranks wait in.


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelUse:
    """Of one rank: whether it can use compiled kernels, why not, and whether it must (``ZOO_KERNELS=native``)."""

    usable: bool
    why: str = ""
    required: bool = False


def kernels_of(device: torch.device) -> KernelUse:
    """That of this process, for tensors on ``device``; builds and loads the library.

    Raises:
        ValueError: ``ZOO_KERNELS`` is something else than auto, native or reference.
    """
    try:
        from zoo.kernels import loading
        from zoo.kernels.building import BuildError
    except ImportError:
        return KernelUse(usable=False, why="zoo-kernels is not installed")
    required = loading.mode() == "native"
    try:
        usable = loading.native_cuda() if device.type == "cuda" else loading.native()
    except BuildError as error:
        return KernelUse(usable=False, why=str(error), required=True)
    if usable:
        return KernelUse(usable=True, required=required)
    why = loading.why_not() or (loading.why_not_cuda() if device.type == "cuda" else None)
    return KernelUse(usable=False, why="ZOO_KERNELS=reference" if loading.mode() == "reference" else why or "")


def agree_on_kernels(comm: Communicator, device: torch.device) -> None:
    """Where some ranks cannot use compiled kernels none does: one all-gather of 8 bytes. Says so on the first rank.

    Raises:
        BuildError: some ranks cannot, and ``ZOO_KERNELS=native`` on some rank; on all ranks, with the reasons.
    """
    if device.type not in ("cpu", "cuda") or comm.backend == "dry" or comm.size == 1:
        return
    mine = kernels_of(device)
    try:
        comm.agree("compiled kernels:", "usable" if mine.usable else f"lacking, required: {mine.required}", device)
        if mine.usable or not mine.required:
            return
    except CollectiveMismatchError:
        pass  # on all ranks
    everyone = [mine] * comm.size
    dist.all_gather_object(everyone, mine, group=comm.group)  # not by the communicator, whose check would count it
    _settle(everyone, first=comm.rank == 0)


def _settle(everyone: list[KernelUse], *, first: bool) -> None:
    from zoo.kernels import loading
    from zoo.kernels.building import BuildError

    why = "; ".join(f"rank {rank}: {each.why}" for rank, each in enumerate(everyone) if not each.usable)
    demanding = [rank for rank, each in enumerate(everyone) if each.required]
    if demanding:
        raise BuildError(
            f"ZOO_KERNELS=native on {listed(demanding)}, and some ranks cannot use compiled kernels; repair that, or "
            f"start all ranks with ZOO_KERNELS=auto: {why}"
        )
    loading.set_mode("reference")
    if first:
        _log.warning(
            "all ranks run the references in plain torch, which are slower, because some cannot use compiled kernels: "
            "%s",
            why,
        )
