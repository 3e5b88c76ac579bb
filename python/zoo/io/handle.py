"""Reading and writing tensors: the door to the engine."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from zoo.io import _native
from zoo.io.checks import whole_number
from zoo.io.config import AioConfig
from zoo.io.errors import TransferError
from zoo.io.files import DirectMode, File, FilePath, Target, open_target
from zoo.io.future import Future, LoopBell, Transfer
from zoo.io.gds import Registration, engine_of, use_of
from zoo.io.memory import mark_changed, memory_of
from zoo.io.mock import Mock
from zoo.io.notices import once
from zoo.io.pool import BufferPool

_logger = logging.getLogger("zoo.io")
Backend = Literal["auto", "uring", "threads"]


class HandleStats(NamedTuple):
    """Counts since a handle was made."""

    operations: int
    """Submitted."""
    in_flight: int
    """Not over."""
    transfers: int
    """System calls' worth of work."""
    fixed_transfers: int
    """Of those, with memory registered in the ring."""
    retries: int
    """Of those, the rest of a short or an interrupted one."""
    direct_bytes: int
    """Between the device and the tensor, past the page cache."""
    bounced_bytes: int
    """Past the page cache by way of an aligned buffer, because of the tensor's address or a ragged end."""
    buffered_bytes: int
    """Through the page cache."""
    gpu_bytes: int
    """Between the device and a tensor of a GPU."""


DEFAULT_BOUNCE_BYTES = 16 << 20


