"""Weights of decoder layers on NVMe: a model larger than memory generates at the speed of the disk.

Decoding walks through the layers again and again, in one order. A cache of the layers used last keeps nothing then: it
drops each layer shortly before it is needed. So as many layers as the budget holds stay, spread evenly, and the others
are read ahead into a few buffers, one layer after the other, across the end of a token too (Aminabadi et al. 2022,
"DeepSpeed Inference", section 5; Sheng et al. 2023, "FlexGen", section 4).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from zoo.inject.decoder import STATE
from zoo.io import Handle
from zoo.nn.blocks import find_blocks
from zoo.parts import own_hook
from zoo.parts.hooks import Nameless
from zoo.shard.offload.heap import give_back_free_blocks, map_large_blocks

Tensor = torch.Tensor
Weights = Callable[[str], Tensor]
LINE, PAGE = 64, 4096
"""Bytes: where a tensor begins in a layer's file, and what a file is a multiple of."""


@dataclass(eq=False)
class _Place:
    """Where a tensor is in a layer's file, from byte ``begin`` on. holders: (parameters or buffers of a module, its
    name there)."""

    tensor: Tensor
    begin: int
    strides: tuple[int, ...]
    holders: list[tuple[dict[str, Any], str]]

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.tensor.shape, self.tensor.dtype

    def view(self, memory: Tensor) -> Tensor:
        """Its numbers, of a file that was read into memory."""
        storage: Any = memory.untyped_storage()
        begin = (memory.storage_offset() + self.begin) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype).set_(storage, begin, self.shape, self.strides)

    def is_untouched(self, nothing: Any) -> bool:
        """Since it was pointed at nothing."""
        there = not self.shape.numel() or self.tensor.data_ptr() == nothing.data_ptr()
        mine = self.tensor.dtype is self.dtype and there
        return mine and all(children.get(name) is self.tensor for children, name in self.holders)


@dataclass(eq=False)
class _Layer:
    """One streamed layer.

    Attributes:
        num_bytes: of the file. future: of the read that is under way or has ended. buffer: where the weights are then.
        is_there: its tensors are those in the buffer. hooks: handles of those on it.
    """

    name: str
    module: nn.Module
    places: list[_Place]
    num_bytes: int
    path: Path
    checksum: int
    future: Any = None
    buffer: Any = None
    is_there: bool = False
    hooks: list[Any] = field(default_factory=list)


class _Hook(Nameless):
    """On a layer whose weights are on disk: a copy of it would have none."""

    unscripted = "these read its weights from disk (zoo.inference.stream). close() it first."

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call
        own_hook(self)
        self.__deepcopy__ = self.__reduce_ex__ = self._refuse  # type: ignore[method-assign]

    def __call__(self, *_: Any) -> None:
        self.call()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError("weights of the model are on disk (zoo.inference.stream); close() comes before a copy of it.")


