"""Checkpoints of the real DeepSpeed: every value as it says it, and training that goes on with its losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpointing.foreign.golden_model import BEFORE, LR, Cut, Net, batches, groups, loss_of

from zoo import sim
from zoo.checkpointing import CheckpointError, MissingStateError
from zoo.checkpointing.foreign import ForeignCheckpoint, load_deepspeed, load_torch
from zoo.checkpointing.foreign.deepspeed_whole import _dealt, _with_steps
from zoo.layout import Box
from zoo.zero import Precision, ZeroOptimizer, safe_get_full_fp32_param

GOLDEN = Path(__file__).parent / "golden"
CASES = ["experts", "experts_stage0", "pipeline", "pipeline_stage0", "pipeline_tied", "pipeline_tied_stage0",
         "stage0", "stage0_fp16", "stage1", "stage1_bf16", "stage2", "stage2_fp16", "stage2_round_robin", "stage3",
         "stage3_bf16", "tensor_stage0", "tensor_stage1", "tensor_stage3"]  # fmt: skip
TRAINED = [n for n in CASES if not n.startswith(("pipeline", "experts", "tensor"))]


def names() -> list[list[str]]:
    model = Net()
    name_of = {id(p): name for name, p in model.named_parameters()}
    return [[name_of[id(p)] for p in group["params"]] for group in groups(model)]


def opened(name: str, tag: str = "step", **options: Any) -> ForeignCheckpoint:
    ends = [["tied_modules.ends.weight", "2.weight", "2.bias", "tied_modules.ends.weight", "5.weight", "5.bias"]]
    cut = [[key for key, p in Cut().named_parameters() if p.requires_grad]]
    named = {"stage0": names(), "stage0_fp16": names(), "tensor_stage0": cut, "pipeline_tied_stage0": ends}
    return load_deepspeed(GOLDEN / name, tag, groups=named.get(name), **options)


@pytest.mark.parametrize("name", [*CASES, "stage2/universal", "stage3/universal"])
def test_every_value_is_the_one_that_deepspeed_has(name: str) -> None:
    name, _, tag = name.partition("/")
    found, expected = opened(name, tag or "step"), load_file(GOLDEN / name / "expected.safetensors")
    compared = 0
    for key, value in expected.items():
        role, _, parameter = key.partition("|")
        assert torch.equal(found.tensor(parameter, role).float().reshape(-1), value.reshape(-1)), key
        compared += 1
    assert compared == len(expected)
    assert compared >= 8 or name in ("stage0_fp16", "pipeline_tied")
    trained = {n for n, roles in found.roles.items() if "exp_avg" in roles}
    assert {found.scalars[f"step/{n}"] for n in trained} == {float(BEFORE + (name == "stage0_fp16"))}
    assert found.meta["client"] == {"note": [1, (2, "three")]}
    assert found.unknown == []


@pytest.mark.parametrize("name", TRAINED)
def test_masters_are_the_parameters_that_the_model_computed_with(name: str) -> None:
    # Of stages 0 to 2 the model's file has all of them, rounded to its dtype.
    found = opened(name)
    model = load_torch(min((GOLDEN / name / "step").glob("*mp_rank_00_model_states.pt"))).value["module"]
    for key, stored in model.items():
        if key in found.shapes and "parameter" in found.roles[key] and stored.numel:
            assert torch.equal(found.tensor(key).to(stored.dtype), stored.tensor()), key
    assert found.tensor("shift", "buffer").tolist() == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert found.meta["tied"] == {"again.weight": "middle.weight"} or "stage3" in name


def losses(
    found: ForeignCheckpoint, stage: int, world: int, dtype: torch.dtype = torch.float32, grouped: Any = groups
) -> list[list[float]]:
    """By rank, those of the steps after the checkpoint."""
    half = {} if dtype is torch.float32 else {"precision": Precision(param=dtype)}
    scale = {"loss_scale": "dynamic"} if dtype is torch.float16 else {}

    def job(rank: int) -> list[float]:
        model = Net()
        optimizer = ZeroOptimizer(
            model, stage=stage, params=grouped(model), optimizer=torch.optim.AdamW, lr=LR,
            clip_norm=float(found.meta["deepspeed"].get("clip_grad", 1.0)), **half, **scale,
        )  # fmt: skip
        if grouped is groups:
            for group, said in zip(optimizer.param_groups, found.meta["deepspeed"]["param_groups"], strict=True):
                assert (group["lr"], group["weight_decay"]) == (said["lr"], said["weight_decay"])
        optimizer.load_state(found.read, found.scalars)
        model.shift.copy_(found.tensor("shift", "buffer"))
        mine = []
        for number in range(BEFORE, len(batches(0))):
            parts = [batches(r, dtype)[number] for r in range(rank, 2, world)]
            loss = loss_of(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mine.append(float(loss.detach()))
        return mine

    return sim.run(world, job)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "stage"),
    [("stage0", 2), ("stage1", 3), ("stage2", 1), ("stage2_round_robin", 2), ("stage3", 3), ("stage3", 0)],
)
def test_training_goes_on_with_the_losses_of_deepspeed(name: str, stage: int) -> None:
    theirs = json.loads((GOLDEN / name / "losses.json").read_text())
    ours = losses(opened(name), stage, 2)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_training_goes_on_from_a_universal_checkpoint_on_one_rank(name: str) -> None:
    theirs = torch.tensor(json.loads((GOLDEN / name / "losses.json").read_text())).mean(0)
    found = opened(name, "universal")
    assert losses(found, 1, 1)[0] == pytest.approx(theirs.tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("stage1_bf16", torch.bfloat16), ("stage3_bf16", torch.bfloat16),
                                             ("stage2_fp16", torch.float16),
                                             ("stage0_fp16", torch.float16)])  # fmt: skip
def test_training_in_16_bits_goes_on_near_the_losses_of_deepspeed(name: str, dtype: torch.dtype) -> None:
    # They are the same on the machine that wrote them; another one may round sums in 16 bits in another way.
    theirs = json.loads((GOLDEN / name / "losses.json").read_text())
    ours = losses(opened(name), 2, 2, dtype)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-3)


def test_the_loss_scaler_is_where_it_was() -> None:
    # It began at 2^6, and all steps were good.
    assert {k: v for k, v in opened("stage2_fp16").scalars.items() if k.startswith("zero/")} == {
        "zero/scale": 64.0, "zero/good_steps": 3.0, "zero/lives": 2.0
    }  # fmt: skip
    assert opened("stage0_fp16").scalars["zero/scale"] == 64.0
    assert not any(key.startswith("zero/") for key in opened("stage2").scalars)


def test_parts_and_boxes_are_those_of_the_whole() -> None:
    found = opened("stage3")
    whole = found.tensor("middle.weight", "exp_avg")
    assert torch.equal(found.read("middle.weight", "exp_avg", 20, 13), whole.reshape(-1)[20:33])
    assert torch.equal(found.read_box("middle.weight", "exp_avg", Box((2, 3), (4, 2))), whole[2:6, 3:5])
    with pytest.raises(MissingStateError, match=r"has no momentum of 'middle.weight'"):
        found.read("middle.weight", "momentum", 0, 1)
    with pytest.raises(CheckpointError, match=r"lies outside"):
        found.read("middle.weight", "exp_avg", 40, 10)


def test_states_by_number_need_the_names_of_the_groups() -> None:
    with pytest.raises(CheckpointError, match=r"written without ZeRO.*groups="):
        load_deepspeed(GOLDEN / "stage0", "step")
    assert set(load_deepspeed(GOLDEN / "stage0", "step", optimizer_states=False).roles["last.weight"]) == {"parameter"}
    with pytest.raises(CheckpointError, match=r"does not have its shape"):
        load_deepspeed(GOLDEN / "stage0", "step", groups=[names()[0][::-1], names()[1]])


def test_moments_without_zero_in_fp16_are_those_of_whole_gradients(tmp_path: Path) -> None:
    """DeepSpeed 0.18.3 to 0.19.8 divide such gradients by the loss scale, here 64, and multiply no loss with it."""
    found, other = opened("stage0_fp16"), tmp_path / "run"
    path = Path("step") / "mp_rank_00_model_states.pt"
    stored = torch.load(GOLDEN / "stage0_fp16" / path, weights_only=False)
    state = stored["optimizer"]["optimizer_state_dict"]["state"][0]
    first = names()[0][0]
    assert torch.equal(found.tensor(first, "exp_avg"), 64 * state["exp_avg"])
    assert torch.equal(found.tensor(first, "exp_avg_sq"), 64**2 * state["exp_avg_sq"])
    twin = opened("stage2_fp16")  # the same training but for ZeRO, and with one step less that was counted
    ratio = found.tensor(first, "exp_avg").norm() / twin.tensor(first, "exp_avg").norm()
    assert 0.8 < ratio < 1.25
    shutil.copytree(GOLDEN / "stage0_fp16", other)
    for version in ("0.18.2", "0.19.9", "1.0.0", None):
        torch.save({**stored, "ds_version": version}, other / path)
        asis = load_deepspeed(other, "step", groups=names())
        assert torch.equal(asis.tensor(first, "exp_avg"), state["exp_avg"]), version


def test_stages_that_share_a_layer_need_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not as many as its layers have parameters \(5\).*groups="):
        load_deepspeed(GOLDEN / "pipeline_tied_stage0", "step")
    weights = load_deepspeed(GOLDEN / "pipeline_tied_stage0", "step", optimizer_states=False)
    assert set(weights.shapes) == {"0.weight", "2.weight", "2.bias", "5.weight", "5.bias"}
    told = {"0.": "tied_modules.ends.", "4.": "tied_modules.ends."}
    found, named = load_deepspeed(GOLDEN / "pipeline_tied_stage0", "step", shared=told), opened("pipeline_tied_stage0")
    assert found.roles == named.roles
    assert all(torch.equal(found.tensor(n, r), named.tensor(n, r)) for n, roles in named.roles.items() for r in roles)
    for wrong in ({"0.": "tied_modules.ends."}, {**told, "5.": "tied_modules.ends."}):
        with pytest.raises(CheckpointError, match=r"Give groups="):
            load_deepspeed(GOLDEN / "pipeline_tied_stage0", "step", shared=wrong)
    with pytest.raises(CheckpointError, match=r"which of its layers is 'tied_modules\.ends\.weight': 0 could"):
        load_deepspeed(GOLDEN / "pipeline_tied_stage0", "step", groups=[
            ["0.weight", "2.weight", "2.bias", "tied_modules.ends.weight", "5.weight", "5.bias"]
        ])  # fmt: skip
    layers = ["0", "2", "3", "5"]
    given = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    with pytest.raises(CheckpointError, match=r"does not have its shape"):
        load_deepspeed(GOLDEN / "pipeline_stage0", "step", groups=[given[::-1]])
    with pytest.raises(CheckpointError, match=r"is one name more than"):
        load_deepspeed(GOLDEN / "pipeline_stage0", "step", groups=[[*given, given[0]]])
    whole = load_deepspeed(GOLDEN / "pipeline_stage0", "step", groups=[given])
    assert torch.equal(whole.tensor("5.bias", "exp_avg"), opened("pipeline_stage0").tensor("5.bias", "exp_avg"))


def rewritten(folder: Path, name: str, change: Any) -> Path:
    """A copy of a golden checkpoint; ``change(file name, content)`` gives each file another content, or None."""
    shutil.copytree(GOLDEN / name, folder)
    for file in (folder / "step").glob("*.pt"):
        content = torch.load(file, weights_only=False)
        if change(file.name, content) is not None:
            torch.save(content, file)
    return folder


def test_flat_masters_and_states_of_a_fused_optimizer(tmp_path: Path) -> None:
    """As DeepSpeed's FP16_Optimizer has them on a GPU: one tensor for each group."""

    def flatten(name: str, content: Any) -> Any:
        outer = content["optimizer"]
        inner, masters = outer["optimizer_state_dict"], outer.pop("fp32_groups")
        outer["fp32_groups_flat"] = [torch.cat([p.reshape(-1) for p in group]) for group in masters]
        flat = {}
        for number, group in enumerate(inner["param_groups"]):
            states = [inner["state"][member] for member in group["params"]]
            roles = {role: torch.cat([s[role].reshape(-1) for s in states]) for role in ("exp_avg", "exp_avg_sq")}
            flat[number] = {**roles, "step": states[0]["step"] if number else int(states[0]["step"])}
            group["params"] = [number]
        inner["state"] = flat
        return content

    whole = opened("stage0_fp16")
    found = load_deepspeed(rewritten(tmp_path / "run", "stage0_fp16", flatten), "step", groups=names())
    for name, roles in whole.roles.items():
        assert roles == found.roles[name]
        assert all(torch.equal(found.tensor(name, role), whole.tensor(name, role)) for role in roles)
    assert found.scalars == whole.scalars

    def shorten(name: str, content: Any) -> Any:
        flatten(name, content)["optimizer"]["optimizer_state_dict"]["state"][1]["exp_avg"].resize_(3)
        return content

    with pytest.raises(CheckpointError, match="has a flat exp_avg that is too short for its group"):
        load_deepspeed(rewritten(tmp_path / "short", "stage0_fp16", shorten), "step", groups=names())


