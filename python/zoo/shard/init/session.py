"""What one Init does while it is active on a thread: partition what is built, and let initialisers through.

An operation on a partitioned parameter makes it whole and runs. The parameter stays whole until another one is touched
or the next module is finished, so that an initialiser of many operations costs one gather; then the values of rank 0
are broadcast if it was written to, and each rank keeps its part. Whoever got a view of it (``.data``, ``.detach()``)
may write through it at any time: as long as such a view exists the parameter stays whole, and one that still exists at
the end is an error, as what is written to it later would be lost.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.layout import split_of
from zoo.shard.agreement import short_digest
from zoo.shard.init.materialise import Materialiser
from zoo.shard.init.parts import SET_DATA, InitBucket, part_of
from zoo.shard.init.sharing import Sharing, current
from zoo.shard.offload.heap import map_large_blocks
from zoo.shard.partitioned import PartitionedAccessError, flat_tensors

_NEW_PARAMETER = nn.Parameter.__new__.__code__
_LEAKS = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage")


class Session:
    """See the file's docstring.

    Args:
        sharing: how parts are kept.
        dtype: of floating-point parameters; None for their own.
        materialiser: gives values to parameters on the meta device.
        override_apply: ``Module.apply`` gathers a module's parameters at once.
    """

    def __init__(
        self, sharing: Sharing, dtype: torch.dtype | None, materialiser: Materialiser, *, override_apply: bool
    ) -> None:
        self.comm, self._sharing, self.dtype, self.override_apply = sharing.comm, sharing, dtype, override_apply
        self._materialiser = materialiser
        map_large_blocks()  # else building and freeing one module after another takes as much as all of them
        self._building: list[nn.Module] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._open: dict[InitBucket, nn.Parameter] = {}
        self._applying: str = ""
        self._touches: dict[tuple[InitBucket, str], list[Any]] = {}
        self._twins: list[tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = []
        self._num = self._numel = self._largest = 0

    # Building --------------------------------------------------------------------------------------------------------

    def is_building(self, module: nn.Module) -> bool:
        """One of its ``__init__`` methods is running."""
        return any(m is module for m in self._building)

    @contextlib.contextmanager
    def building(self, module: nn.Module) -> Iterator[None]:
        """Around the outermost ``__init__`` of a module."""
        outermost = not self._building
        self._building.append(module)
        try:
            yield
        except BaseException:
            self._building.pop()
            raise
        self._building.pop()
        if current() is self:
            self.partition(module)
        if outermost:
            self._roots.append(weakref.ref(module))

    def partition(self, root: nn.Module) -> None:
        """Partition what is still ordinary in ``root``, children first. Collective."""
        for module in _children_first(root):
            if hasattr(module, "_parameters"):
                self._partition_own(module)
        self.settle()

    def _partition_own(self, module: nn.Module) -> None:
        self._materialiser.give_values(module)
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None and type(p) is nn.Parameter}
        for leaf in [leaf for leaf, p in own.items() if split_of(p).axes]:  # other ranks have other parts: it stays
            part = own.pop(leaf)
            if self.dtype is not None and part.is_floating_point():
                part.data = part.data.to(self.dtype)
        if not own:
            return
        label = type(module).__name__
        described = ", ".join(
            f"{leaf} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for leaf, p in own.items()
        )
        self.comm.agree(f"parameter number {self._num} of an Init, in {label}:", described)
        done: dict[int, InitBucket] = {}
        for leaf, parameter in own.items():
            if id(parameter) not in done:
                dtype = self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype
                done[id(parameter)] = InitBucket(parameter, f"{label}.{leaf}", self._sharing, dtype)
        numel = sum(part.numel for part in done.values())
        self._num, self._numel = self._num + len(done), self._numel + numel
        self._largest = max(self._largest, numel)

    # Initialisers ----------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[InitBucket]) -> Any:
        """``func(*args, **kwargs)`` on whole values. Collective if any of them is not whole yet."""
        name = _name_of(func)
        if func is torch.Tensor.detach and sys._getframe(2).f_code is _NEW_PARAMETER:
            return self._parameter_of(parts[0])
        if func == SET_DATA and part_of(args[0]) is not None:
            self._set_data(args[0], args[1], name)
            return None
        self._bring(parts, name)
        before = [part.parameter._version for part in parts]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for part, version in zip(parts, before, strict=True):
            if part.moved():
                raise PartitionedAccessError(_moved(name, part.name))
            # What shares its memory can be written to unseen.
            shares = getattr(func, "__name__", "") in _LEAKS or any(
                part.shares_memory(t) for t in flat_tensors(result) if t is not part.parameter
            )
            part.aliased |= shares
            self._audit(part, name, wrote=part.parameter._version != version)
        return result

    def _parameter_of(self, part: InitBucket) -> nn.Parameter:
        # nn.Parameter(partitioned) shares memory with it, in an ordinary construction. Mostly the other one is dropped
        # (reparametrisation); if both stay it would be a tie that nobody sees, which finish() looks for.
        made = part.copy()
        self._twins.append((weakref.ref(part.parameter), weakref.ref(made)))
        return made

    def _set_data(self, parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
        part = part_of(parameter)
        if part is None:
            raise AssertionError("no partitioned parameter")
        other = part_of(value)
        for candidate in self._open:
            if candidate is not part and candidate.shares_memory(value):
                other = candidate
        if other is not None and other is not part:
            raise PartitionedAccessError(
                f"{part.name}.data = {other.name}.data would make two partitioned parameters share memory. Tie the "
                "parameters themselves: module.weight = other.weight."
            )
        if value.shape != part.shape:
            raise PartitionedAccessError(
                f"{part.name}.data = a tensor of shape {tuple(value.shape)}; the partitioned parameter has shape "
                f"{tuple(part.shape)}, which cannot change. Assign a new nn.Parameter to the module instead."
            )
        if part not in self._open:
            self.settle()
        self._agree_on(part, name)
        if self.dtype is not None and value.is_floating_point():
            value = value.to(self.dtype)
        part.replace(value)
        self._audit(part, name, wrote=True)

    def _bring(self, parts: Sequence[InitBucket], name: str) -> None:
        fresh = [part for part in parts if part not in self._open and not (part.active and part.whole)]
        if not fresh:
            return
        self.settle(keep=parts)
        for part in fresh:
            self._agree_on(part, name)
            part.make_whole(exact=True)  # what an initialiser does to a rounded value would be kept
            self._open[part] = part.parameter

    def _agree_on(self, part: InitBucket, name: str) -> None:
        self.comm.agree("initialiser on a partitioned parameter:", f"{name} on {part.name}")

    def uses(self, part: InitBucket) -> bool:
        """An initialiser touched it, and it is still whole."""
        return part in self._open

    def forget(self, part: InitBucket) -> None:
        """What is whole of it, and was written to that, is not used any more."""
        self._open.pop(part, None)

    def settle(self, keep: Sequence[InitBucket] = ()) -> bool:
        """Store what was written, and free what is whole; False if views of some of it exist. Collective."""
        free = True
        for part in list(self._open):
            if part.writers or any(part is k for k in keep):
                continue  # what is being written is one rank's, until its GatheredParameters ends
            changed, aliased = part.changed, part.aliased
            self.comm.agree("end of initialisers on a partitioned parameter:", f"{part.name}, changed: {changed}")
            if changed:
                part.store(src=0)
            if not part.active:
                if aliased and any(self.comm.all_gather_object(part.viewed)):
                    free = False  # a view is alive on some rank: all ranks keep it whole
                    continue
                part.drop_whole()
            del self._open[part]
        return free

    def _audit(self, part: InitBucket, name: str, *, wrote: bool) -> None:
        entry = self._touches.setdefault((part, self._applying or name), [0, False])
        entry[0] += 1
        entry[1] |= wrote

    @contextlib.contextmanager
    def whole_for_apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> Iterator[None]:
        """The parameters that a module holds itself, whole while ``Module.apply`` calls ``fn`` on it. Collective."""
        found = (part_of(p) for p in module._parameters.values() if p is not None)
        parts = list({id(p): p for p in found if p is not None}.values())
        before, self._applying = self._applying, f"apply({_name_of(fn)})"
        self._bring(parts, self._applying)
        try:
            yield
            for part in parts:
                if part.written:
                    self._audit(part, self._applying, wrote=True)
        finally:
            self._applying = before
        # An assignment to the module's attribute makes an ordinary parameter.
        self._partition_own(module)
        self.settle()

    # The end ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Partition what was added after construction, store everything, name everything. Collective."""
        roots = [found for found in (ref() for ref in self._roots) if found is not None]
        for root in roots:
            self.partition(root)
        self.give_names(roots)
        self._check_twins(roots)
        if not self.settle():
            gc.collect()
            if not self.settle():
                kept = ", ".join(repr(part.name) for part in self._open)
                self.abandon()
                raise PartitionedAccessError(
                    f"at the end of Init there are still tensors that share the memory of {kept} (a kept .data, "
                    ".detach() or view): what is written to them later would be lost. Keep the parameter itself "
                    "instead, or a clone."
                )
        self._pack_frozen(roots)

    def _pack_frozen(self, roots: Sequence[nn.Module]) -> None:
        # What was frozen after its module was built.
        if not self._sharing.quantised_frozen:
            return
        found = {n: p for root in roots for n, p in root.named_parameters() if not p.requires_grad}
        digest = short_digest(list(found))
        self.comm.agree("frozen parameters at the end of an Init:", f"{len(found)} ({digest})")
        for parameter in found.values():
            part = part_of(parameter)
            if part is not None and not part.whole:
                part.pack()

    def _check_twins(self, roots: Sequence[nn.Module]) -> None:
        reachable = {id(p) for root in roots for p in root.parameters()}
        for one, other in ((one(), other()) for one, other in self._twins):
            if one is not None and other is not None and {id(one), id(other)} <= reachable:
                names = " and ".join(repr(p._zoo_name) for p in (one, other))  # type: ignore[attr-defined]
                self.abandon()
                raise PartitionedAccessError(
                    f"nn.Parameter(...) of a partitioned parameter made {names}, which share memory in an ordinary "
                    "construction. Tie the parameter itself (module.weight = other.weight), or clone it."
                )

    def abandon(self) -> None:
        """After an error: nothing is stored any more."""
        for part in list(self._open):
            part.drop_whole()
        self._open.clear()

    def give_names(self, roots: Sequence[nn.Module]) -> None:
        """Parts get the full names of their parameters; what slipped past them (``set_``) is found."""
        for root in roots:
            for name, parameter in root.named_parameters():
                part = part_of(parameter)
                if part is None:
                    continue
                part.rename(name)
                if part.moved():
                    raise PartitionedAccessError(_moved("something", name))

    def report(self) -> InitReport:
        """What was partitioned so far, and what ran on it afterwards."""
        touches = tuple(Touch(part.name, name, calls, wrote) for (part, name), (calls, wrote) in self._touches.items())
        return InitReport(self._num, self._numel, self._largest, touches)


