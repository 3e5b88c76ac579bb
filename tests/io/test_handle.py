"""A handle against plain file I/O."""

import gc
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

import zoo.io
from zoo.io import Handle, Striped

from .battery import BACKENDS

DTYPES = [
    torch.uint8,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.bool,
]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, object]:
    return BACKENDS[request.param]


@st.composite
def handles(draw: st.DrawFn) -> dict[str, object]:
    return {
        "block_size": 4096 * draw(st.integers(1, 6)),
        "queue_depth": draw(st.integers(1, 9)),
        "num_threads": draw(st.integers(1, 3)),
        "single_submit": draw(st.booleans()),
        "overlap_events": draw(st.booleans()),
        "direct": draw(st.sampled_from(["auto", "never"])),
        "bounce_bytes": draw(st.sampled_from([0, 1 << 20])),
    }


@examples(times=3)
@given(
    options=handles(),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    shift=st.integers(0, 70),
    offset=st.one_of(st.integers(0, 20_000), st.integers(0, 5).map(lambda k: 4096 * k)),
    from_pool=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_in_the_file_and_comes_back(
    folder: Path, backend: dict[str, object], options: dict[str, object], dtype: torch.dtype, shape: tuple[int, ...],
    shift: int, offset: int, from_pool: bool, seed: int,
) -> None:  # fmt: skip
    path = Path(tempfile.mkdtemp(dir=folder)) / "tensor.bin"
    before = os.urandom(9000)
    path.write_bytes(before)
    with Handle(**backend, **options) as handle:
        tensor = noise(shape, dtype, seed)
        # A view that starts `shift` elements into its storage: any address.
        place = (handle.empty if from_pool else torch.empty)(tensor.numel() + shift, dtype=dtype)
        tensor = place[shift:].copy_(tensor.flatten()).view(shape)
        content = bytes_of(tensor)
        done = handle.pwrite(tensor, path, offset, checksum=True)
        assert done == (len(content), zoo.io.crc32c(tensor))
        expected = bytearray(before)
        if content:
            expected.extend(bytes(max(0, offset + len(content) - len(expected))))
            expected[offset : offset + len(content)] = content
        assert path.read_bytes() == bytes(expected)

        back = noise((tensor.numel() + shift,), dtype, seed + 1)[shift:].view(shape)
        if content:
            assert handle.pread(back, path, offset, checksum=done.checksum) == done
            assert bytes_of(back) == content


@examples(times=3)
@given(
    files=st.integers(1, 4),
    stripe=st.integers(1, 4),
    numbers=st.integers(0, 60_000),
    offset=st.integers(0, 30_000),
    threads=st.integers(1, 3),
)
def test_striped_files_hold_one_sequence_of_bytes(
    folder: Path, files: int, stripe: int, numbers: int, offset: int, threads: int
) -> None:
    place = Path(tempfile.mkdtemp(dir=folder))
    target = Striped([place / f"device{k}" for k in range(files)], stripe_bytes=4096 * stripe)
    tensor = noise((numbers,), torch.uint8, numbers)
    with Handle(block_size=8192, num_threads=threads) as handle:
        handle.pwrite(tensor, target, offset)
        everything = bytes(offset) + bytes_of(tensor)
        parts = [bytearray() for _ in range(files)]
        for start in range(0, len(everything), target.stripe_bytes):
            parts[start // target.stripe_bytes % files] += everything[start : start + target.stripe_bytes]
        for index, part in enumerate(parts):
            assert target.share(len(everything), index) == len(part)
            on_disk = (place / f"device{index}").read_bytes()
            # Bytes before the offset that nobody wrote are holes; a file may end before them.
            if numbers:
                assert on_disk == bytes(part)[: len(on_disk)]
                assert not any(part[len(on_disk) :])
        if numbers:
            back = torch.zeros_like(tensor)
            handle.pread(back, target, offset)
            assert torch.equal(back, tensor)


def test_whole_files_are_replaced_and_sizes_compared(folder: Path, backend: dict[str, object]) -> None:
    path = folder / "whole"
    with Handle(**backend) as handle:
        handle.write(torch.arange(5000), path)
        handle.write(torch.arange(700), path, fsync=True)
        assert path.stat().st_size == 5600
        back = torch.empty(700, dtype=torch.int64)
        handle.read(back, path)
        assert torch.equal(back, torch.arange(700))
        with pytest.raises(ValueError, match=r"has 5600 bytes and 5608 were to be read"):
            handle.read(torch.empty(701, dtype=torch.int64), path)
        striped = Striped([folder / "a", folder / "b"], stripe_bytes=4096)
        handle.write(torch.arange(2000), striped)
        handle.write(torch.arange(1000), striped)
        assert ((folder / "a").stat().st_size, (folder / "b").stat().st_size) == (4096, 3904)


def test_an_open_file_serves_many_operations(folder: Path, backend: dict[str, object]) -> None:
    with Handle(**backend, block_size=4096, queue_depth=4) as handle:
        with handle.open(folder / "f", "w") as file:
            tensors = [noise((3000 + 100 * k,), torch.uint8, k) for k in range(40)]
            for k, tensor in enumerate(tensors):
                handle.async_pwrite(tensor, file, 8192 * k)
            assert handle.wait() == 40
        with handle.open(folder / "f") as file:
            assert file.size() == 8192 * 39 + 3000 + 3900
            backs = [torch.empty_like(tensor) for tensor in tensors]
            futures = [handle.async_pread(back, file, 8192 * k) for k, back in enumerate(backs)]
            for future in futures:
                future.wait()
            assert all(torch.equal(a, b) for a, b in zip(tensors, backs, strict=True))
        with pytest.raises(ValueError, match="the file is closed"):
            handle.pread(backs[0], file)


def registered() -> str:
    """What the kernel says of the rings of this process: the files that they have registered among it."""
    links = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdecimal()
             if os.path.lexists(f"/proc/self/fd/{name}")}  # fmt: skip
    return "".join(Path(f"/proc/self/fdinfo/{fd}").read_text() for fd, link in links.items() if "io_uring" in link)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_sleeping_ring_lets_go_of_a_file_that_nobody_has_any_more(folder: Path, how: str) -> None:
    """It would keep the space of a removed one."""
    with Handle(backend="uring") as handle:
        file = handle.open(folder / "the-file", "w")
        if file.alignment is None:
            pytest.skip("this file system has no direct transfers")
        handle.pwrite(handle.empty(1 << 20, dtype=torch.uint8), file)
        assert "the-file" in registered()
        if how == "closed":
            file.close()
        del file
        gc.collect()
        end = time.monotonic() + 10
        while "the-file" in registered() and time.monotonic() < end:
            time.sleep(0.01)
        assert "the-file" not in registered()


def test_reads_tell_autograd_that_the_tensor_changed(folder: Path) -> None:
    with Handle() as handle:
        handle.write(torch.ones(10), folder / "f")
        weight = torch.zeros(10, requires_grad=True)
        loss = (weight**2).sum()
        handle.read(weight.detach(), folder / "f")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_of_the_pool_and_aligned_ranges_go_in_place(folder: Path) -> None:
    with Handle(backend="uring", block_size=65_536) as handle, handle.open(folder / "f", "w") as file:
        if file.alignment is None:
            pytest.skip("this file system has no direct transfers")
        handle.pwrite(handle.empty(1 << 20, dtype=torch.uint8), file)
        stats = handle.stats()
        assert (stats.direct_bytes, stats.bounced_bytes, stats.buffered_bytes) == (1 << 20, 0, 0)
        assert stats.transfers == stats.fixed_transfers == 16


def test_what_goes_through_the_page_cache_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no file system in memory at hand")
    place = Path(tempfile.mkdtemp(dir=shared))
    try:
        with Handle() as handle:
            for name in ("a", "b"):
                handle.write(torch.arange(1000), place / name)
            back = torch.empty(1000, dtype=torch.int64)
            handle.read(back, place / "a")
            assert torch.equal(back, torch.arange(1000))
            if handle.stats().buffered_bytes == 24_000:
                assert len([r for r in caplog.records if "through the page cache" in r.message]) == 1
                with pytest.raises(
                    zoo.io.UnavailableError, match=r"direct transfers of .* were demanded and are refused"
                ):
                    Handle(direct="always").write(back, place / "c")
    finally:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
