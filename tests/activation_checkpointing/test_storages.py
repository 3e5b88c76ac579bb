"""What waits, where, and how much of it: every byte comes back, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.profiles import examples
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zoo import sim
from zoo.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingConfig
from zoo.activation_checkpointing.forms import flatten, stays, unflatten
from zoo.activation_checkpointing.storages import Contiguous, Host, Keep, Nvme, Partition, Ring
from zoo.activation_checkpointing.storages.extents import Extents
from zoo.activation_checkpointing.storages.host import _OnHost
from zoo.comm import Communicator
from zoo.io import File, Handle


@examples(times=12)
@given(data=st.data())
def test_a_tensor_comes_back_with_its_values_and_strides(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    x = (torch.randn(shape) * 4).to(dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        x = view_of(x, data)
    assert not stays(x)
    flat, form = flatten(x)
    assert flat.dim() == 1
    assert flat.is_contiguous()
    y = unflatten(flat.clone(), form)
    assert y.shape == x.shape
    assert y.stride() == x.stride()
    assert torch.equal(x, y)


def view_of(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    dim = data.draw(st.integers(0, max(0, x.dim() - 1)))
    if not x.dim():
        return x.expand(3)
    ways = [
        lambda: x.transpose(0, dim), lambda: x.narrow(dim, 0, max(1, x.size(dim) - 1)), lambda: x.unsqueeze(dim),
        lambda: x.unsqueeze(0).expand(2, *x.shape), lambda: x[(slice(None),) * dim + (slice(None, None, 2),)],
    ]  # fmt: skip
    return data.draw(st.sampled_from(ways))()


def test_windows_that_overlap_come_back_without_the_overlap() -> None:
    x = torch.arange(10.0).unfold(0, 4, 1)
    flat, form = flatten(x)
    assert torch.equal(unflatten(flat, form), x)


@examples(times=6)
@given(sizes=st.lists(st.integers(0, 20000), max_size=30), order=st.randoms(use_true_random=False))
def test_ranges_of_a_file_never_overlap_and_all_come_back(sizes: list[int], order: Any) -> None:
    extents, taken = Extents(), []
    for size in sizes:
        start, length = extents.take(size)
        assert length >= size
        assert start % 4096 == 0
        assert all(start + length <= other or other + more <= start for other, more in taken)
        taken.append((start, length))
        if order.random() < 0.5:
            extents.give(*taken.pop(order.randrange(len(taken))))
        assert extents.end - extents.num_free == sum(length for _, length in taken)
    order.shuffle(taken)
    for one in taken:
        extents.give(*one)
    assert (extents.end, extents.num_free) == (0, 0)


def waiting(checkpointing: ActivationCheckpointing, x: torch.Tensor, calls: int = 2) -> tuple[torch.Tensor, int]:
    y = x
    for _ in range(calls):
        y = checkpointing(lambda x: torch.sin(x).exp(), y)
    return y.sum(), checkpointing.saved_bytes


@given(
    size=st.integers(1, 4), numel=st.integers(1, 40), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    below=st.sampled_from(["keep", "contiguous", "nvme"]), seed=st.integers(0, 9), reentrant=st.booleans(),
)  # fmt: skip
def test_each_tensor_rank_keeps_its_part(
    tmp_path_factory: pytest.TempPathFactory, size: int, numel: int, dtype: torch.dtype, below: str, seed: int,
    reentrant: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("nvme")

    def fn(rank: int) -> None:
        torch.manual_seed(seed)
        x = torch.randn(numel).to(dtype).requires_grad_()
        expected = torch.autograd.grad(torch.sin(torch.sin(x).exp()).exp().sum(), x)[0]
        storage = {"keep": Keep, "contiguous": lambda: Contiguous(2), "nvme": lambda: Nvme(folder)}[below]()
        comm = Communicator()
        config = ActivationCheckpointingConfig(use_reentrant=reentrant)
        checkpointing = ActivationCheckpointing(config, storage=Partition(comm, storage))
        loss, saved = waiting(checkpointing, x)
        each = -(-numel // size) if size > 1 and numel >= size else numel if below != "keep" else 0
        assert saved == 2 * each * dtype.itemsize  # 1/n of two tensors
        loss.backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]

    sim.run(size, fn, seed=seed)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", [2, 4])
def test_living_tensors_shrink_to_one_part(size: int) -> None:
    """Counted by the memory that lives, not by what storages say of themselves."""

    def fn(rank: int) -> None:
        x = torch.ones(64, 32, requires_grad=True)
        for storage, parts in ((None, 1), (Partition(Communicator()), size)):
            checkpointing = ActivationCheckpointing(storage=storage)
            with Living() as living:
                loss, _ = waiting(checkpointing, x, 5)
                num_calls = 5 if parts > 1 else 4  # x itself, which was there before, waits as parts too
                assert living.num_bytes == num_calls * x.nbytes // parts + loss.nbytes
                loss.backward()
            x.grad = None

    sim.run(size, fn)


class Living(TorchDispatchMode):
    """Bytes of tensors made under it that live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        seen = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in seen:
                self._made[x.untyped_storage().data_ptr()] = (
                    StorageWeakRef(x.untyped_storage()),
                    x.untyped_storage().nbytes(),
                )
        return out

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]
)
@pytest.mark.parametrize(
    "storage",
    [Keep, lambda: Contiguous(2), lambda: Host(num_checkpoints=2), Nvme],
    ids=["keep", "contiguous", "host", "nvme"],
)
def test_every_byte_of_every_type_comes_back(tmp_path: Path, storage: Any, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (7 * dtype.itemsize,), dtype=torch.uint8)
    values = raw.view(dtype)

    def fn(rank: int) -> None:
        made = storage(tmp_path) if storage is Nvme else storage()
        for one in (made, Partition(Communicator(), made)):
            held = one.put(values.clone(), 0, True)
            held.fetch()
            for _ in range(3):
                found = held.get().view(torch.uint8)
                assert torch.equal(found, raw)
                if not isinstance(made, Keep):
                    found.fill_(7)  # as a function may do to its arguments
            held.get()
            del held, found
        made.reset()

    sim.run(2, fn)


