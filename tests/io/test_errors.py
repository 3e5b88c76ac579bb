"""Every mistake and every failure is an exception that says what, where and how to fix it."""

import contextlib
import copy
import ctypes
import errno
import gc
import os
import pickle
import shutil
import subprocess
import time
import weakref
from pathlib import Path

import pytest
import torch

import zoo.io
from zoo.io import (
    BufferPool,
    CancelledError,
    ChecksumError,
    Fault,
    Handle,
    Mock,
    Striped,
    TransferError,
    UnexpectedEndError,
)

from .battery import BACKENDS


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, 4).T, "non-contiguous tensor .* stride .1, 4."),
        (torch.zeros(4, device="meta"), "tensor on meta; allowed is the CPU"),
        (torch.zeros(4).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugated"),
    ],
)
def test_tensors_that_cannot_travel_as_they_are(folder: Path, tensor: torch.Tensor, words: str) -> None:
    with Handle() as handle:
        for operation in (handle.pwrite, handle.pread, handle.write, handle.read):
            with pytest.raises(ValueError, match=words):
                operation(tensor, folder / "f")
        with pytest.raises(TypeError, match=r"give a torch\.Tensor"):
            handle.pwrite([1, 2], folder / "f")  # type: ignore[arg-type]
    assert not (folder / "f").exists()


def test_a_tensor_with_less_memory_than_its_elements_need(folder: Path) -> None:
    tensor = torch.zeros(100)
    part = tensor[50:]
    tensor.untyped_storage().resize_(300)
    with Handle() as handle:
        for operation in (handle.pwrite, handle.pread):
            with pytest.raises(ValueError, match=r"shape .50,. .* 200 bytes, and its storage has 100 for it"):
                operation(part, folder / "f")
        assert handle.pwrite(part[:25], folder / "f").num_bytes == 100


def test_a_tensor_whose_storage_was_freed(folder: Path) -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    with Handle() as handle, pytest.raises((ValueError, RuntimeError)):
        handle.pwrite(tensor, folder / "f")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 1000}, "block_size = 1000"),
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": -4096}, "block_size = -4096"),
        ({"block_size": 4096.0}, "block_size = 4096.0"),
        ({"queue_depth": 0}, "queue_depth = 0; allowed is 1 to 4096"),
        ({"num_threads": 100}, "num_threads = 100"),
        ({"backend": "libaio"}, 'backend = "libaio"; allowed are "auto", "uring"'),
        ({"direct": "perhaps"}, "direct = 'perhaps'"),
        ({"backend": "threads", "iopoll": True}, "sqpoll_idle_ms and iopoll are settings of io_uring"),
        ({"backend": Mock(), "sqpoll_idle_ms": 5}, "sqpoll_idle_ms and iopoll are settings of io_uring"),
        ({"backend": Mock(faults=(Fault(error="EWRONG"),))}, "error = 'EWRONG'"),
        ({"backend": Mock(faults=(Fault(),))}, "give exactly one of error, short_bytes, delay_s"),
    ],
)
def test_settings_out_of_range(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Handle(**options)


def test_offsets_paths_and_checksums_that_make_no_sense(folder: Path) -> None:
    tensor = torch.zeros(10)
    with Handle() as handle:
        for offset in (-1, 1.5, 1 << 63, True):
            with pytest.raises(ValueError, match="offset = "):
                handle.pwrite(tensor, folder / "f", offset)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="end past 2"):
            handle.pwrite(tensor, folder / "f", (1 << 63) - 10)
        with pytest.raises(ValueError, match=r"zero byte|null byte"):
            handle.pwrite(tensor, str(folder / "f\0g"))
        with pytest.raises(ValueError, match="checksum = 4294967296"):
            handle.pread(tensor, folder / "f", checksum=1 << 32)
        with pytest.raises(TransferError, match="Is a directory"):
            handle.pwrite(tensor, folder)
        os.mkfifo(folder / "pipe")
        with pytest.raises((ValueError, TransferError), match=r"neither a regular file|No such device"):
            handle.pwrite(tensor, folder / "pipe")
        with pytest.raises(ValueError, match="multiple of 4096"):
            Striped([folder / "a", folder / "b"], stripe_bytes=1000)
        with (
            handle.open(folder / "w", "w") as file,
            pytest.raises(ValueError, match="open for writes and cannot serve"),
        ):
            handle.pread(tensor, file)
        (folder / "r").write_bytes(bytes(5000))
        with (
            handle.open(folder / "r") as file,
            pytest.raises(ValueError, match="open for reads and cannot serve a write"),
        ):
            handle.write(tensor, file)
        assert (folder / "r").stat().st_size == 5000


