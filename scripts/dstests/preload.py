"""Imported in the process that workers of tests fork from, so that each does not import it again."""

import contextlib
import importlib
import os

NAMES = (
    "torch", "numpy", "pytest", "deepspeed", "unit.common", "unit.simple_model", "torch._dynamo",
    "torch.distributed.tensor", "deepspeed.runtime.engine", "deepspeed.runtime.pipe.engine", "deepspeed.moe.layer",
)  # fmt: skip
for _name in NAMES:
    with contextlib.suppress(ImportError):  # a test that wants it fails by itself
        importlib.import_module(_name)


def run_rank(test, *args):
    """What a worker does. pytest's own exceptions are BaseExceptions, which would end it and hang the test."""
    try:
        return test._dist_run(*args)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def pid() -> int:
    return os.getpid()