def test_ranks_gather_in_the_same_order_in_a_model_with_branches() -> None:
    def fn(rank: int) -> torch.Tensor:
        config = ActivationCheckpointingConfig(partition_activations=True)
        checkpointing = ActivationCheckpointing(config, Communicator())
        torch.manual_seed(0)
        x, y = torch.randn(2, 9, requires_grad=True).unbind()
        left = checkpointing(lambda x, y: (x * y).sin(), x, y)
        right = checkpointing(lambda x: {"a": x.cos(), "b": 3}, y)["a"]
        if rank == 0:
            gc.collect()
        return torch.autograd.grad((left * right).sum() + left.sum(), [x, y])[0]

    for seed in range(3):
        first, second = sim.run(2, fn, seed=seed)
        assert torch.equal(first, second)


def test_places_of_contiguous_buffers_are_allocated_once_and_used_again() -> None:
    storage = Contiguous(3)
    checkpointing = ActivationCheckpointing(storage=storage)
    addresses = set()
    for _ in range(4):
        x = torch.randn(5, 7, requires_grad=True)
        loss, saved = waiting(checkpointing, x, 3)
        assert saved == 3 * 5 * 7 * 4
        assert storage.ring.num_free == 0
        assert storage.ring.num_bytes == 3 * 512
        addresses |= {arena.buffer.data_ptr() for arena in storage.ring._arenas.values()}
        loss.backward()
        del loss
        assert storage.ring.num_free == 3
    assert len(addresses) == 1


def test_more_calls_than_places_are_refused_and_reset_begins_anew() -> None:
    storage = Contiguous(2)
    checkpointing = ActivationCheckpointing(storage=storage)
    x = torch.randn(4, requires_grad=True)
    loss, _ = waiting(checkpointing, x, 2)
    with pytest.raises(ValueError, match="2 checkpointed calls wait for their backward and one more came: set number_"):
        waiting(checkpointing, x, 1)
    checkpointing.reset()
    other, _ = waiting(checkpointing, x, 2)  # in new buffers
    loss.backward()  # from the old ones
    expected = torch.autograd.grad(torch.sin(torch.sin(x).exp()).exp().sum(), x)[0]
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    other.backward()
    with pytest.raises(ValueError, match="tensor 0 of a checkpointed call has 4000 bytes and the contiguous buffers"):
        waiting(checkpointing, torch.randn(1000, requires_grad=True))
    with pytest.raises(ValueError, match="num_checkpoints=0; contiguous buffers have places for at least 1"):
        Ring(0)