def test_a_stage_that_has_a_part_of_a_layer_is_refused(tmp_path: Path) -> None:
    """As many numbers as there are parameters, and not where layers end: some are others than they seem."""

    def move(name: str, content: Any) -> Any:
        if name.startswith("mp_rank"):
            group = content["optimizer"]["param_groups"][0]
            group["params"] = list(range(3 if "00" in name else 5))
        return content

    with pytest.raises(CheckpointError, match=r"not as many as its layers have parameters \(8\)"):
        load_deepspeed(rewritten(tmp_path / "run", "pipeline_stage0", move), "step")

    def split(name: str, content: Any) -> Any:
        if name.startswith("mp_rank"):
            groups = content["optimizer"]["param_groups"]
            groups[:] = [{**groups[0], "params": [0, 2]}, {**groups[0], "params": [1, 3]}]
        return content

    folder = rewritten(tmp_path / "two", "pipeline_stage0", split)
    with pytest.raises(CheckpointError, match=r"Give groups="):
        load_deepspeed(folder, "step")
    given = [[f"{layer}.{part}" for layer in "0235"] for part in ("weight", "bias")]
    found, whole = load_deepspeed(folder, "step", groups=given), opened("pipeline_stage0")
    assert all(torch.equal(found.tensor(n, "exp_avg"), whole.tensor(n, "exp_avg")) for n in whole.roles)
    with pytest.raises(CheckpointError, match="has 2 groups of parameters; groups= names 1"):
        load_deepspeed(folder, "step", groups=[[*given[0], *given[1]]])


