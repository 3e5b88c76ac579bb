"""Hosts that are network namespaces of Linux on one bridge, each with an address and a cable that can be cut.

    python -m scripts.real.netns up NAME COUNT      namespaces NAME-0, NAME-1, …, at 10.213.0.1, 10.213.0.2, …
    python -m scripts.real.netns cut NAME NUMBER    nothing goes to or from it any more, and nobody is told
    python -m scripts.real.netns mend NAME NUMBER
    python -m scripts.real.netns down NAME

Needs root and the package iproute2. `ip netns exec NAME-0 COMMAND` starts something on the first host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

DEVICE = "eth0"


def address(number: int) -> str:
    """Of a host, within its bridge."""
    return f"10.213.0.{number + 1}"


def inside(name: str, number: int) -> list[str]:
    """What comes before a command that is to run there."""
    return ["ip", "netns", "exec", f"{name}-{number}"]


def missing() -> str | None:
    """Why there can be no namespaces here; None: there can."""
    if shutil.which("ip") is None:
        return "ip is not installed (Debian's package iproute2)"
    name = f"zoo-tried-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "name", "bridge", "type", "bridge")
            _ip("-n", name, "link", "add", "name", "port0", "type", "veth", "peer", "name", DEVICE)
        finally:
            _ip("netns", "del", name)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def up(name: str, count: int) -> None:
    """Make them.

    Raises:
        RuntimeError: what ip said.
    """
    hub = f"{name}-hub"
    _ip("netns", "add", hub)
    _ip("-n", hub, "link", "add", "name", "bridge", "type", "bridge")
    _ip("-n", hub, "link", "set", "bridge", "up")
    for number in range(count):
        host = f"{name}-{number}"
        _ip("netns", "add", host)
        _ip("-n", hub, "link", "add", "name", f"port{number}", "type", "veth", "peer", "name", DEVICE, "netns", host)
        _ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
        _ip("-n", host, "addr", "add", f"{address(number)}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _ip("-n", host, "link", "set", device, "up")


def cut(name: str, number: int) -> None:
    """Take a host's cable out, at the other end."""
    _ip("-n", f"{name}-hub", "link", "set", f"port{number}", "nomaster")


def mend(name: str, number: int) -> None:
    """Put it in again."""
    _ip("-n", f"{name}-hub", "link", "set", f"port{number}", "master", "bridge")


def down(name: str) -> None:
    """Remove them; processes in them have to have ended."""
    listed = _ip("netns", "list").split()
    for found in listed:
        if found.startswith(f"{name}-"):
            _ip("netns", "del", found)


@contextlib.contextmanager
def namespaces(name: str, count: int) -> Iterator[None]:
    """There are ``count`` of them as long as this lasts."""
    try:
        up(name, count)
        yield
    finally:
        down(name)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def main() -> None:
    """See the file's docstring."""
    actions = {"up": up, "cut": cut, "mend": mend, "down": down}
    if len(sys.argv) < 3 or sys.argv[1] not in actions or len(sys.argv) != (3 if sys.argv[1] == "down" else 4):
        sys.exit(str(__doc__))
    try:
        actions[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))  # type: ignore[operator]
    except RuntimeError as error:
        sys.exit(f"zoo: {error}")


if __name__ == "__main__":
    main()
