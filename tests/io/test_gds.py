"""GPUDirect Storage without a GPU: a stand-in for cuFile (cufile.c) moves bytes of host memory, and fails on order."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.io.cufile import Stub, build, environment, gpu, stand_in
from tests.profiles import examples

from zoo.activation_checkpointing.storages import Nvme
from zoo.io import (
    AioConfig,
    BufferPool,
    Handle,
    Striped,
    TransferError,
    UnavailableError,
    UnexpectedEndError,
    gds,
    notices,
)
from zoo.shard.offload.scratch import Scratch
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import RoleBuffer


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cufile"))


@pytest.fixture
def stub(library: Path) -> Iterator[Stub]:
    with stand_in(library) as made:
        yield made


@pytest.fixture
def plain(folder: Path) -> torch.Tensor:
    return torch.randint(0, 256, (300_001,), dtype=torch.uint8)


def made(**options: Any) -> Handle:
    handle = Handle(use_gds=True, **options)
    assert handle.gds
    return handle


def test_a_tensor_of_a_gpu_is_written_and_read_without_host_memory(
    folder: Path, stub: Stub, plain: torch.Tensor
) -> None:
    with made(block_size=65_536, queue_depth=4) as handle:
        assert handle.pwrite(gpu(plain), folder / "f", 13).num_bytes == plain.numel()
        assert (folder / "f").read_bytes()[13:] == bytes(plain.tolist())
        back = torch.zeros_like(plain)
        version = back._version
        handle.pread(gpu(back), folder / "f", 13)
        assert torch.equal(back, plain)
        assert back._version > version
        stats = handle.stats()
        assert (stats.gpu_bytes, stats.operations, stats.direct_bytes + stats.bounced_bytes) == (
            2 * plain.numel(),
            2,
            0,
        )
        assert stub.count("events") >= 2, "each operation waits for what the GPU was given before"
        # One handle for both: a tensor of the CPU goes its own way.
        handle.pread(back.zero_(), folder / "f", 13, checksum=True)
        assert torch.equal(back, plain)
        assert handle.stats().gpu_bytes == stats.gpu_bytes
        handle.pwrite(gpu(plain[:0]), folder / "empty", fsync=True)
    del handle


@pytest.mark.dear
@examples(times=3)
@given(st.integers(0, 9000), st.integers(1, 40_000), st.integers(1, 3), st.integers(0, 9000), st.booleans())
def test_arbitrary_ranges_and_short_transfers(
    library: Path, offset: int, size: int, files: int, most: int, kept: bool
) -> None:
    """Bytes in a file are those of the tensor and no others, at whatever place, cut however the library likes."""
    root = Path(__file__).parents[2] / "build"
    root.mkdir(exist_ok=True)
    with stand_in(library) as stub, tempfile.TemporaryDirectory(prefix="io-", dir=root) as name:
        folder = Path(name)
        stub.set(most=most)
        paths: list[Any] = [folder / str(k) for k in range(files)]
        before = torch.randint(0, 256, (60_000,), dtype=torch.uint8)
        written = torch.randint(0, 256, (size,), dtype=torch.uint8)
        with made(block_size=8192, queue_depth=2) as handle:
            opened = [handle.open(path, "w") for path in paths] if kept else []
            target = Striped(opened or paths, stripe_bytes=4096)
            handle.pwrite(before, target)
            handle.pwrite(gpu(written), target, offset)
            for file in opened:
                file.close()
            whole, part = torch.empty(60_000, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
            handle.pread(gpu(part), Striped(paths, stripe_bytes=4096), offset)
            handle.pread(whole, Striped(paths, stripe_bytes=4096))
        del handle, opened, target
        before[offset : offset + size] = written
        assert torch.equal(part, written)
        assert torch.equal(whole, before)


def test_registered_memory_is_found_from_anywhere_within_it(folder: Path, stub: Stub, plain: torch.Tensor) -> None:
    with made() as handle:
        with handle.register(gpu(plain)) as registration:
            handle.pwrite(gpu(plain[1000:9000]), folder / "f")
            assert stub.count("within") == 1
            with pytest.raises(UnavailableError, match=r"refused to register .* registered already \(cuFile 5023\)"):
                handle.register(gpu(plain))
            registration.close()
        registration.close()
        assert stub.comes_to("memories forgotten", 1)
        handle.pwrite(gpu(plain[1000:9000]), folder / "f")
        assert stub.count("within") == 1
        stub.set(sleep=200_000)
        with handle.register(gpu(plain[:4096])):
            future = handle.async_pwrite(gpu(plain[:4096]), folder / "f")
        assert stub.count("memories forgotten") == 1, "an operation still uses it"
        future.wait()
        del future
        stub.set(memory=5025)
        with pytest.raises(UnavailableError, match=r"permission denied \(cuFile 5025\)"):
            handle.register(gpu(plain))
        with pytest.raises(ValueError, match="cannot register a tensor on cpu with gds=True"):
            handle.register(plain)
    with Handle() as without, pytest.raises(ValueError, match=r"cannot register a tensor on cuda:2"):
        without.register(gpu(plain))


def test_registering_leaves_the_threads_gpu_as_it_was(stub: Stub, plain: torch.Tensor) -> None:
    """A user's thread goes on making tensors where it did before."""
    stub.use_device(5)
    with made() as handle, handle.register(gpu(plain)):
        assert stub.device() == 5
    assert stub.device() == 5
    del handle