def test_buffers_of_layers_have_no_numbers(tmp_path: Path) -> None:
    def add(name: str, content: Any) -> Any:
        if name == "layer_03-model_states.pt":
            content["running"] = torch.arange(3.0)
        if name == "mp_rank_01_model_states.pt":
            content["buffer_names"] = ["3.running"]
        return content

    found, whole = (
        load_deepspeed(rewritten(tmp_path / "run", "pipeline_stage0", add), "step"),
        opened("pipeline_stage0"),
    )
    assert found.roles["3.running"] == {"buffer": "float32"}
    assert all(torch.equal(found.tensor(n, "exp_avg"), whole.tensor(n, "exp_avg")) for n in whole.roles)


def test_several_groups_of_experts_are_refused(tmp_path: Path) -> None:
    def split(name: str, content: Any) -> Any:
        groups = content.get("optimizer", {}).get("param_groups")
        if groups is not None:
            half = len(groups[1]["params"]) // 2
            groups.append({**groups[1], "params": groups[1]["params"][half:]})
            groups[1]["params"] = groups[1]["params"][:half]
        return content

    with pytest.raises(CheckpointError, match="has the states of 2 groups of experts by numbers"):
        load_deepspeed(rewritten(tmp_path / "run", "experts_stage0", split), "step")

    def drop(name: str, content: Any) -> Any:
        if name.startswith("expp_rank_1"):
            content["optimizer"]["param_groups"].pop()
        return content

    with pytest.raises(CheckpointError, match="expp_rank_1 has no group 1, which has the experts"):
        load_deepspeed(rewritten(tmp_path / "less", "experts_stage0", drop), "step")


