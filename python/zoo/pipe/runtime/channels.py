"""Messages between pipeline ranks: one communicator for each direction of each pair, receives posted ahead.

A *channel* leads from one pipeline rank to another. Its messages are matched by their order alone, which both ends take
from the same table; nothing relies on tags, which NCCL has not. No rank sends and receives on one communicator, so that
NCCL, where the operations of a communicator run in their order, has nothing to wait for in a circle.

What a message looks like (the tree, and shapes, dtypes and whether a gradient comes back for each tensor: its *meta*)
is known from an earlier batch of the same signature, and then receives are posted :data:`AHEAD` messages before they
are needed. Otherwise a header travels before the data. Gradients need none: they look like what they are gradients of.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zoo.comm import Communicator, Handle
from zoo.pipe.trees import Outline, outline_text, unflatten

__all__ = ["AHEAD", "Channels", "Meta", "Name"]

AHEAD = 2
"""Messages of a channel that are received before they are needed, and sent without waiting for the receiver."""

Name = tuple[str, int, int]
"""What a message is: "activation" or "gradient", the stage that produced it, the micro-batch."""


@dataclass(frozen=True)
class Meta:
    """How a message looks: the tree, and (shape, dtype, differentiable) of each tensor."""

    outline: Outline
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The places of the tensors whose gradients come back."""
        return tuple(i for i, (_, _, wanted) in enumerate(self.tensors) if wanted)

    def empty(self, device: torch.device, *, gradients: bool) -> list[torch.Tensor]:
        """Room for the tensors, or for their gradients."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype, wanted in self.tensors
            if wanted or not gradients
        ]

    def num_bytes(self, *, gradients: bool) -> int:
        """Of the tensors, or of their gradients."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype, wanted in self.tensors if wanted or not gradients
        )

    def text(self) -> str:
        """For a sentence."""
        return outline_text(unflatten(self.empty(torch.device("meta"), gradients=False), self.outline)) + "".join(
            f", tensor {i} with a gradient" for i in self.differentiable
        )

    def encode(self) -> bytes:
        """As JSON."""
        tensors = [(shape, str(dtype).removeprefix("torch."), wanted) for shape, dtype, wanted in self.tensors]
        return json.dumps([self.outline, tensors]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Meta:
        """From JSON."""
        outline, tensors = json.loads(data)
        return cls(outline, tuple((tuple(shape), getattr(torch, dtype), wanted) for shape, dtype, wanted in tensors))


class Channels:
    """The channels of this pipeline rank.

    Args:
        comm: the pipeline ranks. Collective: all of them pass the same ``edges``.
        edges: (from, to) of every channel of the pipeline.
        device: where received tensors are.
        number: how many were made before: groups that were closed are not used again.
    """

    def __init__(
        self, comm: Communicator, edges: Iterable[tuple[int, int]], device: torch.device, number: int = 0
    ) -> None:  # fmt: skip
        self.comm, self._device = comm, device
        colours = _colours(sorted(set(edges)))
        self.edges = frozenset(colours)
        self._made = [comm.duplicate(f"pipe {number}.{n}") for n in range(max(colours.values(), default=-1) + 1)]
        self._of = {edge: self._made[colour] for edge, colour in colours.items()}
        self._sent: dict[int, deque[tuple[list[Handle], Sequence[torch.Tensor]]]] = {}
        self._expected: dict[int, deque[Name]] = {}
        self._posted: dict[int, deque[tuple[Name, list[torch.Tensor], list[Handle]]]] = {}
        self._early: dict[Name, tuple[Meta, list[torch.Tensor]]] = {}
        self._meta: Callable[[Name], Meta | None] = lambda name: None
        self._headers = False

    def begin(
        self, expected: Mapping[int, Sequence[Name]], meta: Callable[[Name], Meta | None], *, headers: bool
    ) -> None:
        """A batch begins.

        Args:
            expected: from each rank, what will come, in order.
            meta: how a message looks, None as long as that is not known.
            headers: activations travel with headers.
        """
        self._meta, self._headers = meta, headers
        self._early.clear()
        self._expected = {peer: deque(names) for peer, names in expected.items()}
        self._posted = {peer: deque() for peer in expected}
        for peer in expected:
            self._post(peer)

    def send(self, peer: int, name: Name, meta: Meta, tensors: Sequence[torch.Tensor]) -> None:
        """Send a message; the tensors must not change any more."""
        comm = self._of[self.comm.rank, peer]
        handles: list[Handle] = []
        tensors = [_wire(tensor.detach().resolve_conj().resolve_neg().contiguous()) for tensor in tensors]
        if self._headers and name[0] == "activation":
            data = torch.frombuffer(bytearray(meta.encode()), dtype=torch.uint8).to(self._device)
            size = torch.tensor([data.numel()], device=self._device)
            handles += [comm.send(size, peer), comm.send(data, peer)]
            tensors = [*tensors, size, data]
            handles += [comm.send(tensor, peer) for tensor in tensors[:-2] if tensor.numel()]
        else:
            handles += [comm.send(tensor, peer) for tensor in tensors if tensor.numel()]
        flying = self._sent.setdefault(peer, deque())
        flying.append((handles, tensors))
        while len(flying) > AHEAD and not self._headers:
            self._land(flying)

    def receive(self, peer: int, name: Name) -> tuple[Meta, list[torch.Tensor]]:
        """A message from ``peer``; those before it on its channel are received too, and kept."""
        self.arrive(peer, name)
        return self._early.pop(name)

    def arrive(self, peer: int, name: Name) -> None:
        """Wait for a message, which is kept for :meth:`receive`."""
        while name not in self._early:
            posted = self._posted[peer]
            if posted:
                found, tensors, handles = posted.popleft()
                self._post(peer)
                for handle in handles:
                    handle.wait()
                meta = self._meta(found)
            else:
                found = self._expected[peer].popleft()
                meta, tensors = self._take(peer, found)
                self._post(peer)
            if meta is None:
                raise AssertionError(f"message {found} was received, and nobody knows how it looks.")
            self._early[found] = meta, tensors

    def finish(self) -> None:
        """Wait for all that was sent."""
        for flying in self._sent.values():
            while flying:
                self._land(flying)

    def close(self) -> None:
        """Destroy the communicators; nothing is under way."""
        for comm in self._made:
            comm.close()

    def abandon(self) -> None:
        """The same, where a batch has failed: what is under way will not arrive."""
        for comm in self._made:
            comm.abandon()

    def _land(self, flying: deque[tuple[list[Handle], Sequence[torch.Tensor]]]) -> None:
        handles, _ = flying.popleft()
        for handle in handles:
            handle.wait()

    def _post(self, peer: int) -> None:
        """Begin to receive what comes next, as far as its looks are known."""
        posted, expected = self._posted[peer], self._expected[peer]
        comm = self._of[peer, self.comm.rank]
        while expected and len(posted) < AHEAD:
            name = expected[0]
            if self._headers and name[0] == "activation":
                return
            meta = self._meta(name)
            if meta is None:
                return
            expected.popleft()
            tensors = meta.empty(self._device, gradients=name[0] == "gradient")
            posted.append((name, tensors, [comm.recv(_wire(t), peer) for t in tensors if t.numel()]))

    def _take(self, peer: int, name: Name) -> tuple[Meta, list[torch.Tensor]]:
        """Receive a message whose looks may come with it."""
        comm = self._of[peer, self.comm.rank]
        meta = None
        if self._headers and name[0] == "activation":
            size = torch.zeros(1, dtype=torch.int64, device=self._device)
            comm.recv(size, peer).wait()
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            comm.recv(data, peer).wait()
            meta = Meta.decode(data.cpu().numpy().tobytes())
        else:
            meta = self._meta(name)
        if meta is None:
            raise AssertionError(f"message {name} is received before anybody knows how it looks.")
        tensors = meta.empty(self._device, gradients=name[0] == "gradient")
        for handle in [comm.recv(_wire(tensor), peer) for tensor in tensors if tensor.numel()]:
            handle.wait()
        return meta, tensors


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as it is sent: complex numbers, which not every backend knows, are pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _colours(edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A number for each edge, so that no rank has two edges of one number."""
    found: dict[tuple[int, int], int] = {}
    taken: dict[int, set[int]] = {}
    for edge in edges:
        used = taken.setdefault(edge[0], set()) | taken.setdefault(edge[1], set())
        number = next(n for n in range(len(used) + 1) if n not in used)
        found[edge] = number
        for rank in edge:
            taken[rank].add(number)
    return found
