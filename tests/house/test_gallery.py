"""The programs of examples/gallery on simulated ranks; as processes they run where the pages' commands do (slow)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.house.pages import ROOT
from tests.moe.models import needs_transformers

from zoo import sim

PROGRAMS = {
    "experts": (2, r"29,088 of 47,520 parameters here; loss 4\.\d+ to [12]\.\d+"),
    "pipeline": (4, r"rank 3: \d+ parameters, loss [23]\.\d+"),
    "tensor_inference": (2, r"as on one rank: True"),
    "rollout": (2, r"share of 7 by step: 0\.0\d .* 0\.[1-9]\d"),
    "long_sequences": (2, r"step 4: loss 1\.\d+ over 1,024 of 2,048 tokens"),
}
"""Program → ranks, and what it says."""


def test_each_program_is_here() -> None:
    assert set(PROGRAMS) == {path.stem for path in (ROOT / "examples/gallery").glob("*.py")}


COSTLY = ("experts", "pipeline", "long_sequences")


@needs_transformers
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else []) for name in PROGRAMS]
)
def test_a_program_says_what_it_did(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks, said = PROGRAMS[name]
    main = runpy.run_path(str(ROOT / f"examples/gallery/{name}.py"))["main"]
    sim.run(ranks, lambda rank: main())
    assert re.search(said, capfd.readouterr().out)


@needs_transformers
def test_a_model_of_ones_own_reads_a_text_by_its_tokenizer(tmp_path: Path) -> None:
    """A vocabulary of three words, and a text of 12 of them: the tokens are the words' numbers, four in a sequence."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("c b a c " * 3 + "b")
    kind = runpy.run_path(str(ROOT / "examples/huggingface/train.py"))["Text"]
    rows = kind(tmp_path / "text", str(tmp_path / "model"), 4)
    assert len(rows) == 3
    assert rows[1]["input_ids"].tolist() == [2, 1, 0, 2]
    assert rows[1]["labels"].tolist() == [2, 1, 0, 2]
    small = kind(tmp_path / "text", None, 8)
    assert small[0]["input_ids"].tolist() == list(b"c b a c ")


@needs_transformers
@pytest.mark.slow
def test_a_job_goes_on_from_eight_ranks_with_six(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = ROOT / "examples/huggingface/train.py"
    main = runpy.run_path(str(program))["main"]
    options = ["--config", str(ROOT / "examples/gallery/elastic.json"), "--out", "runs/elastic", "--steps"]
    for ranks, more in ((8, ["4"]), (6, ["8", "--resume"])):
        monkeypatch.setattr("sys.argv", [str(program), *options, *more])
        sim.run(ranks, lambda rank: main())
    said = re.findall(r"step (\d): loss (\d\.\d+)", capfd.readouterr().out)
    assert [int(step) for step, _ in said] == [4, 8]
    assert float(said[1][1]) < float(said[0][1])