def test_one_file_under_two_names_is_not_striped_over(folder: Path) -> None:
    """Its stripes would lie on one another."""
    (folder / "a").write_bytes(b"kept" * 5000)
    (folder / "link").symlink_to(folder / "a")
    (folder / "hard").hardlink_to(folder / "a")
    with Handle() as handle:
        for other in (folder / "a", folder / "link", folder / "hard", f"{folder}/./a"):
            target = Striped([folder / "a", other], stripe_bytes=4096)
            for operation in (handle.write, handle.read, handle.pwrite, handle.pread):
                with pytest.raises(ValueError, match="which are one file: stripes would lie on one another"):
                    operation(torch.zeros(4000), target)
    assert (folder / "a").read_bytes() == b"kept" * 5000


def test_a_device_holds_more_than_a_tensor_and_is_not_cut(folder: Path) -> None:
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not there (package mount)")
    (folder / "image").write_bytes(bytes(1 << 20))
    attached = subprocess.run(
        ["losetup", "--find", "--show", str(folder / "image")], capture_output=True, text=True, check=False
    )
    if attached.returncode:
        pytest.skip("no right to make a block device of a file")
    device = attached.stdout.strip()
    try:
        with Handle() as handle:
            with pytest.raises(ValueError, match=r"is a device, which holds more .* write a part of it \(pwrite\)"):
                handle.write(torch.ones(100), device)
            handle.pwrite(torch.ones(100), device, 4096, fsync=True)
            back = torch.zeros(100)
            handle.pread(back, device, 4096)
        assert back.eq(1).all()
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_missing_file_carries_path_offset_and_length(folder: Path) -> None:
    with Handle() as handle, pytest.raises(TransferError, match="No such file") as caught:
        handle.pread(torch.zeros(10), folder / "missing", 8192)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(folder / "missing"))
    assert (caught.value.offset, caught.value.length) == (8192, 40)
    assert str(caught.value).startswith(f"open {folder / 'missing'}: No such file or directory (errno 2); a read needs")
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("kind", [TransferError, UnexpectedEndError, ChecksumError, CancelledError])
def test_what_a_process_raised_can_be_raised_in_another(kind: type[TransferError]) -> None:
    error = kind("what and why", 5 if kind is TransferError else None, "/d/f", 4096, 512)
    error.others = (kind("more", None, "/d/g", 0, 1),)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), again.errno, again.filename, again.offset, again.length) == (
            "what and why", error.errno, "/d/f", 4096, 512,
        )  # fmt: skip
        assert [str(other) for other in again.others] == ["more"]


def test_a_future_that_is_done_keeps_no_memory(folder: Path) -> None:
    with Handle(pool=BufferPool(1 << 20, pinned=False)) as handle:
        futures = [handle.async_pwrite(handle.empty(1000), folder / "f", 4096 * k) for k in range(3)]
        handle.wait()
        assert all(future.done() for future in futures)
        assert handle.pool.stats().buffers == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_past_the_end(folder: Path, backend: str) -> None:
    path = folder / "f"
    path.write_bytes(bytes(10_000))
    with Handle(**BACKENDS[backend]) as handle:
        tensor = torch.zeros(5000, dtype=torch.uint8)
        with pytest.raises(UnexpectedEndError, match="the file ends at byte 10000") as caught:
            handle.pread(tensor, path, 5001)
        assert (caught.value.offset, caught.value.length) == (5001, 5000)
        handle.pread(tensor, path, 5000)