def _children_first(root: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                yield from visit(child)
        yield module

    yield from visit(root)


def _moved(function: str, parameter: str) -> str:
    return (
        f"{function} gave the partitioned parameter {parameter!r} other memory, which cannot be followed. Write values "
        "into it: with torch.no_grad(): parameter.copy_(...)."
    )


def _name_of(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return f".{getattr(owner, '__name__', 'attribute')}" + (" =" if func.__name__ == "__set__" else "")
    return str(getattr(func, "__qualname__" if hasattr(func, "__qualname__") else "__name__", func)).rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Touch:
    """``function`` ran ``num_calls`` times on the partitioned parameter ``parameter``; ``wrote``: it changed it."""

    parameter: str
    function: str
    num_calls: int
    wrote: bool


@dataclass(frozen=True)
class InitReport:
    """What an Init did.

    ``num_parameters`` parameters of together ``numel`` elements were partitioned; ``largest_numel`` is the largest
    module's, which is what is whole at one time. ``touches``: initialisers that ran on partitioned parameters, each of
    which cost a gather and, if it wrote, a broadcast.
    """

    num_parameters: int
    numel: int
    largest_numel: int
    touches: tuple[Touch, ...]

    def __str__(self) -> str:
        text = (
            f"{self.num_parameters} parameters of {self.numel:,} elements were partitioned as they were made, at most "
            f"{self.largest_numel:,} elements at a time"
        )
        written = sorted({t.parameter for t in self.touches if t.wrote})
        if written:
            text += f"; {len(written)} of them were written to again afterwards: {', '.join(written[:10])}"
            text += ", ..." if len(written) > 10 else ""
        return text + "."
