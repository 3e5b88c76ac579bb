"""``deepspeed.checkpoint``: names, keys, universal checkpoints, one file."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize("converts", [0, 1])
def test_one_rank_makes_a_checkpoint_universal_while_the_others_wait(tmp_path: Path, converts: int) -> None:
    def job(rank: int) -> None:
        model = nn.Linear(3, 4)
        document = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 1},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path), tag="one")
        if rank == converts:
            for given, made in ((tmp_path / "one", "ours"), (GOLDEN / "stage1" / "step", "theirs")):
                ds_to_universal.main(
                    argparse.Namespace(input_folder=str(given), output_folder=str(tmp_path / made / "universal"))
                )
        deepspeed.comm.barrier()

    sim.run(2, job)
    assert load_deepspeed(tmp_path / "ours").shapes == {"bias": (4,), "weight": (4, 3)}
    assert load_deepspeed(tmp_path / "theirs").shapes


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


def _trained(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.register_buffer("count", torch.arange(3))
    document = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 5},
        **more,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    engine.backward(engine(x).square().mean())
    engine.step()
    return engine


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["all ranks", "gathered", "one rank"])
def test_a_model_that_an_engine_has_takes_the_weights_of_a_checkpoint(tmp_path: Path, stage: int, how: str) -> None:
    load = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint

    def job(rank: int) -> None:
        engine = _trained(stage)
        engine.save_checkpoint(str(tmp_path))
        wanted = {name: value.to(torch.bfloat16) for name, value in engine.engine.module_state_dict().items()}
        engine.backward(engine(torch.ones(2, 4).bfloat16()).square().mean())  # the model goes on: it is not the same
        engine.step()
        if how == "one rank" and rank == 1:
            dist.barrier()
            return
        parameters = list(engine.module.parameters()) if how == "gathered" else []
        with deepspeed.zero.GatheredParameters(parameters):
            model = load(engine.module, str(tmp_path))
            found = model.state_dict()
            assert model is engine.module
            assert model[2].weight is model[0].weight
            for name, value in wanted.items():
                assert torch.equal(found[name].to(torch.bfloat16), value), name
        assert torch.isfinite(model(torch.ones(2, 4).bfloat16())).all()
        if how == "one rank":
            dist.barrier()
            return
        if stage == 3:
            assert all(type(p) is nn.Parameter for p in model.parameters())
            engine.backward(engine(torch.ones(2, 4).bfloat16()).square().mean())
            with pytest.raises(ValueError, match="came into the model after the ZeRO optimizer"):
                engine.step()
            engine.destroy()

    sim.run(2, job)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["Fail", "FAIL", "Warn", "warn", "Ignore", None])
def test_what_becomes_of_different_tags(tmp_path: Path, mode: str | None, caplog: pytest.LogCaptureFixture) -> None:
    def job(rank: int) -> None:
        engine = _trained(1, **({} if mode is None else {"checkpoint": {"tag_validation": mode}}))
        if mode in ("Fail", "FAIL"):
            with pytest.raises(
                AssertionError, match=r"'tag-0' on rank 0 and 'tag-1' on rank 1.*'Fail'.*one tag"
            ) as caught:
                engine.save_checkpoint(str(tmp_path), tag=f"tag-{rank}")
            assert isinstance(caught.value, ValueError)
            assert not list(tmp_path.iterdir())
        else:
            assert engine.save_checkpoint(str(tmp_path), tag=f"tag-{rank}")
            assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "tag-0")
        engine.save_checkpoint(str(tmp_path), tag=7)
        assert engine.load_checkpoint(str(tmp_path), tag=7)[0] == str(tmp_path / "7")

    with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
        sim.run(2, job)
    assert caplog.text.count("that of rank 0 counts") == (mode in ("Warn", "warn", None))
    assert not (tmp_path / "tag-1").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("bad", ["", None, 3])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_folder_without_a_name_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, ranks: tuple[int, ...]
) -> None:
    monkeypatch.chdir(tmp_path)

    def job(rank: int) -> None:
        engine = _trained(0)
        with pytest.raises(ValueError, match=f"save_dir={bad!r} names no folder; '.' is the current one"):
            engine.save_checkpoint(bad if rank in ranks else str(tmp_path / "there"))
        for act in (engine.engine.save_checkpoint, engine.engine.load_checkpoint, engine.save_16bit_model):
            with pytest.raises(ValueError, match=r"names no folder|it is a path"):
                act(bad)
        if 0 in ranks:
            with pytest.raises(ValueError, match="function, which a checkpoint cannot give back"):
                engine.save_checkpoint(str(tmp_path / "there"), client_state={"f": lambda: None} if rank == 0 else {})
        assert engine.save_checkpoint(".")

    sim.run(2, job)
    assert {"global_step1"} == {path.name for path in tmp_path.iterdir() if path.is_dir()} - {"there"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "weights.ckpt", "pytorch_model.bin", "model.safetensors"])
def test_whole_weights_under_the_names_that_programs_give(tmp_path: Path, name: str) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = _trained(2)
        assert engine.save_16bit_model(str(tmp_path), name)
        return {key: value.clone() for key, value in engine.module.state_dict().items()}

    wanted = sim.run(2, job)[0]
    if name.endswith(".safetensors"):
        found = safetensors.torch.load_file(tmp_path / name)
    else:
        found = torch.load(tmp_path / name, weights_only=True)
    for key, value in found.items():
        assert torch.equal(value, wanted[key])


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
