"""Losses of zoo and of real DeepSpeed side by side, as a page.

    ZOO_PEER=.peer python -m tests.clients.page     both sides of every case in this run
    python -m tests.clients.page                    DeepSpeed's side from peers.json

Writes ``docs/clients/<date>.md`` after every case. What was measured on the same day, also by ``make campaign`` with
ZOO_PEER, is kept in ``runs/clients`` and not measured again, so an interrupted run goes on where it stopped;
``--again WORD`` runs zoo again for the cases whose names contain the word.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
from pathlib import Path
from typing import Any

from tests.clients.cases import CASES, LEFT_OUT, ROOT, Case, difference, head, peer_here, recorded, results, tolerance

Found = dict[str, Any]
EXPORTED = 1e-5
"""Absolute, of logits: what exported weights may say otherwise than the trained model."""


def judged(case: Case, ours: Found, theirs: Found, *, same_processor: bool) -> list[str]:
    """What is wrong with zoo's side; empty where all is as it should be."""
    found = []
    bound = tolerance(case, same_processor=same_processor)
    if not (apart := difference(ours["losses"], theirs["losses"])) <= bound:
        found.append(f"losses differ by {apart:.1e}, more than {bound:.0e}")
    if theirs["grad_norms"] and not (apart := difference(ours["grad_norms"], theirs["grad_norms"])) <= 1e-5:
        found.append(f"gradient norms differ by {apart:.1e}, more than 1e-5")
    if "resumed" in ours and (apart := difference(ours["resumed"], ours["losses"])) != 0:
        found.append(f"losses of the resumed run differ by {apart:.1e} from those of the whole one")
    if missing := theirs.get("exported", {}).keys() - ours.get("exported", {}).keys():
        found.append(f"there is no export {', '.join(missing)}")
    for where, apart in ours.get("exported", {}).items():
        if not apart <= EXPORTED:
            found.append(f"logits of the export {where} differ by {apart:.1e}, more than {EXPORTED:.0e}")
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def sides(case: Case, kept: Found, peer: Path | None) -> Found:
    """``ours`` and ``theirs`` of a case, whether theirs are ``live``, and what went wrong."""
    found = dict(kept)
    if peer is None and "theirs" not in found and (theirs := recorded()["cases"].get(" ".join(case))):
        found["theirs"] = theirs
    missing: dict[str, Path | None] = {} if "ours" in found else {"ours": None}
    if peer is not None and not found.get("live"):
        missing["theirs"] = peer
    for side, where in missing.items():
        try:
            found[side] = results(case, where)
            found["live"] = side == "theirs" or bool(found.get("live"))
            found.pop(f"{side} failed", None)
        except AssertionError as error:
            found[f"{side} failed"] = str(error)
            print(error, flush=True)
    return found


def _folder(date: str) -> Path:
    return ROOT / "runs/clients" / date


def _file(case: Case, date: str) -> Path:
    return _folder(date) / (re.sub(r"\W+", "-", " ".join(case)) + ".json")


def keep(case: Case, found: Found, date: str | None = None) -> None:
    """What was measured today, for the page."""
    path = _file(case, date or datetime.date.today().isoformat())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def read_kept(case: Case, date: str) -> Found:
    """What :func:`keep` has."""
    path = _file(case, date)
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    return found


def measure(date: str, again: str | None) -> None:
    peer = peer_here()
    theirs = head(peer) if peer else {key: recorded()[key] for key in ("versions", "instructions")}
    found: Found = {"zoo": head(), "peer": theirs, "cases": {" ".join(case): read_kept(case, date) for case in CASES}}
    page = ROOT / f"docs/clients/{date}.md"
    page.parent.mkdir(exist_ok=True)
    for case in CASES:
        name = " ".join(case)
        before = dict(found["cases"][name])
        if again and again in name:
            before.pop("ours", None)
        found["cases"][name] = sides(case, before, peer)
        keep(case, found["cases"][name], date)
        page.write_text(written(date, found))
        print(name, flush=True)


# -- the page ---------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _resumed(side: Found) -> str:
    return _number(difference(side["resumed"], side["losses"]) if "resumed" in side else None)


def _exported(side: Found) -> str:
    return _number(max(side["exported"].values()) if side.get("exported") else None)


def row(case: Case, found: Found, same_processor: bool) -> str:
    words = {"program": case[0].removesuffix(".py"), **dict(zip(case[1::2], case[2::2], strict=True))}
    program = words["program"] + (" unclipped" if words.get("--clipping") == "0" else "")
    cells = [program, words["--model"], words["--stage"], words.get("--offload", "").replace("none", "")]
    ours, theirs = found.get("ours"), found.get("theirs")
    if ours is None or theirs is None:
        return "| " + " | ".join([*cells, *[""] * 8, "not measured"]) + " |"
    cells += [f"{ours['losses'][-1]:.7f}", f"{theirs['losses'][-1]:.7f}"]
    cells += [_number(difference(ours["losses"], theirs["losses"]))]
    cells += [_number(difference(ours["grad_norms"], theirs["grad_norms"])) if theirs["grad_norms"] else ""]
    cells += [_resumed(ours), _resumed(theirs), _exported(ours), _exported(theirs)]
    wrong = judged(case, ours, theirs, same_processor=same_processor)
    cells += ["**" + "; ".join(wrong) + "**" if wrong else "" if found.get("live") else "recorded"]
    return "| " + " | ".join(cells) + " |"


