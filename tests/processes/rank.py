"""One rank of :func:`tests.processes.run_ranks`: ``rank.py FOLDER RANK``."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Join the process group, call the function, write what it returned or how it failed."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job: dict[str, Any] = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job["group_timeout_s"])
    init = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=job["world"], timeout=timeout)
    for path in job["path"]:
        if path not in sys.path:
            sys.path.append(path)
    # Under a name of its own: what a test file does at import belongs to the process that tests.
    spec = importlib.util.spec_from_file_location(job["module"], job["file"])
    if spec is None or spec.loader is None:
        raise AssertionError(f"{job['file']} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[job["module"]] = module
    spec.loader.exec_module(module)
    try:
        found: tuple[bool, Any] = (True, getattr(module, job["name"])(rank, *job["args"]))
    except Exception:
        found = (False, traceback.format_exc())
    part = folder / f".{rank}"
    part.write_bytes(pickle.dumps(found))
    part.rename(folder / f"rank{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without destroying the group: peers may be gone


if __name__ == "__main__":
    main()
