"""``deepspeed.checkpoint``: names, keys, universal checkpoints, one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.checkpoint import SubparamShape, constants, ds_to_universal, universal_checkpoint, utils
from zoo.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from zoo.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import load_deepspeed
from zoo.deepspeed.surface.constants import CONSTANTS

GOLDEN = Path(__file__).parents[1] / "checkpointing" / "foreign" / "golden"


def test_names_and_keys() -> None:
    assert utils.get_model_ckpt_name_for_rank("/a", "00") == "/a/mp_rank_00_model_states.pt"
    assert utils.get_zero_ckpt_name_for_rank("/a", 1, 2) == "/a/zero_pp_rank_1_mp_rank_02_optim_states.pt"
    assert utils.get_layer_ckpt_name_for_rank("/a", "layer_03", 4) == "/a/layer_03-model_04_model_states.pt"
    for name, value in CONSTANTS["checkpoint.constants"].items():
        assert getattr(constants, name) == getattr(deepspeed.checkpoint, name) == value
    assert (constants.PARAM_SHAPES, constants.FP32_WEIGHT_KEY) == ("param_shapes", "fp32")
    assert SubparamShape(["a.*"], (3, 4), 1).partition_dim == 1
    assert SubparamShape(patterns=["a"], shape=((1, 2), 3), partition_dim=0) == universal_checkpoint.SubparamShape(
        ["a"], ((1, 2), 3), 0
    )
    with pytest.raises(AttributeError, match="NOTHING"):
        _ = constants.NOTHING


@pytest.mark.parametrize("kind", ["stage1", "stage3"])
def test_a_checkpoint_of_deepspeed_becomes_universal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    given = GOLDEN / kind / "step"
    monkeypatch.setattr(
        sys, "argv", ["x", "--input_folder", str(given), "--output_folder", str(tmp_path / "uni"), "--no_strict"]
    )
    args = ds_to_universal.parse_arguments()
    assert (args.num_extract_workers, args.strict, args.inject_missing_state) == (4, False, False)
    ds_to_universal.main(args)
    assert (tmp_path / "latest_universal").read_text(encoding="utf-8") == "uni"
    before, after = load_deepspeed(given.parent, given.name), load_deepspeed(tmp_path, "uni")
    trained = [name for name, roles in before.roles.items() if "exp_avg" in roles]
    assert trained
    for name in trained:
        for role in ("parameter", "exp_avg", "exp_avg_sq"):
            assert torch.equal(before.tensor(name, role).float(), after.tensor(name, role))
    with pytest.raises(CheckpointError, match="exists"):
        ds_to_universal.main(args)


def test_a_checkpoint_of_zoo_becomes_universal(tmp_path: Path) -> None:
    def job(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        document = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 2},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path), tag="one")
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    weights = sim.run(2, job)[0]

    class Args:
        input_folder, output_folder = str(tmp_path / "one"), str(tmp_path / "made" / "one_universal")

    ds_to_universal.main(Args)
    found = load_deepspeed(tmp_path / "made")
    for name, value in weights.items():
        assert torch.equal(found.tensor(name, "parameter"), value)
        assert found.tensor(name, "exp_avg").shape == value.shape


def test_one_rank_reads_whole_weights_while_the_others_do_something_else(tmp_path: Path) -> None:
    """As programs do after training: ``if rank == 0: get_fp32_state_dict_from_zero_checkpoint(...)``."""

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        document = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 3},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
        engine.save_checkpoint(str(tmp_path))
        if rank == 0:
            found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
            torch.manual_seed(0)
            assert torch.equal(found["weight"], nn.Linear(3, 4).weight)
        deepspeed.comm.barrier()

    sim.run(2, job)


def test_one_file(tmp_path: Path) -> None:
    engine = TorchCheckpointEngine()
    info = CheckpointCommitInfo("one", str(tmp_path), save_latest=True)
    engine.makedirs(str(tmp_path / "a" / "b"))
    engine.makedirs(str(tmp_path / "a" / "b"), exist_ok=True)
    with pytest.raises(FileExistsError):
        engine.makedirs(str(tmp_path / "a"))
    assert engine.create(info) is None
    path = str(tmp_path / "a" / "x.pt")
    engine.save({"t": torch.ones(2)}, path)
    with pytest.raises(Exception, match="pickle"):
        engine.save({"t": lambda: None}, path)
    assert torch.equal(engine.load(path)["t"], torch.ones(2))  # the one before
    assert [entry.name for entry in (tmp_path / "a").iterdir() if entry.is_file()] == ["x.pt"]
    assert engine.commit(info) is True
    assert (engine.name, engine.is_decoupled(), engine.preserves_storage_sharing()) == (
        "TorchCheckpointEngine", False, True,
    )  # fmt: skip
    assert [engine.is_data_parallel_writer(rank) for rank in (0, 1)] == [True, False]
    engine.cleanup()

    class Mine(CheckpointEngine):  # type: ignore[misc]
        def create(self, info: Any) -> None: ...

        def save(self, state_dict: Any, path: str) -> None:
            Path(path).write_text(json.dumps(state_dict), encoding="utf-8")

        def load(self, path: str, map_location: Any = None) -> Any:
            return json.loads(Path(path).read_text(encoding="utf-8"))

        def commit(self, info: Any) -> bool:
            return True

    mine = Mine({})
    mine.save([1], path)
    assert mine.load(path) == [1]