def test_ways_to_deal_layers() -> None:
    """Each stage has whole layers; what several have comes first and once in each; two ways are told apart by names."""
    a, b, ends = ["0.a", "0.b"], ["2.c"], ["tied_modules.ends.w"]
    assert _dealt([2, 1], [a, b]) == [[*a, *b]]
    assert _dealt([1, 2], [a, b]) == _dealt([2], [a, b]) == _dealt([2, 1, 1], [a, b]) == []
    assert _dealt([3, 2], [a, ends, ends, b]) == [[*ends, *a, *ends, *b]]
    assert _dealt([3, 1], [a, ends, ends, b]) == [[*ends, *a, *b]]  # the second use is the first stage's too
    assert _dealt([1, 1], [ends, ends, ends]) == [[*ends, *ends]]
    assert _dealt([2, 2], [["0.x"], ends, ["2.y"], ends]) == [[*ends, "0.x", *ends, "2.y"]]
    assert len(_dealt([1, 1, 1], [["0.x"], ["1.x"], ["2.x"]])) == 1


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith("_stage0") and not n.startswith("tensor")])
def test_states_by_number_have_options_and_names(name: str) -> None:
    found = opened(name)
    said = found.meta["deepspeed"]["param_groups"]
    assert {n for group in said for n in group["names"]} == {n for n, r in found.roles.items() if "exp_avg" in r}
    assert {group["lr"] for group in said} == {LR}


