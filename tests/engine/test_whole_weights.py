"""Whole weights out of an engine's checkpoints: the masters, whatever stage, tier and number of ranks wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_saving import net, start, zero_of

from zoo import sim
from zoo.checkpointing import load
from zoo.checkpointing.consolidation import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zoo.checkpointing.zero_to_fp32 import Checkpoint, state_dict_of, tensors_of


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "nvme")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_fresh_model_takes_is_what_was_trained(tmp_path: Path, stage: int, device: str, precision: str) -> None:
    more: dict[str, Any] = {} if precision == "fp32" else {"bf16": {"enabled": True, "auto_cast": True}}
    more["train_batch_size"] = 9
    (tmp_path / "nvme").mkdir()

    def job(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(zero_of(stage, device, tmp_path / "nvme"), tied=True, **more)
        engine.train_batch()
        engine.save_checkpoint(tmp_path / "run")
        return engine.optimizer.consolidated_parameters(), {n: b.clone() for n, b in engine.module.named_buffers()}

    computed, buffers = sim.run(3, job)[0]  # type: ignore[misc]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in found.values())
    for name, value in computed.items():  # in the dtype that the model computes with
        assert torch.equal(found[name].to(value.dtype), value), name
    if precision == "bf16":
        assert any(not torch.equal(found[name].bfloat16().float(), found[name]) for name in computed)  # masters
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "table"):
        assert torch.equal(found[name], buffers[name].to(found[name].dtype)), name
    alone = state_dict_of(tensors_of(Checkpoint(tmp_path / "run")))
    assert alone.keys() == found.keys()
    assert all(torch.equal(alone[name], found[name]) for name in found)
    model = load_state_dict_from_zero_checkpoint(net(tied=True), tmp_path / "run")
    assert all(torch.equal(value, found[name]) for name, value in model.named_parameters())
    assert model.again.weight is model.first.weight
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
    assert set(found) - set(trained) == {"second.weight", "second.bias"}
    assert load(tmp_path / "run").tag == "global_step1"