def test_no_log_appears_in_the_current_folder_and_one_that_is_wanted_stays_wanted(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gds, "_SETTINGS", tmp_path / "cufile.json")
    for wanted in ("", "CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON", "settings"):
        for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"):
            monkeypatch.setenv(name, "/somewhere")  # noted, so that it is as it was after the test
            monkeypatch.delenv(name)
        if wanted == "settings":
            gds._SETTINGS.write_text('{"logging": {\n  // "dir": "/none",\n')
            gds._keep_log_out()
            assert os.environ.pop("CUFILE_LOGFILE_PATH") == "", "a comment names no folder"
            gds._SETTINGS.write_text('{"logging": {\n  "dir": "/var/log",\n')
        elif wanted:
            monkeypatch.setenv(wanted, "/elsewhere")
        before = os.environ.get("CUFILE_LOGFILE_PATH")
        made().close()
        assert os.environ.get("CUFILE_LOGFILE_PATH") == (before if wanted else "")
        assert (tmp_path / "cufile.log").exists() == (wanted in ("CUFILE_ENV_PATH_JSON", "settings"))
        (tmp_path / "cufile.log").unlink(missing_ok=True)


def test_failures_are_sentences_with_their_place(folder: Path, stub: Stub, plain: torch.Tensor) -> None:
    (folder / "f").write_bytes(bytes(plain.tolist()))
    with made(block_size=65_536) as handle:
        stub.set(file=5008)
        with pytest.raises(
            UnavailableError, match=r"f cannot be reached from a GPU: cuFile refused to register the file"
        ):
            handle.pread(gpu(plain), folder / "f")
        stub.set(file=5011)
        with pytest.raises(UnavailableError, match=r"the CUDA driver failed \(cuFile 5011\), CUDA error 201; copy"):
            handle.pread(gpu(plain), folder / "f")
        stub.set(file=0, move=-5010, after=2)
        with pytest.raises(
            TransferError, match=r"read 65536 bytes at offset \d+ of .*f: the nvidia-fs driver failed \(cuF"
        ):
            handle.pread(gpu(plain), folder / "f")
        stub.set(move=-5, after=0)
        with pytest.raises(TransferError, match=r"write \d+ bytes at offset 0 of .*g: Input/output error \(errno 5\)"):
            handle.pwrite(gpu(plain[:100]), folder / "g")
        handle.async_pwrite(gpu(plain[:100]), folder / "g")
        with pytest.raises(TransferError, match="errno 5"):
            handle.wait()
        stub.set(move=0)
        with pytest.raises(UnexpectedEndError):
            handle.pread(gpu(plain), folder / "f", 1)
        with pytest.raises(ValueError, match="a checksum of memory of a GPU; the CPU makes them"):
            handle.pwrite(gpu(plain), folder / "f", checksum=True)
        with pytest.raises(TransferError, match="No such file"):
            handle.pread(gpu(plain), folder / "missing")
        handle.pread(gpu(plain), folder / "f")
        assert handle.wait() > 0


def test_threads_share_the_work_and_close_waits_for_it(folder: Path, stub: Stub, plain: torch.Tensor) -> None:
    stub.set(sleep=20_000)
    handle = made(block_size=16_384, queue_depth=2, num_threads=2)
    futures = []

    def work(number: int) -> None:
        with handle.open(folder / str(number), "w") as file:
            futures.append(handle.async_pwrite(gpu(plain), file))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(TimeoutError, match="3 operations are still in flight"):
        handle.wait(0.01)
    handle.close()
    assert 2 <= stub.count("at once") <= 4
    assert all(future.done() for future in futures)
    for k in range(3):
        assert (folder / str(k)).read_bytes() == bytes(plain.tolist())
    with pytest.raises(ValueError, match="the handle is closed"):
        handle.pread(gpu(plain), folder / "0")


def test_an_event_loop_an_abort_and_a_wait_see_both_engines(folder: Path, stub: Stub, plain: torch.Tensor) -> None:
    handle = made(block_size=4096, queue_depth=1)

    async def both() -> None:
        first, second = handle.async_pwrite(gpu(plain), folder / "f"), handle.async_pwrite(plain, folder / "g")
        assert {(await first).num_bytes, (await second).num_bytes} == {plain.numel()}

    asyncio.run(both())
    assert handle.wait() == 2
    stub.set(sleep=5_000)
    future = handle.async_pwrite(gpu(plain), folder / "f")
    time.sleep(0.02)
    handle.abort()
    with pytest.raises(TransferError, match="cancelled"):
        future.wait()
    handle.close()


