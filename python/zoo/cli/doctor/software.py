"""Versions and packages, from what is installed: nothing of them is imported."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

from zoo.cli.doctor.report import Finding, State

OWN = {"zoo-core": ".", "zoo-kernels": "./cuda", "zoo-moe": "./moe", "zoo-compression": "./compression"}
"""zoo's distributions, and where each is in a clone."""
NEEDED = ("zoo-core", "zoo-kernels")
OLDEST, NEWEST = (3, 10), (3, 13)
"""The versions of Python that zoo is tested with."""

Asker = Callable[[str], str]
"""The version of a distribution; PackageNotFoundError where it is not installed."""
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;\s*(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
_PYTHON = re.compile(r"""python(?:_full)?_version\s*>=\s*['"]([\d.]+)['"]""")


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 15, 0)`` of "2.15.0+cpu": up to the first part that is no number."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        found.append(int(digits[0]))
        if digits[0] != part:
            break
    return tuple(found)


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version is within ``">=2.7,<3"``; of the operators of packaging those that zoo's manifests use."""
    here = numbers(version)
    for condition in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>|~=)\s*([\w.*+!]+)", condition)
        if match is None:
            continue
        operator, asked = match[1], match[2]
        wanted = numbers(asked.removesuffix(".*"))
        size = len(wanted) if asked.endswith(".*") else max(len(here), len(wanted))
        a, b = _padded(here, size), _padded(wanted, size)
        held = {
            ">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b,
            "~=": a >= b and here[: len(wanted) - 1] == wanted[:-1],
        }[operator]  # fmt: skip
        if not held:
            return False
    return True


def _padded(version: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (version + (0,) * size)[:size]


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """The interpreter."""
    value = f"{'.'.join(map(str, version))}, {sys.executable}, {platform.platform()}"
    wanted = "apt-get install python3.12-venv && python3.12 -m venv .venv  # and install zoo there"
    state = State.BROKEN if version[:2] < OLDEST else State.LIMITED if version[:2] > NEWEST else State.OK
    value += "" if state is State.OK else f"; zoo is tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}"
    return Finding(
        section="versions", name="Python", value=value, state=state, remedy="" if state is State.OK else wanted
    )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def distributions(ask: Asker = metadata.version) -> Iterator[Finding]:
    """zoo's own: the two of the core, and the plug-ins."""
    for name, folder in OWN.items():
        try:
            yield Finding(section="versions", name=name, value=ask(name))
        except metadata.PackageNotFoundError:
            needed = name in NEEDED
            from_sources = needed and _sources_are_on_the_path(name)
            yield Finding(
                section="versions",
                name=name,
                value="not installed as a distribution; its sources are on the path"
                if from_sources
                else "not installed",
                state=State.LIMITED if from_sources else State.BROKEN if needed else State.ABSENT,
                remedy=f"pip install {folder}  # in a clone of zoo",
            )


def _sources_are_on_the_path(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec("zoo.cli" if name == "zoo-core" else "zoo.kernels") is not None


def parsed(requirement: str) -> tuple[str, str, str, bool]:
    """(name, specifier, extra or "", whether it is for this Python) of a line of a distribution's metadata."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return requirement, "", "", False
    marker = match[3] or ""
    extra, oldest = _EXTRA.search(marker), _PYTHON.search(marker)
    wanted = oldest is None or tuple(sys.version_info[:2]) >= numbers(oldest[1])[:2]
    return match[1], match[2].strip(), extra[1] if extra else "", wanted


def dependencies(
    ask: Asker = metadata.version, requires: Callable[[str], list[str] | None] = metadata.requires
) -> Iterator[Finding]:
    """What zoo's installed distributions ask for: each thing that is needed, and each extra in one line."""
    extras: dict[tuple[str, str], list[tuple[str, str]]] = {}
    seen: set[str] = set()
    for own in OWN:
        try:
            lines = requires(own) or []
        except metadata.PackageNotFoundError:
            continue
        for name, specifier, extra, wanted in map(parsed, lines):
            if extra and wanted:
                extras.setdefault((own, extra), []).append((name, specifier))
            elif wanted and name not in OWN and name not in seen:
                seen.add(name)
                yield _needed(name, specifier, ask)
    for (own, extra), members in extras.items():
        yield _optional(own, extra, members, ask)


def _needed(name: str, specifier: str, ask: Asker) -> Finding:
    found = _version(name, ask)
    fits = found is not None and satisfies(found, specifier)
    value = "not installed" if found is None else found if fits else f"{found}, and zoo needs {specifier}"
    return Finding(
        section="versions" if name == "torch" else "packages",
        name=name,
        value=value,
        state=State.OK if fits else State.BROKEN,
        remedy="" if fits else f"pip install '{name}{specifier}'",
    )


def _optional(own: str, extra: str, members: Sequence[tuple[str, str]], ask: Asker) -> Finding:
    there, lacks = [], []
    for name, specifier in members:
        found = _version(name, ask)
        if found is not None and satisfies(found, specifier):
            there.append(f"{name} {found}")
        else:
            lacks.append((f"{name}{specifier}", name if found is None else f"{name} {found} (needs {specifier})"))
    value = "; ".join(filter(None, (
        ", ".join(there), f"absent: {', '.join(told for _, told in lacks)}" if lacks else "",
    )))  # fmt: skip
    command = "pip install " + " ".join(f"'{asked}'" for asked, _ in lacks)
    return Finding(
        section="packages", name=f"{own}[{extra}]", value=value, state=State.ABSENT if lacks else State.OK,
        remedy=command if lacks else "",
    )  # fmt: skip


def _version(name: str, ask: Asker) -> str | None:
    try:
        return ask(name)
    except metadata.PackageNotFoundError:
        return None


def plug_ins() -> Iterator[Finding]:
    """Components of installed packages that cannot be loaded."""
    from zoo import registry

    for problem in registry.problems():
        yield Finding(
            section="packages", name="a component", value=str(problem), state=State.LIMITED,
            remedy="zoo components  # lists what can be named",
        )  # fmt: skip


TOOLS = {
    "g++": ("compiles the native operations", "apt-get install g++"),
    "nvidia-smi": ("tells of NVIDIA's driver", ""),
    "fio": ("the yardstick of benchmarks/io", "apt-get install fio"),
}
"""Programs: what each is for, and the command that adds it on Debian."""


def tools(which: Callable[[str], str | None] = shutil.which) -> Iterator[Finding]:
    """Programs beside Python."""
    for name, (purpose, command) in TOOLS.items():
        found = which(name)
        if found is not None or command:
            yield Finding(
                section="packages", name=name, value=f"{found or 'not on the path'} ({purpose})",
                state=State.ABSENT if found is None else State.OK, remedy="" if found else command,
            )  # fmt: skip
