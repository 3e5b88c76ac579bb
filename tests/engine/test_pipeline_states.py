"""Pipelines: DeepSpeed's checkpoints of them, and whole state_dicts over their stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.foreign.golden_model import BEFORE, DECAY, LR, batches
from tests.engine.test_foreign import GOLDEN, theirs
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.engine import initialize
from zoo.pipe import LayerSpec, PipelineModule


def start(stages: int, stage: int = 1, **changes: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = PipelineModule(
        [
            LayerSpec(nn.Linear, 5, 7), torch.tanh, LayerSpec(nn.Linear, 7, 7), LayerSpec(nn.Linear, 7, 3), torch.tanh,
            LayerSpec(nn.Linear, 3, 1),
        ],
        num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform",
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.7}}, **changes,
    }  # fmt: skip
    return initialize(config, model)[0]


@pytest.mark.matrix
@pytest.mark.parametrize(("stages", "stage"), [(1, 0), (2, 1), (3, 3)])
def test_a_pipeline_of_deepspeed_goes_on_at_any_number_of_stages(stages: int, stage: int) -> None:
    def job(rank: int) -> list[float]:
        engine = start(stages, stage)
        engine.load_checkpoint(GOLDEN / "pipeline")
        assert (engine.global_steps, engine.optimizer.param_groups[0]["lr"]) == (3, LR)
        assert engine.optimizer.param_groups[0]["weight_decay"] == DECAY / 10
        return [float(engine.train_batch(iter([batch]))) for batch in batches(0)[BEFORE:]]

    for mine in sim.run(stages, job):
        assert mine == pytest.approx(theirs("pipeline")[0], rel=1e-6, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(("stages", "ranks", "stage", "half"), [(2, 2, 1, False), (2, 4, 3, True), (3, 3, 0, True)])
def test_the_state_dict_of_all_stages(stages: int, ranks: int, stage: int, half: bool) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(stages, stage, **({"bf16": {"enabled": True, "auto_cast": True}} if half else {}))
        whole = engine.module_state_dict()
        assert list(whole) == [f"{n}.{kind}" for n in (0, 2, 3, 5) for kind in ("weight", "bias")]
        mine = {n: p.detach().clone() for n, p in engine.optimizer.consolidated_parameters().items()}
        data = iter(batches(0) * 2)
        for _ in range(2):
            engine.train_batch(data)
        later = engine.module_state_dict()
        assert all(not torch.equal(later[name], whole[name]) for name in whole)
        engine.load_module_state_dict(whole)
        assert all(torch.equal(engine.module_state_dict()[name], value) for name, value in whole.items())
        now = engine.optimizer.consolidated_parameters()
        assert set(now) == set(mine)
        engine.load_module_state_dict({**whole, "0.bias": torch.full((7,), 1.001)})
        with pytest.raises(CheckpointError, match=r"the state_dict has 1\.weight, which the model lacks"):
            engine.load_module_state_dict({**whole, "1.weight": torch.ones(1)})
        bias = engine.module_state_dict()["0.bias"].float().tolist()
        assert bias == pytest.approx([1.001] * 7, abs=1e-2 if half else 1e-6)
        with pytest.raises(ValueError, match="split over the stages of a pipeline: no rank has all of it"):
            engine.load_module_state_dict(whole, custom_load_fn=lambda src, dst: None)
        assert torch.isfinite(engine.train_batch(data))
        return engine.module_state_dict()

    first, *others = sim.run(ranks, job)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert all(value.dtype is (torch.bfloat16 if half else torch.float32) for value in first.values())


@pytest.mark.parametrize("place", ["here", "memory://states/runs"])
def test_the_path_of_a_checkpoint(tmp_path: Path, place: str) -> None:
    root = place if "://" in place else str(tmp_path)

    def job(rank: int) -> None:
        engine = start(2)
        path = engine.save_checkpoint(root, "one")
        assert path == f"{root}/one"
        before = engine.module_state_dict()
        for source in (path, None):
            engine.train_batch(iter(batches(0)))
            engine.load_module_state_dict(source)
            assert all(torch.equal(engine.module_state_dict()[name], value) for name, value in before.items())
        assert engine.load_checkpoint(root)[0] == path

    sim.run(2, job)
