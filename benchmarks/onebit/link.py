"""Two network namespaces and a cable between them with a limited rate: what two machines are to each other.

Each end has processes of its own too (a pid namespace), or ZeRO would find that both ranks are on one host, and go
through memory that they share.

Linux, with the right to make namespaces (root, or a container that has it); ``ip`` and ``tc`` are in the package
iproute2, ``unshare`` in util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence


class LinkError(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise LinkError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


@contextlib.contextmanager
def cable(mbit: int) -> Iterator[list[Sequence[str]]]:
    """For each of two ranks the words that go before its command; rank r has the address 10.77.0.(r+1), device
    ``cable``.

    Each direction has ``mbit`` megabits a second by a token bucket of 5 ms, as a network card has.

    Raises:
        LinkError: they cannot be made.
    """
    if not all(map(shutil.which, ("ip", "tc", "unshare"))):
        raise LinkError("`ip`, `tc` or `unshare` is missing; they are in the packages iproute2 and util-linux")
    names = [f"zoo-{os.getpid()}-{rank}" for rank in range(2)]
    made = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        ends = ("cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        _run("ip", "link", "add", *ends)
        burst = max(mbit * 1000 // 8 * 5, 16_000)
        for rank, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", "tbf", *limit)
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        yield [("ip", "netns", "exec", name, *apart) for name in names]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