class Streamed:
    """What :func:`stream` made of a model. Threads that call it take turns, a layer at a time.

    Attributes:
        pinned, streamed: names of the layers that stay in memory, and of those that are read for each token.
        num_bytes: that layers and buffers take in memory.
        bytes_read: so far.
    """

    def __init__(self, handle: Handle, folder: Path, buffers: Sequence[Tensor]) -> None:
        self.pinned: tuple[str, ...] = ()
        self.num_bytes, self.bytes_read = sum(one.nbytes for one in buffers), 0
        self._handle, self._free, self._layers = handle, deque(buffers), list[_Layer]()
        self._next = 0  # of the layers, the one to be read next
        self._nothing: dict[torch.dtype, Any] = {}
        self._lock, self._thread, self._used = threading.RLock(), 0, False
        self._end = weakref.finalize(self, _end, handle, folder)

    @property
    def streamed(self) -> tuple[str, ...]:
        """See the class."""
        return tuple(layer.name for layer in self._layers)

    def add(self, layer: _Layer) -> None:
        """Its weights are in its file, and no more in memory."""
        self._layers.append(layer)
        self._point_at_nothing(layer)
        module = layer.module
        layer.hooks += [
            module.register_forward_pre_hook(_Hook(lambda: self._bring(layer))),
            module.register_forward_hook(_Hook(lambda: self._give_back(layer)), always_call=True),
            module.register_state_dict_pre_hook(_refuse_state_dict),  # type: ignore[no-untyped-call]
        ]

    def begin(self) -> None:
        """Read ahead."""
        while self._free and self._layers and self._layers[self._next].future is None:
            layer = self._layers[self._next]
            into = self._free[0][: layer.num_bytes]
            layer.future = self._handle.async_pread(into, layer.path, checksum=layer.checksum)
            layer.buffer = self._free.popleft()  # not before: a file that is gone or cut takes none
            self.bytes_read += layer.num_bytes
            self._next = (self._next + 1) % len(self._layers)

    def _bring(self, layer: _Layer) -> None:
        self._lock.acquire()
        if self._used:  # by this thread, which was interrupted and has not given it back
            self._lock.release()
        self._thread, self._used = threading.get_ident(), True
        if not layer.is_there:
            self._refuse_touched(layer)
        if layer.future is None:  # another order than that of the layers: it begins anew here
            for other in self._layers:
                self._forget(other)
            self._next = self._layers.index(layer)
            self.begin()
        layer.future.wait()
        for place in layer.places:
            _point(place.tensor, place.view(layer.buffer))
        layer.is_there = True

    def _refuse_touched(self, layer: _Layer) -> None:
        for place in layer.places:
            if not place.is_untouched(self._nothing[place.dtype]):
                name = place.holders[0][1] if place.holders else "codes"
                raise ValueError(
                    f"{name} of {layer.name} was replaced or converted while the layer's weights were on disk "
                    "(zoo.inference.stream); close() comes before that."
                )

    def _give_back(self, layer: _Layer) -> None:
        if not self._used or self._thread != threading.get_ident():
            return  # a hook failed before the layer was brought
        try:
            self._forget(layer)
            self.begin()
        finally:
            self._used = False
            self._lock.release()

    def _forget(self, layer: _Layer) -> None:
        if layer.future is None:
            return
        future, buffer, layer.future, layer.buffer = layer.future, layer.buffer, None, None
        if layer.is_there:
            self._point_at_nothing(layer)
        try:
            future.wait()
        finally:
            self._free.append(buffer)

    def _point_at_nothing(self, layer: _Layer) -> None:
        """Who reads a weight between two uses reads NaN, and not another layer's."""
        layer.is_there = False
        for place in layer.places:
            if place.dtype not in self._nothing:
                fill = float("nan") if place.dtype.is_floating_point else 0
                self._nothing[place.dtype] = torch.full((1,), fill, dtype=place.dtype).untyped_storage()
            nothing = torch.empty(0, dtype=place.dtype)
            _point(place.tensor, nothing.set_(self._nothing[place.dtype], 0, place.shape, (0,) * len(place.shape)))

    def close(self) -> None:
        """Read every layer back into memory of its own and remove the files; the model is as it was. Weights that were
        converted meanwhile are converted, those that were replaced stay.

        Raises:
            zoo.io.ChecksumError, zoo.io.TransferError: of a layer whose file is not what was written. It and those
                behind it are streamed still.
        """
        with self._lock:
            for layer in self._layers:
                self._forget(layer)
            self._next = 0
            while self._layers:
                layer = self._layers[0]
                own = torch.empty(layer.num_bytes, dtype=torch.uint8)
                self._handle.pread(own, layer.path, checksum=layer.checksum)
                for place in layer.places:
                    _restore(place, own, self._nothing[place.dtype])
                for hook in layer.hooks:
                    hook.remove()
                self._layers.pop(0)
            self._free = deque()
            self._end()


