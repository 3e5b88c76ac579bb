"""A plugin of pytest that changes only the harness of DeepSpeed's unit tests.

Ranks fork from a process that has imported what they need; a rank that fails, dies or hangs fails its own test (theirs
ends the run); only the ids of ZOO_DSTESTS_IDS run; results go to ZOO_DSTESTS_RESULTS, a line of JSON each.
"""

import contextlib
import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
from scripts.dstests import preload

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
IDS = set(Path(os.environ["ZOO_DSTESTS_IDS"]).read_text().split("\n"))
RESULTS = os.environ["ZOO_DSTESTS_RESULTS"]
rows: dict[str, dict] = {}


def launch(self, ranks, init_method):
    """Instead of DistributedExec._launch_daemonic_procs: run each rank's part in a process, end all when one fails."""
    import unit.common

    pool = unit.common.mp.Pool(processes=ranks)
    port, begun, failed_at, good = unit.common.get_master_port(), time.time(), None, False
    workers = list(pool._pool)
    jobs = [pool.apply_async(preload.run_rank, (self, rank, ranks, port, init_method)) for rank in range(ranks)]
    try:
        while not all(job.ready() for job in jobs):
            if failed_at is None and any(job.ready() and not job.successful() for job in jobs):
                failed_at = time.time()
            if failed_at and time.time() - failed_at > 4:
                break
            dead = [worker.exitcode for worker in workers if worker.exitcode is not None]
            if dead and failed_at is None:
                pytest.fail(f"a rank has died: {dead}", pytrace=False)
            if time.time() - begun > self.exec_timeout:
                pytest.fail("TIMEOUT: a rank hangs", pytrace=False)
            time.sleep(0.02)
        for job in jobs:
            if job.ready() and not job.successful():
                job.get()
        skips = [said for said in (job.get() for job in jobs) if said]
        good = True
    finally:
        if good:
            ends = [pool.apply_async(self._dist_destroy) for _ in range(ranks)]
            until = time.time() + 10
            while time.time() < until and not all(end.ready() for end in ends):
                time.sleep(0.02)
        pool.terminate()
        pool.join()
    if skips:
        pytest.skip(skips[0])


def pytest_configure(config):
    with contextlib.suppress(ImportError):  # a file whose harness cannot be imported is "lost", with the message
        import unit.common

        unit.common.DistributedExec._launch_daemonic_procs = launch
    pytest.exit = lambda reason="", returncode=None: pytest.fail(f"TIMEOUT: {reason}", pytrace=False)


def pytest_collection_modifyitems(session, config, items):
    others = [item for item in items if item.nodeid not in IDS]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid in IDS]


def pytest_collection_finish(session):
    """Start the process that ranks fork from before the clock of the first test runs."""
    if session.items:
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("forkserver")
        for module in (multiprocessing, context):
            module.set_forkserver_preload(["scripts.dstests.preload"])
        first = context.Process(target=preload.pid)
        first.start()
        first.join()


def pytest_runtest_logreport(report):
    row = rows.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed"})
    if report.failed:
        row["outcome"] = "failed"
        row["message"] = COLOURS.sub("", report.longreprtext)[-7000:]
    elif report.skipped and row["outcome"] == "passed":
        row["outcome"] = "skipped"
        row["message"] = str(report.longrepr)[-500:]
    if report.when == "teardown":
        with open(RESULTS, "a") as out:
            out.write(json.dumps(rows.pop(report.nodeid)) + "\n")
