"""Unmodified programs of Hugging Face's libraries, of Lightning and of DeepSpeed's users have DeepSpeed's losses.

Real DeepSpeed runs beside zoo where ZOO_PEER names an environment that has it (``make peer``); elsewhere its losses are
those of ``peers.json``. A processor with other instruction sets than the recording's is given a wider bound, because
torch's kernels for them add the terms of a matrix product and of a sum in another order: there DeepSpeed does not
reproduce its own recording either.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.clients import shipped
from tests.clients.cases import CASES, ROOT, STUDIED, Case, head, losses, peer_here, recorded, results, study
from tests.clients.page import judged, keep

_NEEDS = {
    "lora.py": ("peft",), "qlora.py": ("peft", "bitsandbytes"), "sft.py": ("trl", "datasets"),
    "fabric.py": ("lightning",), **dict.fromkeys(shipped.PROGRAMS, ("trl", "datasets")),
}  # fmt: skip
# Every program and stage, offload once, and one case that is stopped, resumed and exported; the rest for the campaign.
_SHARE = {
    "trainer.py --model gpt2 --stage 1",
    "trainer.py --model llama --stage 2 --offload cpu",
    "accelerate_loop.py --model gpt2 --stage 0",
    "plain.py --model gpt2 --stage 3",
    "own_model.py --model gpt2 --stage 0",
    "lora.py --model qwen3_moe --stage 3",
    "qlora.py --model llama --stage 3",
    "sft.py --model llama --stage 3",
    "moe.py --model gpt2 --stage 1",
    "pipeline.py --model gpt2 --stage 0 --clipping 0",
    "fabric.py --model llama --stage 2",
    "trl/dpo --model llama --stage 3",
    "long_sequences.py --model llama --stage 3",
}


def _parameters() -> list[object]:
    found = []
    for case in CASES:
        name = " ".join(case)
        found.append(pytest.param(case, id=name, marks=pytest.mark.slow if name in _SHARE else pytest.mark.campaign))
    return found


@pytest.mark.parametrize("case", _parameters())
def test_a_client_has_deepspeeds_losses_and_resumes_and_exports(case: Case) -> None:
    for package in ("transformers", "accelerate", *_NEEDS.get(case[0], ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra clients)")
    peer, here, there = peer_here(), head(), recorded()
    ours = results(case)
    theirs = results(case, peer) if peer else there["cases"][" ".join(case)]
    if peer:
        keep(case, {"ours": ours, "theirs": theirs, "live": True})
    wrong = judged(case, ours, theirs, same_processor=peer is not None or here["instructions"] == there["instructions"])
    assert not wrong, f"{wrong}\nzoo: {ours}\nDeepSpeed: {theirs}\nhere: {here}\n" + (
        "both in this run" if peer else f"recorded with {there['versions']}, {there['instructions']}"
    )


def test_every_case_is_recorded_and_every_program_and_stage_is_in_the_share() -> None:
    names = [" ".join(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert set(recorded()["cases"]) == set(names)
    assert set(names) >= _SHARE
    assert set(STUDIED) <= set(CASES)
    written = {path.name for path in (ROOT / "examples/clients").glob("*.py") if path.name != "common.py"}
    assert {name.split()[0] for name in names} == written | set(shipped.PROGRAMS)
    for cases in (names, _SHARE):
        assert {name.split()[0] for name in cases} >= written
        assert {name.split()[4] for name in cases} == {"0", "1", "2", "3"}
        assert any("--offload" in name for name in cases)


def test_differences_are_found() -> None:
    case, plain = ("trainer.py", "--model", "gpt2", "--stage", "0"), {"losses": [2.0, 1.0], "grad_norms": [1.0, 1.0]}

    def wrong(same_processor: bool = True, case: Case = case, **changed: object) -> int:
        return len(judged(case, {**plain, **changed}, {**plain, "exported": {}}, same_processor=same_processor))

    assert wrong() == 0
    assert wrong(losses=[2.0, 1.000003]) == 1
    assert wrong(losses=[2.0, 1.000003], same_processor=False) == 0
    assert wrong(losses=[2.0, 1.000003], case=(*case, "--offload", "cpu")) == 0
    assert wrong(losses=[2.0, 1.000006], case=(*case, "--offload", "cpu")) == 1
    assert wrong(losses=[2.0]) == 1
    assert wrong(losses=[2.0, float("nan")]) == 1
    assert wrong(grad_norms=[]) == 1
    assert wrong(resumed=[2.0, 1.0]) == 0
    assert wrong(resumed=[2.0, 1.0000001]) == 1
    assert wrong(exported={".": 2e-5}) == 1
    assert len(judged(case, plain, {**plain, "exported": {".": 0.0}}, same_processor=True)) == 1


@pytest.mark.slow
def test_a_program_that_fails_or_aborts_fails_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "examples/clients"
    programs.mkdir(parents=True)
    write = "import os, sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{}'); "
    (programs / "aborts.py").write_text(write + "os.abort() if os.environ['RANK'] == '1' else None")
    (programs / "ends.py").write_text(write)
    monkeypatch.setattr("tests.clients.cases.ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"aborts.py ended with "):
        losses(("aborts.py",))
    with pytest.raises(KeyError):  # it ends well, and has written no losses
        study(("ends.py",))