class Handle:
    """Reads and writes tensors of any dtype without converting or copying them, on threads that hold no Python lock.

    A transfer is cut into blocks that ``num_threads`` threads keep ``queue_depth`` deep in flight. Blocks go past the
    page cache (``O_DIRECT``) straight between device and tensor where address and offset allow it; other addresses are
    copied through a small aligned buffer while the device works. Operations on overlapping bytes run in no particular
    order: wait for one before the next.

    A tensor's memory is kept alive until its operation is over, whatever becomes of the tensor (``.data =``, ``set_``).
    It must stay where it is (no ``resize_`` or ``share_memory_`` of the storage), must not be read while it is being
    read into, and not be changed while it is being written.

    Args:
        block_size: largest transfer in bytes, a multiple of 4096.
        queue_depth: transfers a thread keeps in flight, 1 to 4096.
        num_threads: threads that share the blocks of every tensor, 1 to 64 (DeepSpeed: ``intra_op_parallelism``).
        single_submit: hand every transfer to the kernel by itself.
        overlap_events: begin new transfers as others complete; otherwise one full queue after the other.
        backend: ``"uring"``, ``"threads"`` (blocking ``pread`` and ``pwrite``), ``"auto"`` (io_uring where the kernel
            allows it, else threads, which is logged once), or a `Mock`.
        direct: ``"auto"`` goes past the page cache where the file system allows it and logs once where not;
            ``"always"`` fails there; ``"never"`` goes through it.
        bounce_bytes: aligned buffers a thread has for other addresses, at least two blocks.
        pool: where `empty` takes its memory; by default a pool of its own, made at the first call.
        sqpoll_idle_ms: a kernel thread looks for submissions and sleeps after this many idle milliseconds.
        iopoll: completions are polled for; needs a device with polled queues.
        use_gds: take tensors of GPUs too, by GPUDirect Storage, where cuFile is found at run time (``gds`` says
            whether); where not, that is logged once and they are refused as without it.

    Raises:
        ValueError: a setting out of range.
        UnavailableError: ``backend="uring"`` where the kernel refuses it.
    """

    def __init__(
        self,
        *,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        num_threads: int = 1,
        single_submit: bool = False,
        overlap_events: bool = True,
        backend: Backend | Mock = "auto",
        direct: DirectMode = "auto",
        bounce_bytes: int = DEFAULT_BOUNCE_BYTES,
        pool: BufferPool | None = None,
        sqpoll_idle_ms: int | None = None,
        iopoll: bool = False,
        use_gds: bool = False,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("num_threads", num_threads),
            ("bounce_bytes", bounce_bytes),
            ("sqpoll_idle_ms", sqpoll_idle_ms or 0),
        ):
            whole_number(name, value, 0, (1 << 32) - 1)
        if direct not in ("auto", "always", "never"):
            raise ValueError(f'direct = {direct!r}; allowed are "auto", "always" and "never"')
        settings: dict[str, Any] = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "num_threads": num_threads,
            "single_submit": single_submit,
            "overlap_events": overlap_events,
            "bounce_bytes": bounce_bytes,
        }
        self._engine = _native.Engine(
            backend="mock" if isinstance(backend, Mock) else backend,
            mock=backend.native() if isinstance(backend, Mock) else None,
            sqpoll_idle_ms=sqpoll_idle_ms,
            iopoll=iopoll,
            **settings,
        )
        self._gpus = engine_of(**settings) if use_gds else None
        self._engines = (self._engine,) if self._gpus is None else (self._engine, self._gpus)
        _tell(self._engine)
        self.config = AioConfig(
            block_size=block_size,
            queue_depth=queue_depth,
            intra_op_parallelism=num_threads,
            single_submit=single_submit,
            overlap_events=overlap_events,
            use_gds=use_gds,
        )
        self._told: list[Any] = []  # by an engine while another one was still busy: ended, failures, more failures
        self._direct: DirectMode = direct
        self._refusing = False
        self._pool = pool
        self._bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_native.Engine, LoopBell]]
        self._bells = weakref.WeakKeyDictionary()
        # Runs when the handle dies and at the end of the process: what was submitted is finished either way.
        self._finalizer = weakref.finalize(self, _finish, self._engines)

    @classmethod
    def from_config(
        cls,
        config: AioConfig,
        *,
        backend: Backend | Mock = "auto",
        direct: DirectMode = "auto",
        bounce_bytes: int = DEFAULT_BOUNCE_BYTES,
        pool: BufferPool | None = None,
    ) -> Handle:
        """A handle with the settings of a configuration's ``aio`` section."""
        return cls(
            block_size=config.block_size,
            queue_depth=config.queue_depth,
            num_threads=config.intra_op_parallelism,
            single_submit=config.single_submit,
            overlap_events=config.overlap_events,
            use_gds=config.use_gds,
            backend=backend,
            direct=direct,
            bounce_bytes=bounce_bytes,
            pool=pool,
        )

    @property
    def backend(self) -> str:
        """``uring``, ``threads`` or ``mock``."""
        return self._engine.backend

    @property
    def most_bounce_bytes(self) -> int:
        """The most host memory that the aligned buffers of all threads ever take; none before one is needed."""
        return self._engine.most_bounce_bytes

    @property
    def gds(self) -> bool:
        """Whether tensors of GPUs are taken."""
        return self._gpus is not None

    def register(self, tensor: torch.Tensor) -> Registration:
        """Let cuFile know the memory of a tensor of a GPU that will be used again and again; close what is returned.

        Raises:
            ValueError: no GPU's tensor, or not one of CUDA, or a handle without GPUDirect Storage.
            UnavailableError: cuFile refuses.
        """
        address, num_bytes = memory_of(tensor, verb="register", gpus=self.gds)
        if self._gpus is None or tensor.device.type == "cpu":
            raise ValueError(
                f"cannot register a tensor on {tensor.device} with gds={self.gds}; allowed are tensors of a GPU, in a "
                "handle made with use_gds=True where cuFile is found"
            )
        gpu, _ = use_of(tensor)
        return Registration(self._gpus.register(address, num_bytes, tensor.untyped_storage(), (gpu[0], 0)))

    @property
    def pool(self) -> BufferPool:
        """Where `empty` takes its memory."""
        if self._pool is None:
            self._pool = BufferPool()
        return self._pool

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in the pool's aligned (with CUDA, page-locked) memory: it always travels in place."""
        return self.pool.empty(shape, dtype=dtype)

    def open(self, path: FilePath, mode: Literal["r", "w"] = "r") -> File:
        """Open a file for many operations; use the result in the place of a path, and close it."""
        self._check_open()
        return File(path, mode, direct=self._direct, engine=self._engine)

    # Positional operations.

    def async_pwrite(
        self, tensor: torch.Tensor, target: Target, offset: int = 0, *, checksum: bool = False, fsync: bool = False,
        urgent: bool = False,
    ) -> Future:  # fmt: skip
        """Begin writing the tensor's bytes at ``offset`` of a file; other bytes of it stay.

        The space is allocated here, so that a full disk is known before anything is written.

        Args:
            tensor: contiguous, on the CPU; not to be changed until the future is done.
            target: a path (created when missing), a `File` or a `Striped`.
            offset: first byte in the file.
            checksum: sum the bytes (CRC-32C) on the engine's threads.
            fsync: the future is done when the bytes are on the device, not only in its cache.
            urgent: before all operations of this handle that are not; ``queue_depth`` transfers may be under way.
        """
        return self._submit("w", tensor, target, offset, checksum, None, fsync, urgent=urgent)

    def async_pread(
        self, tensor: torch.Tensor, target: Target, offset: int = 0, *, checksum: bool | int = False,
        urgent: bool = False,
    ) -> Future:  # fmt: skip
        """Begin filling the tensor with the bytes at ``offset`` of a file.

        Args:
            tensor: contiguous, on the CPU; its content is arbitrary until the future is done, and after a failure.
            target: a path, a `File` or a `Striped`.
            offset: first byte in the file.
            checksum: sum the bytes; a number is the CRC-32C they must have, anything else is a `ChecksumError`.
            urgent: before all operations of this handle that are not; ``queue_depth`` transfers may be under way.

        Raises:
            UnexpectedEndError: the file ends before ``offset + tensor.nbytes``.
        """
        expected = None if isinstance(checksum, bool) else checksum
        return self._submit("r", tensor, target, offset, bool(checksum), expected, False, urgent=urgent)

    def pwrite(
        self, tensor: torch.Tensor, target: Target, offset: int = 0, *, checksum: bool = False, fsync: bool = False
    ) -> Transfer:
        """`async_pwrite`, and wait."""
        return self.async_pwrite(tensor, target, offset, checksum=checksum, fsync=fsync).wait()

    def pread(self, tensor: torch.Tensor, target: Target, offset: int = 0, *, checksum: bool | int = False) -> Transfer:
        """`async_pread`, and wait."""
        return self.async_pread(tensor, target, offset, checksum=checksum).wait()

    # Whole files.

    def async_write(
        self, tensor: torch.Tensor, target: Target, *, checksum: bool = False, fsync: bool = False
    ) -> Future:
        """Begin writing a file that holds the tensor's bytes and nothing else; a longer one is cut."""
        return self._submit("w", tensor, target, 0, checksum, None, fsync, whole=True)

    def async_read(self, tensor: torch.Tensor, target: Target, *, checksum: bool | int = False) -> Future:
        """Begin filling the tensor from a whole file.

        Raises:
            ValueError: the file has another size than the tensor.
        """
        expected = None if isinstance(checksum, bool) else checksum
        return self._submit("r", tensor, target, 0, bool(checksum), expected, False, whole=True)

    def write(self, tensor: torch.Tensor, target: Target, *, checksum: bool = False, fsync: bool = False) -> Transfer:
        """`async_write`, and wait."""
        return self.async_write(tensor, target, checksum=checksum, fsync=fsync).wait()

    def read(self, tensor: torch.Tensor, target: Target, *, checksum: bool | int = False) -> Transfer:
        """`async_read`, and wait."""
        return self.async_read(tensor, target, checksum=checksum).wait()

    def _submit(
        self,
        mode: Literal["r", "w"],
        tensor: torch.Tensor,
        target: Target,
        offset: int,
        checksum: bool,
        expected: int | None,
        durable: bool,
        *,
        whole: bool = False,
        urgent: bool = False,
    ) -> Future:
        address, num_bytes = memory_of(tensor, verb="write" if mode == "w" else "read into", gpus=self.gds)
        # Not the tensor: `tensor.data = other`, `set_` and `swap_tensors` give it other memory and let go of this.
        owner: object = tensor.untyped_storage() if num_bytes else None
        engine, gpu = self._engine, None
        if self._gpus is not None and tensor.device.type != "cpu":
            engine = self._gpus
            gpu, event = use_of(tensor)
            owner = owner, event
        whole_number("offset", offset, 0, (1 << 63) - 1)
        if expected is not None:
            whole_number("checksum", expected, 0, (1 << 32) - 1)
        self._check_open()
        try:
            files, stripe = open_target(target, mode, self._direct)
        except TransferError as error:
            error.offset, error.length = offset, num_bytes  # of the operation: opening a file has none
            raise
        ticket = engine.submit(
            files, stripe, mode == "w", offset, address, num_bytes, owner, checksum, expected, durable, urgent, whole,
            gpu,
        )  # fmt: skip
        if mode == "r":
            mark_changed(tensor)
        return Future(ticket, self, engine)

    def _check_open(self) -> None:
        if self._refusing:
            raise ValueError("the handle is closed; make a new one")

    # All operations.

    def wait(self, timeout: float | None = None) -> int:
        """Wait until no operation is in flight, at most ``timeout`` seconds; how many ended since the last time.

        Raises:
            TransferError: the first failure that no future has told; its ``others`` are the rest. An exception of
                another class where that came first: PoolExhaustedError, or RuntimeError where a thread died.
            TimeoutError: some are still in flight; wait again.
        """
        begun, left, in_flight = time.monotonic(), timeout, 0
        for engine in self._engines:
            *told, running = engine.wait(left)
            self._told.append(told)
            in_flight += running
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        _tell(self._engine)
        if in_flight:
            raise TimeoutError(f"{in_flight} operations are still in flight after {timeout} s; wait again, or longer")
        all_told, self._told = self._told, []
        finished, forgotten = (sum(int(told[which]) for told in all_told) for which in (0, 2))
        failures = [failure for told in all_told for failure in told[1]]
        if failures:
            first, *others = failures
            if forgotten:
                others.append(RuntimeError(f"and {forgotten} more failures, of which only the number was kept"))
            vars(first)["others"] = tuple(others)  # not every first one is a TransferError: memory may have run out
            raise first
        return finished

    def abort(self) -> None:
        """Take no more operations and give up those not begun: their futures raise `CancelledError`."""
        self._refusing = True
        for engine in self._engines:
            engine.abort()

    def close(self) -> None:
        """Finish every operation and end the threads; then raise the first failure that no future has told.

        Ctrl-C ends it: nothing is taken any more, what was submitted goes on, and `close` may be called again.
        """
        if self._finalizer.alive:
            self._refusing = True
            for engine in self._engines:
                engine.close()
            self._finalizer.detach()
            self.wait()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            # What is being raised matters more than what a forgotten future would have said.
            try:
                self.close()
            except Exception as error:
                _logger.error("while another exception was raised: %s", error)

    def bell(self, engine: _native.Engine) -> LoopBell:
        """What tells the running event loop of an engine's ends."""
        bells = self._bells.setdefault(asyncio.get_running_loop(), {})
        if engine not in bells:
            bells[engine] = LoopBell(engine, asyncio.get_running_loop())
        return bells[engine]

    def stats(self) -> HandleStats:
        """Counts since the handle was made."""
        each = [engine.stats() for engine in self._engines]
        return HandleStats(**{name: sum(stats[name] for stats in each) for name in each[0]})

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.stats().in_flight} in flight"
        return f"Handle({self.backend}, {state})"


def _tell(engine: _native.Engine) -> None:
    for notice in engine.notices():
        once(notice)


def _finish(engines: Sequence[_native.Engine]) -> None:
    """Somebody let go of a handle without closing it: finish what it had, and say what nobody asked about."""
    in_flight = sum(engine.stats()["in_flight"] for engine in engines)
    if in_flight:
        warnings.warn(
            f"a zoo.io.Handle was dropped with {in_flight} operations in flight; they are finished now. "
            "Close it, or use it in a with statement.",
            ResourceWarning,
            stacklevel=2,
        )
    for engine in engines:
        engine.finish()
        try:
            _, failures, _, _ = engine.wait(0)
        except RuntimeError:  # a forked child: the operations are the parent's
            return
        for failure in failures:
            _logger.error("an operation nobody waited for failed: %s", failure)
