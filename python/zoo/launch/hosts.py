"""Which hosts and slots a job gets: the file of hosts, filters, numbers. A slot is the place of one process.

An allotment is a mapping, host → numbers of its slots, in the order in which ranks are given out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Slots = Mapping[str, Sequence[int]]
"""Host → numbers of its slots."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?")
_BRACKETS = re.compile(r"\[([^]]+)\](?:(:)(.*))?")
_MOST = 4096
"""Slots of a host; more are a slip of the pen."""
_FORM = 'a line is "host slots=n", as worker-0 slots=4'


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Host → number of slots, in the order of the file.

    Raises:
        ValueError: see :func:`parse_hostfile`; or there is no such file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ValueError(f"there is no file of hosts {str(path)!r}; give the path of one, in which {_FORM}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the file of hosts {str(path)!r} is no text in UTF-8 ({error}); {_FORM}.") from None
    return parse_hostfile(lines, f"the file of hosts {str(path)!r}")


def parse_hostfile(lines: Iterable[str], named: str = "a file of hosts") -> dict[str, int]:
    """Host → number of slots. Empty lines and those that begin with # say nothing.

    Args:
        named: what errors call the file.

    Raises:
        ValueError: a line that is not "host slots=n", a host that comes twice or has no slots, or no host at all.
    """
    found: dict[str, int] = {}
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{named} has the line {line!r}; {_FORM}.")
        host, digits = match[1], match[2].lstrip("0") or "0"
        slots = int(digits[:6])
        if host in found:
            raise ValueError(f"{named} has {host!r} twice; write its slots in one line.")
        if slots == 0:
            raise ValueError(f"{named} gives {host!r} no slots; write at least slots=1, or leave the host out.")
        if slots > _MOST:
            raise ValueError(f"{named} gives {host!r} {digits[:12]} slots; {_MOST} are the most that a host may have.")
        found[host] = slots
    if not found:
        raise ValueError(f"{named} has no hosts; {_FORM}.")
    return found


def is_number(text: str) -> bool:
    """Whether it is a number as launchers count in (slots, cores, nodes, ports): ASCII digits, nine at most."""
    return text.isascii() and text.isdigit() and len(text) < 10


def all_slots(hosts: Mapping[str, int]) -> dict[str, list[int]]:
    """Host → 0, 1, …, of a file of hosts."""
    return {host: list(range(slots)) for host, slots in hosts.items()}


def parse_filter(text: str) -> dict[str, list[int]]:
    """What a filter names: ``"a:0@b@a:2"`` → ``{"a": [0, 2], "b": []}``; no slots mean all of the host.

    Raises:
        ValueError: it is written otherwise.
    """
    return _joined(map(parse_host, text.split("@")))


def _joined(named: Iterable[tuple[str, list[int]]]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    whole = set()
    for host, slots in named:
        found.setdefault(host, set()).update(slots)
        whole |= set() if slots else {host}
    return {host: [] if host in whole else sorted(slots) for host, slots in found.items()}


def parse_host(text: str) -> tuple[str, list[int]]:
    """``"host:0,2"`` → ``("host", [0, 2])``; ``"host"`` → ``("host", [])``, which means all of its slots. Slots of an
    IPv6 address come after brackets: ``"[fe80::1]:0,2"``.

    Raises:
        ValueError: it is written otherwise.
    """
    if bracketed := _BRACKETS.fullmatch(text):
        host, colon, slots = bracketed[1], bracketed[2] or "", bracketed[3] or ""
    elif _is_address(text):
        return text, []
    else:
        host, colon, slots = text.partition(":")
    numbers = slots.split(",") if colon else []
    if not host or not all(map(is_number, numbers)):
        raise ValueError(f"{text!r} does not name a host and its slots; write host, or host:0,2.")
    return host, [int(number) for number in numbers]


def _is_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def select(hosts: Slots, include: str = "", exclude: str = "") -> Slots:
    """The slots that one of the filters leaves, in the order of ``hosts``; hosts without slots are left out.

    Args:
        include: only these, as ``"host:slot,slot@host"``.
        exclude: all but these, written alike.

    Raises:
        ValueError: both filters, or a host or slot that is not there.
    """
    if include and exclude:
        raise ValueError(
            f"include {include!r} and exclude {exclude!r} are both given; say what to use, or what not to use."
        )
    if not include and not exclude:
        return hosts
    named = _named(include or exclude, hosts)
    for host, slots in named.items():
        for slot in slots:
            if slot not in hosts[host]:
                raise ValueError(f"host {host!r} has no slot {slot}; it has {list(hosts[host])}.")
    left: dict[str, list[int]] = {}
    for host, there in hosts.items():
        chosen = (named[host] or list(there)) if host in named else []
        slots = chosen if include else [slot for slot in there if slot not in chosen]
        if slots:
            left[host] = list(slots)
    return left


def _named(text: str, hosts: Slots) -> dict[str, list[int]]:
    """What a filter names of a file with ``me@a``: that host is ``me@a`` here too, or ``a``."""
    found: list[tuple[str, list[int]]] = []
    parts = text.split("@")
    while parts:
        one = parts.pop(0)
        host, slots = parse_host(parts[0]) if parts else ("", [])
        if f"{one}@{host}" in hosts:
            parts.pop(0)
            found.append((f"{one}@{host}", slots))
        else:
            host, slots = parse_host(one)
            found.append((_of_file(host, hosts), slots))
    return _joined(found)


def _of_file(host: str, hosts: Slots) -> str:
    """A host as the file has it.

    Raises:
        ValueError: it is not there, or may be several.
    """
    there = [host] if host in hosts else [one for one in hosts if one.partition("@")[2] == host]
    if not there:
        raise ValueError(f"host {host!r} is not in the file of hosts, which has {', '.join(hosts) or 'none'}.")
    if there[1:]:
        raise ValueError(f"{host!r} may be {' or '.join(there)}; write which.")
    return there[0]


def first(hosts: Slots, num_nodes: int | None = None, num_gpus: int | None = None) -> dict[str, list[int]]:
    """The first ``num_nodes`` hosts, and the first ``num_gpus`` slots of each; None: all.

    Raises:
        ValueError: there are not so many, or a number below 1.
    """
    for name, number in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; give 1 or more, or leave it out for all.")
    if num_nodes is not None and num_nodes > len(hosts):
        raise ValueError(f"--num_nodes is {num_nodes}, and there are {len(hosts)} hosts: {', '.join(hosts)}.")
    chosen = {host: list(hosts[host]) for host in list(hosts)[:num_nodes]}
    if num_gpus is None:
        return chosen
    for host, slots in chosen.items():
        if len(slots) < num_gpus:
            raise ValueError(f"--num_gpus is {num_gpus}, and host {host!r} has {len(slots)} slots: {slots}.")
    return {host: slots[:num_gpus] for host, slots in chosen.items()}
