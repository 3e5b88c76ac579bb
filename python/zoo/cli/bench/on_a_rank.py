"""One rank of a measurement: ``python -m zoo.cli.bench.on_a_rank SETTINGS FILE``, with torchrun's variables."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from zoo.cli.bench.collectives import Measured, Settings, measure
from zoo.cli.failure import one_sentence


def takes_gpu(settings: Settings) -> bool:
    """Whether the measurement is of GPUs.

    Raises:
        ValueError: it is to be, and there is none.
    """
    import torch

    there = torch.cuda.is_available()
    if settings.device == "cuda" and not there:
        raise ValueError(
            "device = 'cuda', and torch sees no GPU here; give --device cpu. zoo doctor says why there is none."
        )
    return there and settings.device != "cpu"


def measure_as_rank(settings: Settings, say: Callable[[str, int], None] = lambda operation, size: None) -> Measured:
    """Join the job that a launcher started, and measure. An error of one rank is told to the others.

    Raises:
        ValueError: a device that is not here, or one rank alone.
        RankFailedError: on the other ranks, with the reason.
    """
    from zoo.comm import Communicator, RankFailedError, init_distributed

    init_distributed("nccl" if takes_gpu(settings) else "gloo")
    comm = Communicator()
    try:
        if settings.shared_memory and not comm.share_memory():
            raise ValueError("these ranks cannot share memory: they are on several machines, or on GPUs.")
        return measure(comm, settings, say=say)
    except Exception as error:
        if not isinstance(error, RankFailedError):
            with contextlib.suppress(Exception):  # the error at hand is the news
                comm.report_failure(error)
        raise


def main(settings: str, path: str) -> None:
    """Measure; rank 0 writes the result."""
    with one_sentence(shared=False):
        import torch.distributed as dist

        found = measure_as_rank(Settings.from_json(settings))
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(found.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
