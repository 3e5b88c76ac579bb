"""Unmodified programs of Hugging Face's libraries and of DeepSpeed's users have the losses of real DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from tests.clients.cases import CASES, OFFLOAD, PEERS, run

_NEEDS = {"sft.py": ("trl", "datasets"), "lora.py": ("peft",)}
_THEIRS: dict[str, Any] = json.loads(PEERS.read_text())["cases"]
# A share for CI, the rest for the campaign.
_SLOW = {
    "trainer.py --model gpt2 --stage 0", "trainer.py --model llama --stage 3", "trainer.py --model qwen3_moe --stage 2",
    "accelerate_loop.py --model llama --stage 3", "plain.py --model gpt2 --stage 3", "lora.py --model gpt2 --stage 3",
    "sft.py --model gpt2 --stage 2", "moe.py --stage 2", "trainer.py --model gpt2 --stage 3 --offload cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=" ".join(case), marks=pytest.mark.slow if " ".join(case) in _SLOW else pytest.mark.campaign
        )
        for case in CASES
        if " ".join(case) in _THEIRS
    ],
)
def test_losses_are_deepspeeds(case: tuple[str, ...]) -> None:
    for package in ("transformers", "accelerate", *_NEEDS.get(case[0], ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra bench)")
    theirs, ours = _THEIRS[" ".join(case)], run(case)
    # DeepSpeed's CPU Adam differs from its own other runs by 2e-6.
    tolerance = 5e-6 if case in OFFLOAD else 1e-6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance, abs=0.0)
    count = min(len(ours["grad_norms"]), len(theirs["grad_norms"]))
    assert ours["grad_norms"][:count] == pytest.approx(theirs["grad_norms"][:count], rel=1e-5, abs=0.0)