def test_a_file_that_shrinks_meanwhile(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(bytes(100_000))
    slow = Mock(faults=(Fault(delay_s=0.2, times=1),))
    with Handle(backend=slow) as handle:
        future = handle.async_pread(torch.zeros(100_000, dtype=torch.uint8), path)
        os.truncate(path, 60_000)
        with pytest.raises(UnexpectedEndError, match="ends at byte 60000; it is shorter than asked for, or shrank"):
            future.wait()


@pytest.mark.parametrize("name", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_an_injected_error_surfaces_with_its_place(folder: Path, name: str, direction: str) -> None:
    path = folder / "f"
    path.write_bytes(bytes(1 << 16))
    mock = Mock(faults=(Fault(direction=direction, offset=20_000, length=1, error=name),))
    with Handle(backend=mock, block_size=4096) as handle:
        tensor = torch.ones(1 << 16, dtype=torch.uint8)
        operation = handle.pread if direction == "read" else handle.pwrite
        with pytest.raises(TransferError) as caught:
            operation(tensor, path)
        error = caught.value
        assert (error.errno, error.filename, error.offset, error.length) == (
            getattr(errno, name), str(path), 16_384, 4096,
        )  # fmt: skip
        assert f"{direction} 4096 bytes at offset 16384 of {path}" in str(error)


def test_failures_of_dropped_futures_come_with_wait_and_close(folder: Path) -> None:
    mock = Mock(faults=(Fault(offset=8192, length=8192, error="EIO"),))
    handle = Handle(backend=mock, block_size=4096)
    for k in range(6):
        handle.async_pwrite(torch.zeros(4096, dtype=torch.uint8), folder / "f", 4096 * k)
    with pytest.raises(TransferError) as caught:
        handle.wait()
    (other,) = caught.value.others
    assert sorted([caught.value.offset, other.offset]) == [8192, 12_288]
    assert handle.wait() == 0
    handle.async_pwrite(torch.zeros(4096, dtype=torch.uint8), folder / "f", 8192)
    with pytest.raises(TransferError):
        handle.close()
    with pytest.raises(ValueError, match="the handle is closed"):
        handle.pwrite(torch.zeros(1), folder / "f")
    with pytest.raises(ValueError, match="the handle is closed"):
        handle.open(folder / "g", "w")
    assert not (folder / "g").exists()
    handle.close()


def test_a_failure_that_a_future_told_is_not_told_again(folder: Path) -> None:
    with Handle(backend=Mock(faults=(Fault(error="EIO"),))) as handle:
        future = handle.async_pwrite(torch.zeros(10), folder / "f")
        for _ in range(2):
            with pytest.raises(TransferError):
                future.wait()
        assert handle.wait() == 1


def test_a_full_disk_is_known_before_anything_is_written(folder: Path) -> None:
    place = folder / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with Handle() as handle:
            handle.write(torch.ones(1000), place / "kept")
            with pytest.raises(TransferError, match=r"No space left on device .* free some space") as caught:
                handle.write(torch.ones(1 << 20), place / "big")
            assert caught.value.errno == errno.ENOSPC
            assert (place / "big").stat().st_size == 0
            back = torch.zeros(1000)
            handle.read(back, place / "kept")
            assert back.eq(1).all()
            # Room again: the failed write left nothing behind.
            handle.write(torch.ones(200_000), place / "fits")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_has_as_much_room_after_a_write_that_found_none(folder: Path) -> None:
    """ext4 keeps what was allocated past the end of a file."""
    image, place = folder / "image", folder / "ext4"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    make, mount = ["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]
    try:
        refused = any(subprocess.run(command, capture_output=True, check=False).returncode for command in (make, mount))
    except FileNotFoundError:
        refused = True
    if refused:
        pytest.skip("no right to mount a small file system, or no ext4")
    try:
        with Handle() as handle:
            handle.write(torch.ones(1000), place / "grows")
            for name in ("new", "grows"):
                before = os.statvfs(place).f_bavail
                with pytest.raises(
                    TransferError, match=r"allocate 67108864 bytes .*No space left on device .* free some"
                ):
                    handle.pwrite(torch.zeros(64 << 20, dtype=torch.uint8), place / name)
                assert os.statvfs(place).f_bavail == before
            handle.pwrite(torch.zeros(4 << 20, dtype=torch.uint8), place / "new")
            # Space that was set aside is space, and so is the rest of a block that is begun.
            with (place / "kept").open("wb") as file:
                fallocate = ctypes.CDLL(None, use_errno=True).fallocate
                fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
                size = 16 << 20
                assert fallocate(file.fileno(), 1, 0, size) == 0
            with (place / "rest").open("wb") as rest, contextlib.suppress(OSError):
                while True:
                    rest.write(bytes(4096))
                    rest.flush()
            handle.pwrite(torch.zeros(size, dtype=torch.uint8), place / "kept")
            handle.pwrite(torch.ones(10), place / "grows", 4000)
            assert (place / "grows").stat().st_size == 4040
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_flipped_bits_are_found(folder: Path) -> None:
    tensor = torch.randn(10_000)
    with Handle() as handle:
        done = handle.pwrite(tensor, folder / "f", checksum=True)
        raw = bytearray((folder / "f").read_bytes())
        raw[12_345] ^= 4
        (folder / "f").write_bytes(raw)
        with pytest.raises(ChecksumError, match=r"crc32c is 0x.*, expected 0x.*; the bytes on disk are not") as caught:
            handle.pread(torch.empty_like(tensor), folder / "f", checksum=done.checksum)
        assert caught.value.length == 40_000


def test_dropping_futures_and_tensors_in_flight_loses_nothing(folder: Path) -> None:
    slow = Mock(reorder=True, faults=(Fault(delay_s=1.0, times=1),))
    with Handle(backend=slow, block_size=4096) as handle:
        watch = []
        for k in range(20):
            tensor = torch.full((4096,), k, dtype=torch.uint8)
            watch.append(weakref.ref(tensor.untyped_storage()))
            handle.async_pwrite(tensor, folder / "f", 4096 * k)
        del tensor
        gc.collect()
        assert any(ref() is not None for ref in watch), "kept alive while in flight"
        handle.wait()
        assert handle.stats().in_flight == 0
    gc.collect()
    content = (folder / "f").read_bytes()
    assert all(content[4096 * k : 4096 * (k + 1)] == bytes([k]) * 4096 for k in range(20))
    assert all(ref() is None for ref in watch), "and let go afterwards"


@pytest.mark.matrix
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("swap", ["data", "set_", "swap_tensors"])
def test_a_tensor_whose_storage_is_swapped_in_flight_leaves_its_memory_to_the_operation(
    folder: Path, swap: str, verb: str
) -> None:
    (folder / "f").write_bytes(bytes([3]) * 4096)
    pool = BufferPool(1 << 20, pinned=False)
    slow = Mock(faults=(Fault(delay_s=0.3, times=1),))
    with Handle(backend=slow, pool=pool) as handle:
        # Not a view: a view's base would keep the memory by itself.
        tensor = (
            torch.empty(0, dtype=torch.uint8).set_(handle.empty(4096, dtype=torch.uint8).untyped_storage()).fill_(7)
        )
        future = (handle.async_pwrite if verb == "write" else handle.async_pread)(tensor, folder / "f")
        other = torch.zeros(4096, dtype=torch.uint8)
        if swap == "data":
            tensor.data = other
        elif swap == "set_":
            tensor.set_(other)
        else:
            torch.utils.swap_tensors(tensor, other)
            del other
        gc.collect()
        # The pool would hand the bytes to the next tensor.
        assert pool.stats().buffers == 1
        assert handle.empty(4096, dtype=torch.uint8).fill_(9).eq(9).all()
        future.wait()
        assert pool.stats().buffers == 0
        assert tensor.eq(0).all()
    assert (folder / "f").read_bytes() == bytes([7 if verb == "write" else 3]) * 4096


def test_dropping_a_handle_in_flight_finishes_its_operations(folder: Path) -> None:
    handle = Handle(backend=Mock(faults=(Fault(delay_s=0.2, times=1),)), block_size=4096)
    for k in range(10):
        handle.async_pwrite(torch.full((4096,), k, dtype=torch.uint8), folder / "f", 4096 * k)
    with pytest.warns(ResourceWarning, match="dropped with 10 operations in flight; they are finished now"):
        del handle  # the last reference: its finalizer runs here
    assert (folder / "f").read_bytes() == b"".join(bytes([k]) * 4096 for k in range(10))


def test_aborting_raises_in_every_future_not_begun(folder: Path) -> None:
    handle = Handle(backend=Mock(faults=(Fault(delay_s=0.2, times=1),)), block_size=4096, queue_depth=1)
    futures = [handle.async_pwrite(torch.zeros(4096), folder / "f", 16_384 * k) for k in range(10)]
    handle.abort()
    outcomes = []
    for future in futures:
        try:
            outcomes.append(future.wait(20))
        except CancelledError as error:
            outcomes.append(error)
    assert any(isinstance(outcome, CancelledError) for outcome in outcomes)
    with pytest.raises(ValueError, match="closed"):
        handle.pwrite(torch.zeros(1), folder / "f")
    handle.close()


def test_waiting_has_an_end_if_wanted(folder: Path) -> None:
    with Handle(backend=Mock(faults=(Fault(delay_s=0.5, times=1),))) as handle:
        future = handle.async_pwrite(torch.zeros(10), folder / "f")
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"still on its way after 0\.01 s"):
            future.wait(0.01)
        with pytest.raises(TimeoutError, match="1 operations are still in flight"):
            handle.wait(timeout=0.01)
        assert time.monotonic() - begun < 0.4
        assert future.wait().num_bytes == 40
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match=f"(?i)timeout = {timeout}; allowed is 0 or more"):
                handle.async_pwrite(torch.zeros(10), folder / "f").wait(timeout)
        for timeout in (float("inf"), 1e300, 1e12):
            assert handle.async_pwrite(torch.zeros(10), folder / "f").wait(timeout).num_bytes == 40


def test_unknown_mock_numbers() -> None:
    with pytest.raises(ValueError, match='direction = \'wirte\'; allowed are "read", "write" and None'):
        Handle(backend=Mock(faults=(Fault(direction="wirte", error="EIO"),)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="short = 2"):
        Handle(backend=Mock(short=2))
    assert zoo.io.native_version()


def test_polled_completion_works_or_says_what_it_needs(folder: Path) -> None:
    tensor = torch.randn(50_000)
    back = torch.empty_like(tensor)
    problem = None
    with Handle(backend="uring", iopoll=True) as handle:
        try:
            handle.pwrite(tensor, folder / "f")
            handle.pread(back, folder / "f")
        except TransferError as error:
            problem = error
    if problem is None:
        assert torch.equal(back, tensor)
    else:
        assert problem.errno == errno.EOPNOTSUPP
        assert "polled completion needs a device with polled queues" in str(problem)
