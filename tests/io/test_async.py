"""Futures that are awaited, and threads that are not stopped."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from zoo.io import Fault, Handle, Mock, TransferError


def test_many_transfers_can_be_awaited_together(folder: Path) -> None:
    async def main() -> None:
        with Handle(block_size=4096, queue_depth=4) as handle:
            tensors = [torch.full((5000,), float(k)) for k in range(30)]
            await asyncio.gather(*(handle.async_pwrite(t, folder / "f", 20_480 * k) for k, t in enumerate(tensors)))
            backs = [torch.empty(5000) for _ in tensors]
            done = await asyncio.gather(*(handle.async_pread(t, folder / "f", 20_480 * k) for k, t in enumerate(backs)))
            assert {d.num_bytes for d in done} == {20_000}
            assert all(torch.equal(a, b) for a, b in zip(tensors, backs, strict=True))

    asyncio.run(main())


def test_the_loop_goes_on_while_a_transfer_is_slow_and_errors_are_raised(folder: Path) -> None:
    async def main() -> None:
        mock = Mock(faults=(Fault(offset=0, length=1, delay_s=0.3, times=1), Fault(offset=1 << 20, error="EIO")))
        with Handle(backend=mock) as handle:
            future = handle.async_pwrite(torch.zeros(1000), folder / "f")
            ticks = 0
            while not future.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 5
            assert (await future).num_bytes == 4000
            with pytest.raises(TransferError, match="Input/output error"):
                await handle.async_pwrite(torch.zeros(1000), folder / "f", 1 << 20)

    asyncio.run(main())


def test_one_handle_serves_loops_in_several_threads(folder: Path) -> None:
    with Handle(backend=Mock(seed=3, faults=(Fault(delay_s=0.01, times=40),)), queue_depth=2) as handle:
        results: list[int] = []

        async def main(number: int) -> None:
            for k in range(10):
                done = await handle.async_pwrite(torch.zeros(100), folder / f"f{number}", 400 * k)
                results.append(done.num_bytes)

        threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [400] * 40


def test_python_runs_while_a_thread_waits(folder: Path) -> None:
    """The wait lasts as long as the device is slow; another thread must get its work done meanwhile."""
    with Handle(backend=Mock(faults=(Fault(delay_s=1.0, times=1),))) as handle:
        future = handle.async_pwrite(torch.zeros(10), folder / "f")
        order: list[str] = []

        def work() -> None:
            total = 0
            for k in range(100_000):
                total += k
            order.append("worked")

        thread = threading.Thread(target=work)
        thread.start()
        future.wait()
        order.append("waited")
        thread.join()
        assert order == ["worked", "waited"]