def test_the_file_has_no_name_and_what_is_written_is_read(tmp_path: Path) -> None:
    storage = Nvme(tmp_path / "new")
    checkpointing = ActivationCheckpointing(storage=storage)
    x = torch.randn(3, 3000, requires_grad=True)
    loss, saved = waiting(checkpointing, x, 4)
    assert saved == 4 * x.nbytes
    assert list((tmp_path / "new").iterdir()) == []
    while storage._staged:
        storage._finish_oldest()
    assert storage.pool.stats().in_use_bytes == 0  # it is on the disk, and nowhere else
    assert storage.file_bytes == 4 * 36864
    loss.backward()
    del loss
    storage.reset()
    assert storage.file_bytes == 0
    y: Any = x.detach()
    y.requires_grad_()
    z = y
    for _ in range(4):
        z = torch.sin(z).exp()
    z.sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_values_whose_write_is_under_way_are_a_copy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Nvme(tmp_path)
    held = storage.put(torch.arange(9.0), 0, True)
    monkeypatch.setattr(type(held), "written", lambda self: False)
    held.get().zero_()
    assert torch.equal(held.get(), torch.arange(9.0))


def test_forward_waits_for_the_disk_where_buffers_are_short(tmp_path: Path) -> None:
    storage = Nvme(tmp_path, staging_bytes=100_000)
    held = [storage.put(torch.full((9000,), float(n)), 0, True) for n in range(20)]
    assert storage.pool.stats().peak_bytes <= 3 * 36864
    for n, one in enumerate(held):
        assert torch.equal(one.get(), torch.full((9000,), float(n)))


class Counting(Keep):
    """Writes down what is fetched, and when it is taken."""

    fetches = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.number = 0

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Any:
        self.number += 1
        return _Counted(self.events, self.number, flat)


class _Counted:
    num_bytes = 0

    def __init__(self, events: list[str], number: int, flat: torch.Tensor) -> None:
        self.events, self.number, self.flat = events, number, flat

    def fetch(self) -> None:
        self.events.append(f"fetch {self.number}")

    def get(self) -> torch.Tensor:
        self.events.append(f"get {self.number}")
        return self.flat


def test_the_call_before_is_fetched_while_one_is_computed_again() -> None:
    storage = Counting()
    loss, _ = waiting(ActivationCheckpointing(storage=storage), torch.randn(3, requires_grad=True), 3)
    assert storage.events == []
    loss.backward()
    assert storage.events == [
        "fetch 3", "fetch 2", "get 3", "fetch 2", "fetch 1", "get 2", "fetch 1", "get 1",
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_saved_in_another_call_is_not_stored(reentrant: bool) -> None:
    storage = Contiguous(1)  # a second one would have no place
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(use_reentrant=reentrant), storage=storage)
    x = torch.randn(6, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # a graph of its own, which ends here
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(z.exp().sum(), z)
        return x.sin() * slope

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpointing(inner, checkpointing(inner, x).cos())

    y = checkpointing(outer, x).sum()
    assert checkpointing.saved_bytes == x.nbytes
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(inner(inner(x).cos()).sum(), x)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_arguments_in_another_call_do_not_wait(reentrant: bool) -> None:
    storage = Contiguous(4)
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(use_reentrant=reentrant), storage=storage)
    x = torch.randn(6, requires_grad=True)
    with Living() as living:
        y = checkpointing(lambda x: checkpointing(torch.sin, checkpointing(torch.exp, x)).cos(), x).sum()
        assert living.num_bytes == storage.ring.num_bytes + y.nbytes
        y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().cos().sum(), x)[0])  # type: ignore[arg-type]