def _end(handle: Handle, folder: Path) -> None:
    handle.close()
    shutil.rmtree(folder, ignore_errors=True)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ValueError(
        f"the weights of {prefix.rstrip('.') or 'a layer'} are on disk (zoo.inference.stream); close() brings them "
        "back."
    )


@torch.no_grad()
def _point(tensor: Tensor, view: Tensor) -> None:
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@torch.no_grad()
def _restore(place: _Place, memory: Tensor, nothing: Any) -> None:
    if place.is_untouched(nothing):
        _point(place.tensor, place.view(memory))
        return
    for children, name in place.holders:
        now = children.get(name)
        if now is None or now.shape != place.shape or now.is_meta:
            continue
        if bool((now != now).all() if place.dtype.is_floating_point else (now == 0).all()):
            now.data = place.view(memory).to(now.device, now.dtype)  # nothing was converted


@torch.no_grad()
def stream(
    model: nn.Module, folder: str | os.PathLike[str], *, budget_bytes: int, weights: Weights | None = None,
    ahead: int = 2, blocks: Sequence[str] | None = None, handle: Handle | None = None,
) -> Streamed:  # fmt: skip
    """Keep as many layers in memory as the budget holds, and read the others from files for each token.

    Each layer is written to a file of its own in a new folder within ``folder``, as it lies in memory, codes in the
    order of their kernels; it is multiplied from the very buffer that it was read into. Each read has a checksum.
    Between two uses its weights are NaN, and ``state_dict`` and copies of the model are refused, as are forwards of
    layers that were converted. The model may be injected and packed before; training it is not possible. From then on
    the process maps blocks of 1 MiB and more, so that they go back to the system when they are freed.

    Args:
        model: of layers that run one after the other, in eval mode, on the CPU. Its parameters may be on "meta" where
            ``weights`` has them: then no more than one layer more than the budget is in memory at any time.
        folder: on NVMe.
        budget_bytes: for layers and buffers. What stands outside of the layers (words, head) is not in it.
        weights: the value of a parameter by its name, such as ``safe_open(...).get_tensor``.
        ahead: buffers: layers that are there, or on their way, at once.
        blocks: names of the layers, or of their container; None: the longest list of equal ones.
        handle: of :mod:`zoo.io`, which is closed with this; None: one with blocks of 1 MiB, eight under way.

    Returns:
        What was done; ``close()`` brings everything back.

    Raises:
        ValueError: the budget does not hold the buffers; a model that trains, has an optimizer of zoo, is streamed, is
            on another device, or is on "meta" without weights, or of other shapes; no layers. Files are removed then.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ValueError(f"zoo.inference.stream got a {type(given).__name__}; give it a model, an nn.Module.")
    map_large_blocks()
    give_back_free_blocks()
    layers = find_blocks(model, blocks, "zoo.inference.stream")
    _check(model, budget_bytes, ahead, weights)
    shared = _shared(model, layers)
    sizes = _sizes(layers, shared)
    buffers = ahead if sum(sizes.values()) > budget_bytes else 0
    left = budget_bytes - buffers * max(sizes.values())
    if left < 0:
        raise ValueError(
            f"budget_bytes={budget_bytes}, and {ahead} buffers of the largest layer take "
            f"{ahead * max(sizes.values())}; give more, or fewer buffers ahead."
        )
    inner = {id(m) for module in layers.values() for m in module.modules()}
    for name, module in model.named_modules():
        if id(module) not in inner:
            _fill(model, module, name, weights)
    home = Path(tempfile.mkdtemp(prefix="zoo-layers-", dir=folder))
    own_handle = Handle(block_size=1 << 20, queue_depth=8, num_threads=1) if handle is None else handle
    memory = [own_handle.empty((max(sizes.values()),), dtype=torch.uint8) for _ in range(buffers)]
    done, pinned, kept = Streamed(own_handle, home, memory), [], _kept(sizes, left)
    try:
        for index, (name, module) in enumerate(layers.items()):
            stays = name in kept
            if stays:
                done.num_bytes += sizes[name]
                pinned.append(name)
            if not stays or any(p.is_meta for p in module.parameters()):
                into = own_handle.empty((sizes[name],), dtype=torch.uint8) if stays else memory[0]
                places = _laid(model, name, module, _own(module, shared), weights, into)
                if not stays:
                    path, content = home / f"{index}.bin", memory[0][: sizes[name]]
                    checksum = own_handle.pwrite(content, path, checksum=True).checksum
                    done.add(_Layer(name, module, places, sizes[name], path, int(checksum or 0)))
                give_back_free_blocks()  # of the values that came
    except BaseException:
        done.close()
        raise
    done.pinned = tuple(pinned)
    done.begin()
    return done


def layer_bytes(model: nn.Module, blocks: Sequence[str] | None = None) -> dict[str, int]:
    """What each layer of a model takes in a buffer, or in a file."""
    layers = find_blocks(model, blocks, "zoo.inference.stream")
    return _sizes(layers, _shared(model, layers))


def _sizes(layers: Mapping[str, nn.Module], shared: set[tuple[int, str]]) -> dict[str, int]:
    return {name: _file_bytes(_own(module, shared)) for name, module in layers.items()}


def _kept(sizes: Mapping[str, int], num_bytes: int) -> set[str]:
    """As many layers as fit, spread evenly: while one that stays computes, the next one is read."""
    names, total = list(sizes), len(sizes)
    for count in range(total, 0, -1):
        found = {name for i, name in enumerate(names) if (i + 1) * count // total > i * count // total}
        if sum(sizes[name] for name in found) <= num_bytes:
            return found
    return set()


def _own(module: nn.Module, shared: set[tuple[int, str]]) -> list[Tensor]:
    """A layer's tensors, each once, but for those that others have too; with those that its codes were joined in."""
    found: dict[int, Tensor] = {}
    for child in module.modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and (id(child), name) not in shared:
                found[id(tensor)] = tensor
        pieces = getattr(child.__dict__.get(STATE), "pieces", None)
        for joint in () if pieces is None else pieces.joint.values():
            found |= {id(t): t for t in (joint.weight.q, joint.weight.scales, joint.weight.minima) if t is not None}
    return list(found.values())


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[tuple[int, str]]:
    """(a module, the name of its tensor) where the memory is not one layer's alone."""
    owner = {id(m): i for i, module in enumerate(layers.values()) for m in module.modules()}
    places: dict[int, list[tuple[int, str]]] = {}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(_storage(tensor), []).append((id(module), name))
                owners.setdefault(_storage(tensor), set()).add(owner.get(id(module), -1))
    return {place for key, of in places.items() if len(owners[key]) > 1 for place in of}