def test_experts_without_a_file_of_theirs_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "experts_stage0", folder)
    (folder / "step" / "expp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"1 groups of experts by numbers, in the files of ranks \[1\]"):
        load_deepspeed(folder, "step")
    (folder / "step" / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"in the files of ranks \[\].*optimizer_states=False"):
        load_deepspeed(folder, "step")
    assert len(load_deepspeed(folder, "step", optimizer_states=False).shapes) == 5 + 4 * 4


def test_weights_alone_are_the_masters() -> None:
    found = opened("stage1_bf16", optimizer_states=False)
    assert found.roles["last.weight"] == {"parameter": "float32"}
    assert not found.scalars


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "pipeline"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    for file in sorted((GOLDEN / name / "step").glob("*states.pt")):
        if file.name.startswith("layer"):
            continue  # of a pipeline, whose parameters are in the optimizer's files
        folder = tmp_path / file.name
        shutil.copytree(GOLDEN / name, folder)
        (folder / "step" / file.name).unlink()
        with pytest.raises(
            CheckpointError, match=r"missing|there are files of|has files of|is no checkpoint|no part of"
        ):
            load_deepspeed(folder, "step")


def test_latest_names_a_folder_beside_it_and_no_other(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "stage1", tmp_path / "run")
    assert load_deepspeed(tmp_path / "run").tag == "step"
    for bad in ("../run/step", "/etc", "..", "a" * 2000, ""):
        (tmp_path / "run" / "latest").write_text(bad)
        with pytest.raises(CheckpointError, match=r"cannot be a folder|bytes; it is the name|there is no folder"):
            load_deepspeed(tmp_path / "run")


def test_tensor_parallel_parts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "stage1", tmp_path / "run")
    step = tmp_path / "run" / "step"
    model = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
    model["checkpoint_parallel_dimensions"]["tp_degree"] = 2
    torch.save(model, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"2 tensor-parallel ranks.*ds_to_universal"):
        load_deepspeed(tmp_path / "run", "step")


def test_a_step_that_the_last_parameter_alone_has_is_the_step_of_its_group() -> None:
    """As DeepSpeed's fused Adam leaves them; a parameter without a state, which had no gradient, gets none."""
    states: list[dict[Any, Any]] = [{"step": 0, "exp_avg": 1}, {}, {"step": 7}]
    assert _with_steps(states) == [{"step": 7, "exp_avg": 1}, {}, {"step": 7}]
    assert _with_steps([{"step": torch.tensor(0.0)}, {"step": 3}])[0]["step"] == torch.tensor(0.0)
    assert _with_steps([{"momentum_buffer": 1}, {"step": 0}]) == [{"momentum_buffer": 1}, {"step": 0}]


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_that_keeps_no_steps_goes_on_after_those_that_it_took(stage: int, tmp_path: Path) -> None:
    """SGD of torch keeps momentum alone; zoo's counts steps, of which the first begins the momentum."""
    shutil.copytree(GOLDEN / "stage0", tmp_path / "run")
    path = tmp_path / "run" / "step" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    states, model["skipped_steps"] = model["optimizer"]["state"], 1
    model["optimizer"]["state"] = {key: {"momentum_buffer": kept["exp_avg"]} for key, kept in states.items()}
    torch.save(model, path)
    found = load_deepspeed(tmp_path / "run", "step", groups=names())
    momenta = {
        name: found.tensor(name, "momentum_buffer") for name in found.roles if found.roles[name].get("momentum_buffer")
    }
    assert {found.scalars[f"step/{name}"] for name in momenta} == {float(BEFORE - 1)}

    def job(rank: int) -> None:
        model, twin = Net(), Net()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer="SGD", lr=LR, momentum=0.9, params=groups(model))
        optimizer.load_state(found.read, found.scalars)
        model.shift.copy_(found.tensor("shift", "buffer"))
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(found.tensor(name, "parameter"))
        plain = torch.optim.SGD(groups(twin), lr=LR, momentum=0.9)
        for name, parameter in twin.named_parameters():
            if name in momenta:
                plain.state[parameter]["momentum_buffer"] = momenta[name].clone()
        for other in range(2):
            (loss_of(twin, batches(other)[BEFORE]) / 2).backward()
        plain.step()
        optimizer.backward(loss_of(model, batches(rank)[BEFORE]))
        optimizer.step()
        for name, parameter in twin.named_parameters():
            mine = safe_get_full_fp32_param(model.get_parameter(name))
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)

    sim.run(2, job)
