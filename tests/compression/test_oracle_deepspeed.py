"""zoo.compression beside DeepSpeed's, on the same weights: what is alike, and each departure with both formulas.

peers.json has what DeepSpeed 0.18.9 does; the README of the subpackage lists the departures and their reasons.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.compression import peers
from tests.compression.peers import CASES, CHANGE, NUM_STEPS, SCHEDULES, SCORES, document, found, given, models, number
from torch import Tensor, nn

from zoo.compression import CompressionScheduler, init_compression, redundancy_clean
from zoo.compression.attach import transforms_of
from zoo.compression.schedule import bits_at, share_at, steps_at_bits
from zoo.compression.techniques.activation_quantization import StaticInputQuantizer

PEERS = json.loads(peers.FILE.read_text(encoding="utf-8"))
NEAR = {"rtol": 0.0, "atol": 2e-5}
"""The file has 6 decimals; outputs are sums of about 12 products."""
ALIKE = [
    "2 bits, 1 groups", "2 bits, 8 groups", "1 bits, 1 groups", "1 bits, 8 groups", "elements, 0.25", "elements, 0.5",
    "rows stay", "rows go", "heads go", "layers",
]  # fmt: skip
DEPARTS = {
    name for name in CASES
    if "ymmetric" in name or name.startswith(("rows of", "inputs of a", "elements and"))
} | {"elements, 0.51", "rows go, 0.45", "channels go"}  # fmt: skip


@functools.cache
def _cleaned(name: str) -> tuple[Tensor, dict[str, Any]]:
    kind, compression = CASES[name]
    config = document(copy.deepcopy(compression))
    model = init_compression(models()[kind], config, teacher_model=peers.teacher() if kind == "student" else None)
    for parameter, value in model.named_parameters():
        if "scores" in parameter:
            value.data.copy_(torch.tensor(SCORES[name]).view(value.shape))
    CompressionScheduler(model)
    before = model.eval()(given(kind)).detach()
    return before, found(kind, model if kind == "student" else redundancy_clean(model, config))


def ours(name: str) -> dict[str, Any]:
    """Outputs with transforms, and what is left after them."""
    before, after = _cleaned(name)
    return {"training": before, "outputs": torch.tensor(after["outputs"]), **_tensors(after["parameters"])}


def theirs(name: str) -> dict[str, Any]:
    """The same of DeepSpeed."""
    kept = PEERS["cases"][name]
    return {key: torch.tensor(kept[key]) for key in ("training", "outputs")} | _tensors(kept["parameters"])


def _tensors(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in parameters.items()}


def weight(name: str, parameter: str = "0.weight") -> Tensor:
    """Before it was compressed."""
    return models()[CASES[name][0]].get_parameter(parameter).detach()


def test_each_case_is_looked_at() -> None:
    assert set(PEERS["cases"]) == set(CASES) == DEPARTS | set(ALIKE)


@pytest.mark.parametrize("name", ALIKE)
def test_weights_masks_shapes_and_outputs_are_those_of_deepspeed(name: str) -> None:
    mine, other = ours(name), theirs(name)
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        torch.testing.assert_close(value, other[key], **NEAR, msg=lambda text, key=key: f"{key}: {text}")


# -- weights and inputs of few bits -----------------------------------------------------------------------------------


def their_symmetric(w: Tensor, bits: int) -> Tensor:
    """Of rows: 2^b steps from -max|w| on, so that the largest element of a positive sign is one step short."""
    half = 2.0 ** (bits - 1)
    scale = w.abs().amax(1, keepdim=True) / half
    return (w / scale).round().clamp(-half, half - 1) * scale


def their_asymmetric(w: Tensor, bits: int) -> Tensor:
    """Of rows: 2^b steps from about the minimum on, which is rounded to a step; the maximum is a step short, or two."""
    scale = (w.amax(1, keepdim=True) - w.amin(1, keepdim=True)) / 2.0**bits
    zero = (w.amin(1, keepdim=True) / scale).round() * scale
    return ((w - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_equal_steps_reach_both_ends_here_and_not_there(kind: str, bits: int, groups: int) -> None:
    """The groups are alike; steps are max|w|/(2^(b-1) - 1) and (max w - min w)/(2^b - 1) here."""
    name = f"{kind} {bits} bits, {groups} groups"
    w = weight(name).reshape(groups, -1)
    there = theirs(name)["0.weight"].reshape(groups, -1)
    formula = (their_symmetric if kind == "symmetric" else their_asymmetric)(w, bits)
    torch.testing.assert_close(there, formula, **NEAR)
    here = ours(name)["0.weight"].reshape(groups, -1)
    if kind == "symmetric":
        step = w.abs().amax(1) / (2 ** (bits - 1) - 1)
        largest = w.abs().argmax(1, keepdim=True)
        torch.testing.assert_close(here.gather(1, largest), w.gather(1, largest), **NEAR)
    else:
        step = (w.amax(1) - w.amin(1)) / (2**bits - 1)
        torch.testing.assert_close(torch.stack(here.aminmax(dim=1)), torch.stack(w.aminmax(dim=1)), **NEAR)
    assert ((here - w).abs().amax(1) <= step / 2 + 1e-5).all()
    if kind == "symmetric":  # the largest, where it is positive
        short = (w - there).gather(1, largest)[w.gather(1, largest) > 0]
        half = 2.0 ** (bits - 1)
        torch.testing.assert_close(short, w.amax(1)[w.gather(1, largest)[:, 0] > 0] / half, **NEAR)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_a_token_has_a_range_of_its_own(kind: str, bits: int) -> None:
    name = f"{kind} inputs of {bits} bits"
    x, w = given("linear"), weight(name)
    formula = (their_symmetric if kind == "symmetric" else their_asymmetric)(x, bits)
    torch.testing.assert_close(theirs(name)["outputs"], formula @ w.T, **NEAR)
    steps = x.abs().amax(1) / (2 ** (bits - 1) - 1) if kind == "symmetric" else (x.amax(1) - x.amin(1)) / (2**bits - 1)
    bound = (steps / 2)[:, None] * w.abs().sum(1)
    assert ((ours(name)["outputs"] - x @ w.T).abs() <= bound + 1e-5).all()


def test_an_image_has_a_range_of_its_own() -> None:
    name = "inputs of a convolution"
    x, plain = given("conv"), models()["conv"]
    formula = their_asymmetric(x.flatten(1), 4).view(x.shape)
    torch.testing.assert_close(theirs(name)["outputs"], plain(formula).detach(), rtol=0, atol=1e-4)
    low, high = (end.view(-1, 1, 1, 1) for end in x.flatten(1).aminmax(dim=1))
    step = (high - low) / 15
    torch.testing.assert_close(
        ours(name)["outputs"], plain(((x - low) / step).round() * step + low).detach(), rtol=0, atol=1e-4
    )


def test_a_row_of_an_embedding_has_a_range_of_its_own() -> None:
    name = "rows of an embedding"
    w = weight(name)
    torch.testing.assert_close(theirs(name)["0.weight"], their_asymmetric(w, 4), **NEAR)
    torch.testing.assert_close(
        torch.stack(ours(name)["0.weight"].aminmax(dim=1)), torch.stack(w.aminmax(dim=1)), **NEAR
    )


def test_static_ranges_are_those_of_deepspeed() -> None:
    config = document(peers.inputs(8, "asymmetric", "static"))
    model = init_compression(nn.Sequential(nn.Linear(7, 2)), config)
    (transform,) = transforms_of(model)
    assert isinstance(transform, StaticInputQuantizer)
    scheduler = CompressionScheduler(model)
    for step, expected in enumerate(PEERS["ranges"]):
        model(number(7, step) * (step + 1))
        scheduler.step()
        assert transform.range is not None
        torch.testing.assert_close(transform.range, torch.tensor(expected), **NEAR)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_of", range(len(SCHEDULES)))
def test_bits_after_each_step_are_those_of_deepspeed(number_of: int) -> None:
    start, target, period = SCHEDULES[number_of]
    found = [
        bits_at(step, offset=0, start_bits=start, target_bits=target, period=period) for step in range(1, NUM_STEPS + 1)
    ]
    assert found == PEERS["schedules"][number_of]


def test_the_quantised_share_is_one_step_ahead_of_deepspeeds() -> None:
    """There r is 0 when bits fall, and nothing is rounded for a step; here r begins with the ratio."""
    start, target, period = SCHEDULES[0]
    for step, share in enumerate(PEERS["shares"], 1):
        since = steps_at_bits(step, offset=0, start_bits=start, target_bits=target, period=period)
        assert share_at(since, CHANGE) == min(1.0, share + CHANGE)


# -- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num", "here", "there"), [("elements, 0.51", 48, 24, 25), ("rows go, 0.45", 12, 5, 6)]
)
def test_what_is_kept_is_the_nearest_number_here_and_the_next_larger_there(
    name: str, num: int, here: int, there: int
) -> None:
    kept = []
    for side in (ours(name), theirs(name)):
        w = side["0.weight"]
        kept.append(int((w != 0).sum()) if name.startswith("elements") else len(w))
    assert kept == [here, there]
    ratio = 0.51 if name.startswith("elements") else 0.45
    assert [round(ratio * num), -int(-ratio * num // 1)] == kept


def test_channels_go_as_there_and_the_norm_behind_them_is_masked_before_that_too() -> None:
    """There a channel that is pruned gives what its batch norm makes of zero until the model is cleaned."""
    mine, other = ours("channels go"), theirs("channels go")
    for key in mine.keys() - {"training"}:
        torch.testing.assert_close(mine[key], other[key], rtol=0, atol=1e-4)
    torch.testing.assert_close(mine["training"], mine["outputs"], rtol=0, atol=1e-4)
    assert (other["training"] - other["outputs"]).abs().max() > 1


def test_what_removed_units_give_is_folded_here_and_lost_there() -> None:
    """A sigmoid makes 1/2 of a unit that is zero."""
    mine, other = ours("rows of constants go"), theirs("rows of constants go")
    torch.testing.assert_close(mine["training"], other["training"], **NEAR)
    torch.testing.assert_close(mine["training"], mine["outputs"], **NEAR)
    lost = mine["2.bias"] - other["2.bias"]
    torch.testing.assert_close(other["training"] - other["outputs"], lost.expand(5, 4), **NEAR)
    assert lost.abs().max() > 0.5
    assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in other.items()}


@pytest.mark.parametrize("name", ["elements and 1 bit", "elements and asymmetric 4 bits"])
def test_masks_come_before_quantisers_here_and_after_them_there(name: str) -> None:
    """The same elements are zero; here what is left has a scale of its own."""
    mine, other, w = ours(name)["0.weight"], theirs(name)["0.weight"], weight(name)
    kept = other != 0
    assert torch.equal(mine != 0, kept)
    assert int(kept.sum()) == 24
    if name.endswith("1 bit"):
        torch.testing.assert_close(other, w.sign() * w.abs().mean() * kept, **NEAR)
        torch.testing.assert_close(mine, w.sign() * w[kept].abs().mean() * kept, **NEAR)
    else:
        torch.testing.assert_close(other, their_asymmetric(w.reshape(1, -1), 4).view(w.shape) * kept, **NEAR)
        assert (mine - w * kept).square().sum() < (other - w * kept).square().sum()


def test_rows_go_behind_a_quantiser_that_has_no_zero() -> None:
    mine, other = ours("rows and asymmetric 4 bits"), theirs("rows and asymmetric 4 bits")
    assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in other.items()}
    torch.testing.assert_close(mine["training"], mine["outputs"], **NEAR)


# -- the file ---------------------------------------------------------------------------------------------------------


def _installed() -> bool:
    try:
        return importlib.metadata.version("deepspeed") == PEERS["deepspeed"]
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _installed(), reason=f"deepspeed {PEERS['deepspeed']} is not installed")
def test_what_is_kept_of_deepspeed_is_what_it_does() -> None:
    """Where the last release with compression is: the whole file anew."""
    code = "import json\nfrom tests.compression import peers\nprint(json.dumps(peers.everything()))"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    assert json.loads(done.stdout.splitlines()[-1]) == PEERS
