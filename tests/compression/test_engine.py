"""A compressed model under an engine: steps, records, checkpoints, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.models import Words, document, inputs, masters, start, train, weights
from torch import nn

from zoo.compression import init_compression, redundancy_clean, transforms_of
from zoo.config import ConfigError, load
from zoo.engine import Engine
from zoo.zero import safe_get_full_fp32_param

BOTH = {
    "weight_quantization": weights("layer", start=6, target=3, rounding="stochastic", schedule_offset=1),
    "activation_quantization": inputs("layer", bits=6, schedule_offset=2),
}


def test_the_section_compresses_the_model_and_the_clock_drives_it() -> None:
    engine = start(document(compression=BOTH))
    bits = []
    for _ in range(6):
        engine.train_batch()
        bits.append(engine.record.metrics["compression_training/bits/weight_quantization.wq1"])
    assert bits == [6, 6, 6, 5, 5, 4], "of the step that is over: 6 until 2 steps after the offset, then after 4"
    plain = start(document())
    torch.testing.assert_close(train(start(document(compression=BOTH)), 1), train(plain, 1), rtol=0, atol=0)
    assert train(start(document(compression=BOTH)), 3)[2] != train(start(document()), 3)[2]


def test_the_model_of_init_compression_is_taken_over_and_trains_the_same() -> None:
    config = document(compression=BOTH)
    model = Words()
    assert init_compression(model, config) is model
    before = transforms_of(model)
    ready, by_itself = start(config, model), start(config)
    assert transforms_of(ready.module) == before
    assert train(ready, 4) == train(by_itself, 4)
    other = document(compression={"weight_quantization": weights("head")})
    with pytest.raises(ValueError, match=r"it has .*activation_quantization.different_groups.aq1 besides"):
        start(other, init_compression(Words(), config))


def test_recomputed_activations_change_nothing() -> None:
    config = document(compression=BOTH)
    assert train(start(config, Words(recompute=True)), 4) == train(start(config), 4)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_that_is_saved_and_loaded_goes_on_as_if_it_had_never_stopped(stage: int, tmp_path: Path) -> None:
    config = document(stage, compression=BOTH)
    engine = start(config)
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    wanted = train(engine, 3)
    other = start(config, Words(seed=9))
    other.load_checkpoint(str(tmp_path))
    batch = [t[:4] for t in other.dataloader.dataset.tensors] if other.dataloader is not None else []
    again = start(config, Words(seed=8))
    again.load_checkpoint(str(tmp_path))
    assert train(other, 3) == wanted
    assert masters(other).keys() == masters(engine).keys()
    for name, value in masters(other).items():
        assert torch.equal(value, masters(engine)[name])
    assert float(again.eval_batch(batch)) == float(again.eval_batch(batch)), "evaluation is of the step that was loaded"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_rounded_and_masters_are_not(precision: str) -> None:
    """Rounded between updates, which is what "at the step" and "in forward" both come to: the same bits."""

    def run(stage: int, in_forward: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        section = weights("layer", start=5, target=3, in_forward=in_forward, rounding="stochastic")
        engine = start(document(stage, compression={"weight_quantization": section}, **{precision: {"enabled": True}}))
        found = train(engine, 4), masters(engine)
        (table,) = [p for n, p in engine.module.named_parameters() if n == "layer.0.up.weight"]
        return *found, torch.as_tensor(safe_get_full_fp32_param(table))

    first = run(0, True)
    assert len(first[2].unique()) > 7, "masters keep their precision"
    for stage, in_forward in ((0, False), (3, True), (3, False)):
        other = run(stage, in_forward)
        assert other[0] == first[0]
        assert all(torch.equal(value, other[1][name]) for name, value in first[1].items())
        assert torch.equal(other[2], first[2])


def test_evaluation_sees_what_the_steps_so_far_have_made() -> None:
    config = document(compression={"weight_quantization": weights("layer", start=3, target=3, schedule_offset=1)})
    engine = start(config)
    x, y = (t[:4] for t in engine.dataloader.dataset.tensors)  # type: ignore[union-attr]
    engine.train_batch()
    found = float(engine.eval_batch((x, y)))
    model = copy.deepcopy(engine.module)
    engine.destroy()
    redundancy_clean(model, config)
    with torch.no_grad():
        assert float(model(x, y)) == pytest.approx(found, rel=1e-6)
    assert not transforms_of(model)
    assert type(model.layer[0].up) is nn.Linear


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_destroy_a_model_is_cleaned_at_every_stage(stage: int) -> None:
    config = document(stage, compression={"weight_quantization": weights("layer", target=3)})
    engine = start(config)
    train(engine, 2)
    wanted = masters(engine)
    engine.destroy()
    model = redundancy_clean(engine.module, config)
    for name, value in model.named_parameters():
        if "up.weight" in name or "down.weight" in name:
            assert len(value.unique()) <= 7
            assert (value - wanted[name]).abs().max() <= wanted[name].abs().max() / 6 + 1e-6
        else:
            assert torch.equal(value, wanted[name])


def test_a_model_in_shards_is_not_cleaned() -> None:
    config = document(3, compression={"weight_quantization": weights("layer", target=3)})
    engine = start(config)
    train(engine, 1)
    before = transforms_of(engine.module)
    with pytest.raises(ValueError, match=r"parameters are partitioned .*call engine\.destroy\(\) first"):
        redundancy_clean(engine.module, config)
    assert transforms_of(engine.module) == before
    assert len(train(engine, 1)) == 1


def refused(compression: dict[str, Any], sentence: str, **more: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        start(document(compression=compression, **more))


def test_what_is_refused() -> None:
    refused({"weight_quantization": weights("layr")}, r"different_groups\.wq1\.modules: the pattern 'layr'")
    refused({"weight_quantization": {"shared_parameters": {"enabled": True}}}, "different_groups is empty")
    refused({"weight_quantization": {"different_groups": {"a": {}}}}, "no shared_parameters.enabled, which is false")
    refused(
        {"weight_quantization": weights(in_forward=False)}, "quantize_weight_in_forward = false .* there are no 16-bit"
    )
    refused(
        {"layer_reduction": {"enabled": True, "module_name_prefix": "layer", "teacher_layer": [0, 1]}},
        "layer_reduction: enabled, and an engine has no teacher",
    )
    refused({"weight_quantisation": {}}, "weight_quantisation: unknown key")


def test_a_section_that_is_switched_off_changes_nothing() -> None:
    off = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": {}}}}
    engine = start(document(0, compression=off))
    assert not transforms_of(engine.module)
    assert "compression_training" not in engine.parts
    assert isinstance(engine, Engine)


def test_problems_of_a_document_are_reported_with_their_paths() -> None:
    wrong = weights("layer", start=4, target=8)
    with pytest.raises(ConfigError, match=r"compression_training\.weight_quantization\.different_groups\.wq1\.params"):
        load(document(compression={"weight_quantization": wrong}))