def processor() -> str:
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    match = re.search(r"^model name\s*: (.*)$", said, re.MULTILINE)
    return match[1] if match else platform.machine()


def summary(found: Found, same: bool) -> str:
    """How many cases, and the largest difference of each kind."""
    both = [(case, found["cases"].get(" ".join(case), {})) for case in CASES]
    both = [(case, sides) for case, sides in both if "ours" in sides and "theirs" in sides]
    wrong = sum(bool(judged(case, sides["ours"], sides["theirs"], same_processor=same)) for case, sides in both)
    apart = [(case, difference(sides["ours"]["losses"], sides["theirs"]["losses"])) for case, sides in both]
    plain = max((value for case, value in apart if "--offload" not in case), default=0.0)
    offload = max((value for case, value in apart if "--offload" in case), default=0.0)
    equal = sum(value == 0 for _, value in apart)
    resumed = [sides["ours"] for _, sides in both if "resumed" in sides["ours"]]
    exact = sum(difference(ours["resumed"], ours["losses"]) == 0 for ours in resumed)
    return SUMMARY.format(
        num_both=len(both), num=len(CASES), wrong=wrong, plain=_number(plain), offload=_number(offload), equal=equal,
        num_resumed=len(resumed), exact=exact,
    )  # fmt: skip


SUMMARY = """\
{num_both} of {num} cases are measured on both sides, {wrong} of them beyond a bound. The largest relative difference
between losses is {plain}, with offload {offload}; {equal} cases have the same losses bit for bit. {num_resumed} cases
are also stopped and resumed on zoo: {exact} of them repeat the run bit for bit."""

PAGE = """\
# Clients on zoo and on DeepSpeed, {date}

The programs of [examples/clients](../../examples/clients/README.md), and those that TRL ships (`trl/dpo` is
`trl/scripts/dpo.py` of the installed package), unmodified, on two gloo processes in fp32: six steps on zoo under the
name deepspeed, and six on real DeepSpeed in an environment of its own. Written by `python -m tests.clients.page`.

Processor: {processor}. DeepSpeed's side: {versions}. {others}

{summary}

*Losses differ*, *norms differ*: the largest relative difference over the steps, of the mean loss of a step over
micro-batches and ranks (of `trl/grpo`, whose loss is zero but for rounding, the mean entropy of what it sampled), and
of the gradient's norm, which is empty where DeepSpeed gives none. Bounds: 1e-6 for losses,
5e-6 with offload, where DeepSpeed's CPU Adam itself differs from its other runs by 2e-6; 1e-5 for norms. *Resumed*: the
same for a run that is stopped after three steps and resumed, against the run without a stop, which it is to equal bit
for bit. *Export*: the largest absolute difference between logits of the trained model and of what `from_pretrained`
reads from its export; bound: 1e-5. In cases marked *recorded*, DeepSpeed's side was computed in an earlier run
(`tests/clients/peers.json`), in all others in this one.

{table}
"""
COLUMNS = (
    "program", "model", "stage", "offload", "zoo: last loss", "DeepSpeed: last loss", "losses differ", "norms differ",
    "zoo: resumed", "DeepSpeed: resumed", "zoo: export", "DeepSpeed: export", "",
)  # fmt: skip


def written(date: str, found: Found) -> str:
    zoo, peer = found["zoo"], found["peer"]
    same = zoo["instructions"] == peer["instructions"]
    others = [f"{name} {version}" for name, version in zoo["versions"].items() if peer["versions"].get(name) != version]
    table = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    table += [row(case, found["cases"].get(" ".join(case), {}), same) for case in CASES]
    if LEFT_OUT:
        table += ["", "Left out:", ""]
        table += [f"- `{' '.join(case)}`: {why}" for case, why in LEFT_OUT.items()]
    return PAGE.format(
        date=date,
        processor=f"{processor()}, {zoo['instructions']}" + ("" if same else f" (recorded on {peer['instructions']})"),
        versions=", ".join(f"{name} {version}" for name, version in peer["versions"].items()),
        others=f"zoo's side differs in {', '.join(others)}." if others else "zoo's side has the same versions.",
        summary=summary(found, same),
        table="\n".join(table),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the page")
    parser.add_argument("--again", help="measure cases with this word again")
    arguments = parser.parse_args()
    measure(arguments.date, arguments.again)