def test_where_there_is_no_library_that_is_said_and_tensors_are_refused_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plain: torch.Tensor
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setenv("ZOO_CUFILE", "libno_such_cufile.so")
    with caplog.at_level(logging.WARNING, "zoo.io"):
        for _ in range(2):
            with Handle.from_config(AioConfig(use_gds=True)) as handle:
                assert not handle.gds
                assert handle.config.use_gds
                with pytest.raises(ValueError, match=r"cannot write a tensor on cuda:2; allowed is the CPU: copy it"):
                    handle.pwrite(gpu(plain), folder / "f")
    assert [record.message for record in caplog.records] == [
        "GPUDirect Storage is not to be had: no cuFile library was found (looked for libno_such_cufile.so): tensors of "
        "a GPU travel through page-locked host memory"
    ]


def test_a_driver_that_does_not_open_is_the_same_and_is_tried_again(
    stub: Stub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    stub.set(open=5007)
    with caplog.at_level(logging.WARNING, "zoo.io"), Handle(use_gds=True) as handle:
        assert not handle.gds
    assert "cuFile refused to open its driver: GPUDirect Storage is not supported on this platform" in caplog.text
    stub.set(open=0, no_gpu=1)
    with caplog.at_level(logging.WARNING, "zoo.io"), Handle(use_gds=True) as handle:
        assert not handle.gds
    assert "the CUDA runtime finds no GPU (code 35)" in caplog.text
    assert stub.count("opened") == 0, "the library would never come back"
    stub.set(no_gpu=0)
    first, second = made(), made()
    assert stub.count("opened") == 1, "one driver for all handles"
    first.close()
    second.close()


FORKED = """
import os, sys, types, torch, zoo.io
torch.cuda.current_stream = lambda device: None
torch.cuda.Event = lambda: types.SimpleNamespace(cuda_event=0, record=lambda stream: None)

class OnGpu(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))
    __torch_function__ = torch._C._disabled_torch_function_impl

handle = zoo.io.Handle(use_gds=True)
tensor = torch.ones(10_000).as_subclass(OnGpu)
file = handle.open(sys.argv[1], "w")
handle.pwrite(tensor, file)
registration = handle.register(tensor)
child = os.fork()
if child == 0:
    try:
        handle.pwrite(tensor, file)
    except RuntimeError as error:
        assert "make an engine after the fork" in str(error), error
        registration.close()
        file.close()
        del handle, registration, file
        with zoo.io.Handle(use_gds=True) as other:  # the stand-in allows it: it knows of no process
            other.pwrite(tensor, sys.argv[1])
        os._exit(0)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
registration.close()
file.close()
handle.close()
"""


def test_a_forked_child_closes_nothing_of_its_parents(folder: Path, library: Path) -> None:
    done = processes.run(FORKED, folder / "f", env=environment(library))
    assert done.returncode == 0, done.stderr


CLOSED = """
import gc, os, zoo.io
handle = zoo.io.Handle(use_gds=True)
assert handle.gds
handle.close()
del handle
gc.collect()
print(os.environ["ZOO_CUFILE"] in open("/proc/self/maps").read())
"""


def test_the_library_stays_loaded_when_its_driver_is_closed(library: Path) -> None:
    """Threads of its own may still be about to end."""
    done = processes.run(CLOSED, env=environment(library))
    assert done.stdout.strip() == "True", done.stderr


def test_the_page_locked_pool_is_as_before(stub: Stub) -> None:
    """The stand-in has no `cudaHostRegister`: asking for page-locked memory says so, and needs nothing of cuFile."""
    assert not BufferPool(1 << 20).pinned


def test_shards_and_saved_activations_take_the_way_that_the_configuration_names(
    folder: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    aio, values = AioConfig(use_gds=True), torch.arange(5000.0)
    scratch = Scratch(Handle.from_config(aio), owned=True)
    nvme_file = scratch.nvme_file(folder, "parameters", [values.nbytes])
    shard = RoleBuffer(5000, torch.float32, torch.device("cuda", 2), tier=Tier.NVME, scratch=scratch, store=nvme_file)
    shard.set(gpu(values))
    assert shard.values is None
    assert (scratch.handle.stats().gpu_bytes, scratch.pool.stats().allocations) == (values.nbytes, 0)
    assert torch.equal(shard.read(), values), "and where it is wanted on the CPU, as before"
    back = torch.zeros(5000)
    shard.finish(shard.begin_read(gpu(back)))
    assert torch.equal(back, values)
    scratch.close()

    storage = Nvme(folder, aio=aio)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: gpu(torch.zeros(size, dtype=dtype)))
    for private in (True, False):
        mine = values.clone()
        held = storage.put(gpu(mine), 0, private)
        if not private:
            mine.zero_()  # the user's own, who may change it
        while not held.written():  # type: ignore[attr-defined]
            time.sleep(0.001)
        held.fetch()
        assert torch.equal(held.get(), values)
        del held
    stats = storage._handle.stats()
    assert (stats.gpu_bytes, storage.pool.stats().allocations) == (4 * values.nbytes, 0)
    storage.close()
    del scratch, nvme_file, shard, storage


def test_the_library_that_torch_brings_is_refused_at_once_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(notices, "_said", set())
    with caplog.at_level(logging.WARNING, "zoo.io"), Handle(use_gds=True) as handle:
        assert not handle.gds
    assert "GPUDirect Storage is not to be had: " in caplog.text