def _segments(tensors: Sequence[Tensor]) -> list[tuple[Any, int, int, list[Tensor]]]:
    """(a storage, its bytes from, to, the tensors in it), where tensors that overlap are in one."""
    found: list[tuple[Any, int, int, list[Tensor]]] = []
    spans: list[tuple[int, int, int, Tensor]] = []
    for tensor in tensors:
        last: Any = (
            sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        )
        begin: Any = 0 if tensor.is_meta else tensor.storage_offset() * tensor.itemsize
        spans.append((_storage(tensor), begin, begin + last * tensor.itemsize, tensor))
    for key, begin, end, tensor in sorted(spans, key=lambda span: span[:2]):
        if found and found[-1][0] == key and begin < found[-1][2]:
            _, start, stop, inside = found[-1]
            found[-1] = key, start, max(stop, end), [*inside, tensor]
        else:
            found.append((key, begin, end, [tensor]))
    return found


def _file_bytes(tensors: Sequence[Tensor]) -> int:
    total = sum(-(-(end - begin) // LINE) * LINE for _, begin, end, _ in _segments(tensors))
    return -(-total // PAGE) * PAGE


def _laid(
    model: nn.Module, name: str, module: nn.Module, tensors: Sequence[Tensor], weights: Weights | None, memory: Tensor
) -> list[_Place]:  # fmt: skip
    """Put a layer's tensors into memory, one behind the other; parameters on "meta" become views of it."""
    paths = {id(parameter): path for path, parameter in module.named_parameters(prefix=name)}
    places: list[_Place] = []
    at = 0
    memory.zero_()
    for _, begin, end, inside in _segments(tensors):
        target = memory[at : at + end - begin]
        if inside[0].is_meta:
            parameter = inside[0]
            view = target.view(parameter.dtype).view(parameter.shape)
            view.copy_(_value(paths[id(parameter)], parameter, weights))
            made = nn.Parameter(view, requires_grad=False)
            _replace(model, parameter, made)
            places.append(_Place(made, at, made.stride(), []))
        else:
            storage: Any = inside[0].untyped_storage()
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, begin, (end - begin,), (1,)))
            for tensor in inside:
                where: Any = at + tensor.storage_offset() * tensor.itemsize - begin
                places.append(_Place(tensor, where, tensor.stride(), []))
        at += -(-(end - begin) // LINE) * LINE
    known = {id(place.tensor): place for place in places}
    for child in module.modules():
        for children in (child._parameters, child._buffers):
            for key, value in children.items():
                if id(value) in known:
                    known[id(value)].holders.append((children, key))
    return places


def _value(path: str, parameter: Tensor, weights: Weights | None) -> Tensor:
    if weights is None:
        raise ValueError(f"{path} is on meta, and weights is None; give what has its value.")
    value = weights(path)
    if value.shape != parameter.shape:
        raise ValueError(f"{path} has shape {tuple(parameter.shape)}, and weights give {tuple(value.shape)}.")
    return value


def _replace(model: nn.Module, parameter: Tensor, made: nn.Parameter) -> None:
    """Under all the names that it has."""
    for module in model.modules():
        for key, own in module._parameters.items():
            if own is parameter:
                module._parameters[key] = made


def _fill(model: nn.Module, module: nn.Module, name: str, weights: Weights | None) -> None:
    """Parameters of a module that are on "meta" get memory of their own."""
    for last, parameter in list(module._parameters.items()):
        if parameter is not None and parameter.is_meta:
            value = _value(f"{name}.{last}" if name else last, parameter, weights)
            _replace(model, parameter, nn.Parameter(value.to(parameter.dtype, copy=True), requires_grad=False))


def _check(model: nn.Module, budget_bytes: int, ahead: int, weights: Weights | None) -> None:
    if model.training:
        raise ValueError(
            "the model is in training mode; weights that are streamed cannot be trained: call model.eval()."
        )
    for name, value in (("budget_bytes", budget_bytes), ("ahead", ahead)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}; it must be a whole number, at least 1.")
    for name, module in model.named_modules():
        if any(isinstance(hook, _Hook) for hook in module._forward_pre_hooks.values()):
            raise ValueError(f"{name} is streamed (zoo.inference.stream); close() comes before another one.")
    for name, tensor in model.named_buffers():
        if tensor.is_meta:
            raise ValueError(
                f"the buffer {name} is on meta, and nothing has its value: make the model with parameters alone on "
                "meta, as accelerate.init_empty_weights() does."
            )
    for name, parameter in model.named_parameters():
        bucket = getattr(parameter, "_zoo_bucket", None)
        if bucket is not None and bucket.owner() is not None:
            raise ValueError(
                f"{name} is one that an engine or optimizer of zoo has in a buffer of its own; stream a copy of the "
                "model (copy.deepcopy), or close the optimizer before."
            )
        if parameter.is_meta and weights is None:
            raise ValueError(f"{name} is on meta, and weights is None; give what has its value.")
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name} is on {parameter.device}; streamed weights are multiplied on the CPU.")
