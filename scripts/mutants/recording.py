"""Which tests execute which line, and how long each takes: from one run under coverage."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import coverage
from scripts.mutants.drawing import files_of


@dataclass(frozen=True)
class Record:
    """``lines[file][line]``: the tests, by their names, that execute it. ``seconds``: of each test."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def tests_of(self, file: str, line: int, seconds: float) -> list[str]:
        """The tests that execute a line and take ``seconds`` together, or all of them.

        The fastest case of every test comes first, then the second of each, and so on: a hundred quick cases of one
        test tell less than one case of another. A line that runs at import belongs to every test of its file.
        """
        lines = self.lines.get(file, {})
        found = lines.get(line) or sorted({test for tests in lines.values() for test in tests} if line in lines else ())
        turns: dict[str, int] = defaultdict(int)
        ordered: list[tuple[int, float, str]] = []
        for took, test in sorted((self.seconds.get(test, 0.0), test) for test in found):
            function = test.partition("[")[0]
            ordered.append((turns[function], took, test))
            turns[function] += 1
        chosen, spent = [], 0.0
        for _, took, test in sorted(ordered):
            if not chosen or spent + took <= seconds:
                chosen.append(test)
                spent += took
        return chosen


def record(root: Path, home: Path, packages: list[str], tests: list[str]) -> Record:
    """The record of these sources and tests: the one that is kept, or one that is made now."""
    sources = [p for top in ("python", "tests") for p in sorted((root / top).rglob("*.py"))]
    digest = hashlib.sha256("\0".join(p.read_text(encoding="utf-8") for p in sources).encode())
    digest.update(repr((sorted(packages), tests)).encode())
    data, times = home / f"coverage-{digest.hexdigest()[:12]}", home / f"seconds-{digest.hexdigest()[:12]}.json"
    if not times.exists():
        print("zoo: mutants: running the tests once under coverage", flush=True)
        folders = sorted({file.parent.relative_to(root) for name in packages for file in files_of(root, name)})
        command = [
            sys.executable, "-m", "pytest", "-q", "-n", "auto",
            "-m", "not slow and not campaign",
            # Folders: of a module's name coverage would import the package, and torch with it, and forget both again;
            # torch cannot be imported a second time.
            *(f"--cov={folder}" for folder in folders), "--cov-context=test", "--cov-report=", *tests,
        ]  # fmt: skip
        environment = {**os.environ, "COVERAGE_FILE": str(data), "ZOO_TEST_SECONDS": str(times)}
        environment.pop("ZOO_TEST_PRELOAD", None)
        if subprocess.run(command, cwd=root, env=environment, check=False).returncode:
            times.unlink(missing_ok=True)
            raise SystemExit("zoo: mutants: some test fails without any change; fix that first.")
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    measured = coverage.CoverageData(basename=str(data))
    measured.read()
    for file in measured.measured_files():
        name = str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else file
        for line, contexts in measured.contexts_by_lineno(file).items():
            lines[name][line] = sorted({c.partition("|")[0] for c in contexts if c})
    return Record(dict(lines), json.loads(times.read_text(encoding="utf-8")))
