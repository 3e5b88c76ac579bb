"""How many of DeepSpeed's own unit tests pass with zoo under the name deepspeed. The tests stay outside of here.

    python -m scripts.dstests setup                           an environment, .dstests by default
    python -m scripts.dstests run TESTS IDS [FILE ...]        run those of IDS in TESTS, each file by itself
    python -m scripts.dstests page IDS > docs/dstests/DATE.md what passed, and why the others did not

`make dstests TESTS=/a/DeepSpeed/tests IDS=ids.txt` does all three. TESTS is the folder ``tests`` of its
repository, beside which no folder ``deepspeed`` lies; IDS has a pytest id a line, relative to TESTS: those that the
real package passes on the same machine. Results are lines of JSON in dstests.jsonl (``--results``); what is there is
not run again (``--again`` runs what did not pass once more; the last line of an id counts). pdsh and numactl have to
be installed.

Reasons are lines of reasons.tsv: a kind, a pattern for ids, one for messages, the reason. The first that fits counts.
"""

import argparse
import collections
import fnmatch
import json
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REASONS = Path(__file__).with_name("reasons.tsv")
PACKAGES = ("pytest<8.4", "pytest-timeout", "tabulate", "py-cpuinfo", "einops", "comet_ml")
WITHOUT_DEPENDENCIES = ("mup", str(ROOT / "dropin"))  # mup asks for torchvision, dropin for zoo
SETTINGS = {
    "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8", "DS_DISABLE_REUSE_DIST_ENV": "1", "DS_UNITTEST_TIMEOUT": "90",
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
KINDS = {
    "part to come": "the part is not there yet; importing it works, using it says so",
    "internal": "reads what no program may rely on",
    "differs": "differs, documented in docs/migration.md or in the README",
    "environment": "of this machine or of the harness",
    "fault": "a fault of zoo",
}


def setup(folder: Path) -> None:
    """An environment that sees all of .venv, with what the tests need before it."""
    python = folder / "bin/python"
    if python.exists():
        return
    venv.create(folder, with_pip=True, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (theirs,) = (ROOT / ".venv").glob("lib/python*/site-packages")
    (packages / "zoo_of_the_repository.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)


def read(path: Path) -> dict[str, dict[str, str]]:
    """The last result of each id."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["id"]: row for row in map(json.loads, lines)}


def run(args: argparse.Namespace) -> None:
    """Run the ids that have no result (with ``--again``: that have not passed), a file at a time."""
    tests, results = args.tests.resolve(), args.results.resolve()
    done = read(results)
    wanted = [i for i in args.ids.read_text().split("\n") if i]
    todo = [i for i in wanted if i not in done or (args.again and done[i]["outcome"] != "passed")]
    files = list(dict.fromkeys(i.partition("::")[0] for i in todo))
    if args.files:
        files = [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in args.files)]
    path = os.pathsep.join([str(tests), str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    for file in files:
        ids = [i for i in todo if i.startswith(f"{file}::")]
        chosen = results.with_suffix(".ids")
        chosen.write_text("\n".join(ids))
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
        environment |= {"ZOO_DSTESTS_IDS": str(chosen), "ZOO_DSTESTS_RESULTS": str(results)}
        environment["PATH"] = os.pathsep.join([str(args.python.absolute().parent), environment.get("PATH", "")])
        command = [
            str(args.python.absolute()), "-m", "pytest", "-p", "scripts.dstests.plugin", "-m", "",
            "-p", "no:cacheprovider", "-q", "--tb=short", "--timeout", "130", file,
        ]  # fmt: skip
        begun = time.monotonic()
        ended = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)
        after = read(results)
        lost = [i for i in ids if i not in after or after[i] == done.get(i)]
        with results.open("a") as out:
            for i in lost:  # the file cannot be imported, or the process has died
                said = (ended.stdout + ended.stderr)[-3000:]
                out.write(json.dumps({"id": i, "outcome": "lost", "message": said}) + "\n")
        passed = sum(after[i]["outcome"] == "passed" for i in ids if i not in lost)
        print(f"{file}: {passed} of {len(ids)} passed, {time.monotonic() - begun:.0f} s", flush=True)


def reasons() -> list[tuple[str, str, str, str]]:
    """Of reasons.tsv: kind, pattern for ids, pattern for messages ("" fits all), reason."""
    rows = []
    for number, line in enumerate(REASONS.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        kind, ids, message, reason = line.split("\t")
        if kind not in KINDS:
            sys.exit(f"{REASONS.name}:{number}: kind {kind!r}; allowed are {', '.join(KINDS)}.")
        rows.append((kind, ids, message, reason))
    return rows


def judge(row: dict[str, str], rows: list[tuple[str, str, str, str]]) -> tuple[str, str]:
    """The kind and the reason of a result that is no pass; a fault without a reason where no line fits."""
    for kind, ids, message, reason in rows:
        if re.search(ids, row["id"]) and re.search(message, row.get("message", "")):
            return kind, reason
    return "fault", "not judged yet"


def page(args: argparse.Namespace) -> str:
    """The page: counts, and every reason with how many ids it has in which files."""
    done = read(args.results)
    wanted = [i for i in args.ids.read_text().split("\n") if i]
    ran = [done[i] for i in wanted if i in done]
    failed = [row for row in ran if row["outcome"] != "passed"]
    rows = reasons()
    found: dict[str, dict[str, list[str]]] = {kind: collections.defaultdict(list) for kind in KINDS}
    for row in failed:
        kind, reason = judge(row, rows)
        found[kind][reason].append(row["id"])
    count = {kind: sum(map(len, by.values())) for kind, by in found.items()}
    judged = len(ran) - count["part to come"] - count["internal"] - count["environment"]
    passed = len(ran) - len(failed)
    of_public = f"{passed} of {judged}, {100 * passed / max(judged, 1):.1f} %"
    lines = [
        f"# DeepSpeed's own unit tests on zoo.deepspeed, {args.date or time.strftime('%Y-%m-%d')}", "",
        "Ids of the tests that the real package passes on the same kind of machine (two cores, no GPU), run without "
        "stand-ins by `python -m scripts.dstests`.", *([args.note] if args.note else []), "",
        "| | ids |", "|---|---:|",
        f"| listed | {len(wanted)} |", f"| run | {len(ran)} |", f"| passed | {passed} |",
        *(f"| {kind}: {what} | {count[kind]} |" for kind, what in KINDS.items()),
        "", f"Of the tests of public names whose part exists pass {of_public}.", "",
    ]  # fmt: skip
    for kind, by in found.items():
        lines += [f"## {kind.capitalize()}", "", "| reason | ids | in |", "|---|---:|---|"] if by else []
        for reason, ids in sorted(by.items(), key=lambda item: -len(item[1])):
            files = ", ".join(dict.fromkeys(i.partition("::")[0].removeprefix("unit/") for i in ids))
            lines.append(f"| {reason} | {len(ids)} | {files} |")
        lines += [""] if by else []
    if missing := [i for i in wanted if i not in done]:
        kinds = collections.Counter(judge({"id": i}, rows)[0] for i in missing)
        known = ", ".join(f"{kinds[kind]} of the kind {kind!r}" for kind in ("part to come", "internal", "differs"))
        files = collections.Counter(i.partition("::")[0].removeprefix("unit/") for i in missing)
        lines += [
            "## Not run", "", f"{len(missing)} ids, by reasons.tsv {known}:", "",
            ", ".join(f"{file} ({count})" for file, count in files.items()), "",
        ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.dstests", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("setup", "run", "page"):
        command = commands.add_parser(name)
        if name != "page":
            command.add_argument("--python", type=Path, default=ROOT / ".dstests/bin/python", help="of the environment")
        if name != "setup":
            if name == "run":
                command.add_argument("tests", type=Path)
            command.add_argument("ids", type=Path)
            command.add_argument("--results", type=Path, default=Path("dstests.jsonl"))
    commands.choices["run"].add_argument("files", nargs="*", help="patterns of files of tests")
    commands.choices["run"].add_argument("--again", action="store_true", help="what has not passed, once more")
    commands.choices["page"].add_argument("--date", help="the day of the run")
    commands.choices["page"].add_argument("--note", help="sentences about this run, for the top of the page")
    args = parser.parse_args()
    if args.command == "setup":
        setup(args.python.parent.parent)
    elif args.command == "run":
        run(args)
    else:
        sys.stdout.write(page(args))


if __name__ == "__main__":
    main()
