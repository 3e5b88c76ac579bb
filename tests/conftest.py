"""What holds for all tests: one thread a worker, the number of examples, a fork server, long tests first."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

# xdist runs as many workers as there are cores, and tests start processes of their own.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from tests import bounded, cpu, matrices, processes, profiles

profiles.load()


@pytest.fixture(autouse=True)
def _no_group_of_another_test() -> Iterator[None]:
    """``deepspeed.initialize`` in one process joins a group of that process, which stays for the process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_configure(config: pytest.Config) -> None:
    if "ZOO_TEST_MINUTES" in os.environ or "ZOO_TEST_PAGE" in os.environ:
        config.pluginmanager.register(bounded)
        bounded.pytest_configure(config)  # a plug-in that comes this late is not asked
    if "ZOO_TEST_SECONDS" in os.environ:
        config.pluginmanager.register(cpu.Seconds())
    if os.environ.get("ZOO_TEST_CPU"):
        config.pluginmanager.register(cpu)
    config.add_cleanup(processes.make_folder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two thirds of the cases of each matrix are slow tests, and dear tests whose turn it is not. Long tests first: one
    that starts last leaves the other workers idle. The order stays as it is otherwise."""
    left = matrices.not_drawn(items, matrices.files()) if matrices.is_whole(config.args) else []
    for item in [*matrices.rest(items), *left]:
        item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.set_threshold(10_000, 10, 10)  # tests make many objects, and few cycles
    _keep_what_is_imported()


def pytest_runtest_logfinish() -> None:
    if len(sys.modules) > _imported + 200:  # torch._dynamo, transformers
        _keep_what_is_imported()


_imported = 0


def _keep_what_is_imported() -> None:
    """What is imported now stays: the collector of cycles, which some tests call, needs not look at it again."""
    global _imported
    gc.collect()
    gc.freeze()
    _imported = len(sys.modules)
