"""Starts the ranks of a benchmark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import ROOT


def start(
    module: str, arguments: Sequence[str], prefixes: Sequence[Sequence[str]], address: str = "127.0.0.1",
    device: str = "lo", timeout_s: float = 3600.0,
) -> Any:  # fmt: skip
    """Runs ``module`` once for each of the prefixes, all at once; the JSON that rank 0 prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank, prefix in enumerate(prefixes):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(prefixes)), "MASTER_ADDR": address,
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": device,
        }  # fmt: skip
        command = [*prefix, sys.executable, "-m", module, *arguments]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    return json.loads(said[0])