def test_integers_may_differ_between_tensor_ranks() -> None:
    def fn(rank: int) -> None:
        checkpointing = ActivationCheckpointing(storage=Partition(Communicator()))
        x, ids = torch.ones(4, requires_grad=True), torch.tensor([rank, 3, 2, rank + 1])
        checkpointing(lambda x, ids: x.exp() * ids, x, ids).sum().backward()
        assert torch.equal(x.grad, x.detach().exp() * ids)  # type: ignore[arg-type]

    sim.run(2, fn)


def test_a_damaged_file_is_found_out(tmp_path: Path) -> None:
    storage = Nvme(tmp_path)
    checkpointing = ActivationCheckpointing(storage=storage)
    x = torch.randn(9000, requires_grad=True)
    loss, _ = waiting(checkpointing, x, 1)
    while storage._staged:
        storage._finish_oldest()
    storage._handle.pwrite(torch.zeros(4096, dtype=torch.uint8), storage._writes, 4096)
    with pytest.raises(OSError, match=r"the bytes on disk are not what was written"):
        loss.backward()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"activation_checkpointing.nvme_path='.*': no file can be made there: "):
        Nvme(tmp_path / "file")


def test_a_file_that_cannot_be_opened_twice_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Handle.open

    def once(self: Handle, path: Any, mode: Any = "r") -> File:
        if mode == "r":
            raise OSError(24, os.strerror(24))
        return real(self, path, mode)

    monkeypatch.setattr(Handle, "open", once)
    with pytest.raises(ValueError, match=r"no file can be made there: .*Too many open files"):
        Nvme(tmp_path)
    assert list(tmp_path.iterdir()) == []


FORKED = """
import os, sys, torch
from zoo.activation_checkpointing.storages import Nvme
storage = Nvme(sys.argv[1])
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
storage.close()
"""


def test_the_end_of_a_forked_child_says_nothing_of_its_parents_file(tmp_path: Path) -> None:
    done = processes.run(FORKED, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_ends_the_forward_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Nvme(tmp_path)
    checkpointing = ActivationCheckpointing(storage=storage)
    x = torch.randn(9000, requires_grad=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(storage._handle, "async_pwrite", full)
        with pytest.raises(OSError, match=r"a saved tensor of 36000 bytes could not be written: .*No space"):
            waiting(checkpointing, x)
    gc.collect()
    storage.reset()
    assert storage.file_bytes == storage.pool.stats().in_use_bytes == storage._staged == 0
    waiting(checkpointing, x)[0].backward()


def test_host_storage_leaves_tensors_of_the_cpu_where_they_are() -> None:
    checkpointing = ActivationCheckpointing(storage=Host())
    x = torch.randn(4, requires_grad=True)
    loss, saved = waiting(checkpointing, x)
    assert saved == 0
    loss.backward()


class Stream:
    """Stands in for a stream of a GPU: its events are passed when the test says so."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> Any:
        event = SimpleNamespace(passed=False, waited=0)
        event.query = lambda: event.passed
        event.synchronize = lambda: setattr(event, "waited", event.waited + 1)
        self.events.append(event)
        return event


@pytest.mark.parametrize("contiguous", [False, True])
def test_host_memory_is_given_to_nobody_while_the_device_copies(
    contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drops a saved tensor at once, as an error in forward does, does not wait for the device."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    stream, storage = Stream(), Host(num_checkpoints=1 if contiguous else None)
    slot = storage.ring.take(0, 4096, torch.device("cpu")) if storage.ring is not None else None
    host = storage.pool.empty(4096, dtype=torch.uint8) if slot is None else slot.raw
    address = host.data_ptr()
    held: Any = _OnHost(torch.ones(4096, dtype=torch.uint8), host, slot, stream, storage.pool)
    held.fetch()
    del host, slot
    held = None
    left, arrived = stream.events
    assert [left.waited, arrived.waited] == [int(contiguous)] * 2, "only a place that is taken again at once waits"
    assert storage.pool.stats().in_use_bytes == 4096
    left.passed = True
    assert storage.pool.empty(4096, dtype=torch.uint8).data_ptr() != address
    arrived.passed = True
    storage.reset()
    assert storage.pool.empty(4096, dtype=torch.uint8).data_ptr() == address or contiguous
