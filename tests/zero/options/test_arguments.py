"""What the constructors take: optimizer instances, named parameters, typed options."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import subprocess
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import (
    Precision,
    Stage0Optimizer,
    Stage1Optimizer,
    Stage2Optimizer,
    Stage3Optimizer,
    ZeroConfig,
    ZeroOptimizer,
)
from zoo.zero.options.keywords import OptimizerArguments
from zoo.zero.options.zero_options import ZeroOptions

ROOT = Path(__file__).resolve().parents[3]
ALL = [Stage0Optimizer, Stage1Optimizer, Stage2Optimizer, Stage3Optimizer]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def two_groups(model: nn.Sequential, cls: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = cls(
        [{"params": model[2].parameters(), "lr": 0.3}, {"params": model[0].parameters(), "weight_decay": 0.5}],
        lr=0.1, **options,
    )  # fmt: skip
    return made


def train(model: nn.Module, optimizer: Any, rank: int, after: Callable[[], object] = lambda: None) -> None:
    for step in range(3):
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


# Instances -----------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, zoo.optim.AdamW])
@pytest.mark.parametrize("which", ["before", "after", "zero"])
def test_an_instance_gives_class_options_and_groups(cls: type[ZeroOptimizer], kind: Any, which: str) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model = small()
        inner = two_groups(model, kind, weight_decay=0.01)
        groups = list(inner.param_groups)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) if which == "before" else None
        zero = cls(model, optimizer=inner, param_persistence_threshold=0)
        if schedule is None:
            schedule = torch.optim.lr_scheduler.StepLR(inner if which == "after" else zero, 1, 0.5)
        assert all(a is b for a, b in zip(groups, zero.param_groups, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, zero, rank, schedule.step)
        assert [group["lr"] for group in zero.inner.param_groups] == [0.3 / 4, 0.1 / 4]  # of the last update
        return zero.consolidated_parameters()

    plain = small()
    optimizer = two_groups(plain, kind, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        for rank in range(2):
            (plain(data(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    expected = dict(plain.named_parameters())
    for got in sim.run(2, fn):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


def test_arguments_that_an_instance_keeps_beside_its_groups_are_taken() -> None:
    model = small().bfloat16()
    inner = zoo.optim.AdamW(model.parameters(), lr=0.1, master_dtype=None, state_dtype=torch.bfloat16, amsgrad=True)
    zero = Stage1Optimizer(model, optimizer=inner)
    wrapped: Any = zero.inner
    assert type(wrapped) is zoo.optim.AdamW
    assert (wrapped.master_dtype, wrapped.state_dtype) == (None, torch.bfloat16)
    assert wrapped.defaults["amsgrad"]


def test_an_instance_of_whole_tensors_works() -> None:
    model = small()
    train(model, Stage2Optimizer(model, optimizer=zoo.optim.Lamb(model.parameters(), lr=0.1)), 0)


@pytest.mark.dear
def test_an_instance_that_was_taken_over_refuses_to_step() -> None:
    model = small()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = Stage1Optimizer(model, optimizer=inner)
    with pytest.raises(ValueError, match=r"AdamW.*Stage1Optimizer.*its step\(\)"):
        inner.step()
    saved = inner.__class__.state_dict(inner)
    with pytest.raises(ValueError, match=r"state_dict\(\) of the \w+ instance that .*call its state_dict\(\)"):
        inner.state_dict()
    with pytest.raises(ValueError, match=r"call its load_state_dict\(\)"):
        inner.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"add_param_group"):
        inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    zero.close()
    del zero
    gc.collect()
    model(data(0)).sum().backward()
    inner.step()


def test_hooks_of_an_instance_are_those_of_its_taker() -> None:
    model = nn.Linear(4, 2)
    instance = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[tuple[str, Any]] = []
    instance.register_step_pre_hook(lambda optimizer, *_: found.append(("before", optimizer)))
    handle = instance.register_step_post_hook(lambda optimizer, *_: found.append(("after", optimizer)))
    instance.register_state_dict_post_hook(lambda optimizer, state: found.append(("saved", optimizer)))
    instance.register_load_state_dict_pre_hook(lambda optimizer, state: found.append(("loading", optimizer)))
    optimizer = ZeroOptimizer(model, optimizer=instance)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert found == [(what, optimizer) for what in ("before", "after", "saved", "loading")]
    handle.remove()
    instance.register_step_post_hook(lambda *_: found.append(("later", None)))
    found.clear()
    step()
    assert [what for what, _ in found] == ["before", "later"]


def test_adagrad_gives_its_states_back() -> None:
    model = small()
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    zero = Stage1Optimizer(model, optimizer=inner)
    assert not inner.state
    assert zero.inner.defaults["initial_accumulator_value"] == 0.5


class Odd(torch.optim.SGD):
    """Keeps an argument where nobody can find it."""

    def __init__(self, params: Any, lr: float, flavour: str, twist: int = 1) -> None:
        self._flavour_of_this_one = flavour
        super().__init__(params, lr=lr)


class Changed(torch.optim.SGD):
    """Has an attribute that is changed after construction."""

    def __init__(self, params: Any, lr: float) -> None:
        self.bold = False
        super().__init__(params, lr=lr)


def test_instances_that_cannot_be_taken_over_say_why() -> None:
    model = small()

    def refused(optimizer: Any, words: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=words):
            Stage1Optimizer(model, optimizer=optimizer, **more)

    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    refused(inner, "lr=.*belong", lr=0.2)
    refused(inner, "params=", params=model.parameters())
    train(model, inner, 0)
    refused(inner, r"has state of \d+ parameters.*before its first step")
    refused(torch.optim.SGD(model[0].parameters(), lr=0.1), r"2 trainable.*in no group of optimizer=.*2\.weight")
    foreign = nn.Parameter(torch.ones(2))
    refused(torch.optim.SGD([*model.parameters(), foreign], lr=0.1), "group 0 of optimizer=.*not in the model")
    other = small()
    refused(Stage1Optimizer(other), "Stage1Optimizer.*cannot be wrapped")
    Stage1Optimizer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # nothing was changed by all this


def test_instances_that_cannot_be_built_again_are_taken_as_they_are_where_nothing_is_split() -> None:
    def fn(rank: int, world: int) -> None:
        for make, words in ((odd, "flavour.*pass the class"), (changed, "bold.*True.*False.*pass the class")):
            model = small()
            if world > 1:
                with pytest.raises(NotImplementedError, match=words):
                    Stage1Optimizer(model, optimizer=make(model))
            train(model, ZeroOptimizer(model, stage=0 if world > 1 else 1, optimizer=make(model)), 0)
            plain = small()
            train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0)
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))

    def odd(model: nn.Module) -> Odd:
        return Odd(model.parameters(), 0.1, "sour")

    def changed(model: nn.Module) -> Changed:
        made = Changed(model.parameters(), 0.1)
        made.bold = True
        return made

    for world in (1, 2):
        sim.run(world, lambda rank, world=world: fn(rank, world))


def test_frozen_parameters_in_the_groups_of_an_instance_stay_frozen() -> None:
    model = small()
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = Stage3Optimizer(model, optimizer=inner)
    train(model, zero, 0)
    assert torch.equal(zero.consolidated_parameters()["0.bias"], before)


# Named parameters ----------------------------------------------------------------------------------------------------


def test_named_parameters_keep_their_names() -> None:
    model = small()
    model[0].bias.requires_grad_(False)
    zero = Stage2Optimizer(model, params=model.named_parameters(), lr=0.1)
    assert zero.param_groups[0]["param_names"] == ["0.weight", "2.weight", "2.bias"]
    assert [tuple(p.shape) for p in zero.param_groups[0]["params"]] == [(6, 4), (4, 6), (4,)]
    train(model, zero, 0)
    zero.load_state_dict(zero.state_dict())

    model = small()
    groups = [{"params": model[i].named_parameters(str(i)), "lr": 0.1 * (i + 1)} for i in (0, 2)]
    zero = Stage3Optimizer(model, params=groups)
    assert [g["param_names"] for g in zero.param_groups] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert [g["lr"] for g in zero.param_groups] == [0.1, pytest.approx(0.3)]

    model = small()
    zero = Stage1Optimizer(model, optimizer=torch.optim.SGD(model.named_parameters(), lr=0.1))
    assert zero.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    train(model, zero, 0)


def test_a_tuple_that_is_no_pair_is_refused() -> None:
    model = small()
    for wrong in (("0.weight",), ("0.weight", model[0].weight, 0.1), (0, model[0].weight)):
        with pytest.raises(ValueError, match="group 0 of params= is a tuple; allowed are parameters, or pairs"):
            Stage1Optimizer(model, lr=0.1, params=[wrong])


def test_names_for_some_parameters_only_are_refused() -> None:
    model = small()
    first, *rest = model.named_parameters()
    with pytest.raises(ValueError, match=r"1 of 4 .*with a name"):
        Stage1Optimizer(model, params=[first, *(p for _, p in rest)])
    with pytest.raises(ValueError, match=r"groups 0 .*with names.*1 .*without"):
        Stage1Optimizer(model, params=[{"params": [first]}, {"params": [p for _, p in rest]}])
    with pytest.raises(ValueError, match=r"group 0 .* is a str"):
        Stage1Optimizer(model, params=["weight"])


# Typed options -------------------------------------------------------------------------------------------------------


def test_the_typed_options_are_those_of_the_config() -> None:
    hints = typing.get_type_hints(ZeroOptions)
    fields = {name: field for name, field in ZeroConfig.model_fields.items() if name != "stage"}
    assert list(hints) == list(fields)
    for name, field in fields.items():
        given = set(typing.get_args(hints[name])) or {hints[name]}
        meant = set(typing.get_args(field.annotation)) or {field.annotation}
        assert meant <= given, name
        assert not ZeroOptions.__required_keys__
    assert not set(typing.get_type_hints(OptimizerArguments)) & set(ZeroConfig.model_fields)


@pytest.mark.parametrize("cls", [ZeroOptimizer, *ALL])
def test_the_signature_shows_every_option(cls: type[ZeroOptimizer]) -> None:
    shown = inspect.signature(cls).parameters
    assert {*ZeroConfig.model_fields, "optimizer", "params", "clip_norm", "lr", "betas"} <= set(shown)
    assert all(p.kind is p.KEYWORD_ONLY for n, p in shown.items() if n not in ("model", "options"))


@pytest.mark.slow
def test_a_type_checker_knows_the_options(tmp_path: Path) -> None:
    good = """
import torch
from zoo.zero import Stage2Optimizer, Stage3Optimizer, ZeroOptimizer
model = torch.nn.Linear(2, 2)
Stage3Optimizer(model, optimizer=torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), clip_norm=1.0, max_live_parameters=0)
Stage2Optimizer(model, optimizer_options={"flavour": "sour"}, offload_optimizer={"device": "cpu"})
ZeroOptimizer(model, stage=1, optimizer=torch.optim.SGD(model.named_parameters(), lr=0.1))
"""
    bad = "Stage2Optimizer(model, clip_nrom=1.0)", 'Stage3Optimizer(model, overlap_comm="yes")'
    (tmp_path / "snippet.py").write_text(good + "\n".join(bad))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        str(tmp_path / "snippet.py"),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert 'Unexpected keyword argument "clip_nrom"' in found
    assert 'Argument "overlap_comm" to "Stage3Optimizer" has incompatible type "str"' in found
    assert "Found 2 errors" in found


def test_arguments_of_the_optimizer_may_come_as_a_mapping() -> None:
    model = small()
    zero = Stage2Optimizer(model, optimizer=torch.optim.SGD, optimizer_options={"lr": 0.25, "momentum": 0.5})
    assert (zero.param_groups[0]["lr"], zero.param_groups[0]["momentum"]) == (0.25, 0.5)
    with pytest.raises(ValueError, match=r"optimizer_options.*lr.*keyword"):
        Stage2Optimizer(small(), optimizer_options={"lr": 0.25}, lr=0.5)


def test_a_stage_of_its_own_takes_no_other() -> None:
    with pytest.raises(ValueError, match="Stage2Optimizer got stage=3"):
        Stage2Optimizer(small(), stage=3)
    assert Stage2Optimizer(small(), config=ZeroConfig(stage=1)).config.stage == 2


@pytest.mark.parametrize("cls", ALL)
def test_zero_means_the_smallest_size(cls: type[ZeroOptimizer]) -> None:
    def fn(rank: int, size: int) -> tuple[int, dict[str, torch.Tensor]]:
        model = small().bfloat16()
        zero = cls(
            model, optimizer=torch.optim.AdamW, lr=0.1, reduce_bucket_size=size, allgather_bucket_size=size,
            sub_group_size=size, param_persistence_threshold=0,
        )  # fmt: skip
        for step in range(2):
            model(data(rank, step).bfloat16()).square().mean().backward()
            zero.step()
            zero.zero_grad()
        return len(zero.buckets), zero.consolidated_parameters()

    for (num, got), (expected_num, expected) in zip(
        sim.run(2, lambda rank: fn(rank, 0)), sim.run(2, lambda rank: fn(rank, 1)), strict=True
    ):
        assert num == expected_num == 2
        assert all(torch.equal(got[name], expected[name]) for name in expected)


# Arguments of wrong kinds --------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"clip_norm": None}, ValueError, "clip_norm=None; it must be a norm > 0"),
    ({"clip_norm": "1"}, ValueError, "clip_norm='1'; it must be a norm > 0"),
    ({"loss_scale": math.inf}, ValueError, "finite scale > 0.*scale=inf"),
    ({"params": [{"lr": 1}]}, ValueError, "group 0 of params= has 'lr', and no 'params'"),
    ({"config": 3}, ValueError, r"config=3 is a int; allowed are a zoo\.zero\.ZeroConfig or a mapping"),
    ({"config": {"overlap_com": True}}, ValueError, "overlap_com"),
    ({"overlap_com": True}, TypeError, "overlap_com=True is an option neither.*AdamW.*Did you mean overlap_comm"),
    ({"clip_nrom": 1.0}, TypeError, "Did you mean clip_norm"),
    ({"weight_dekay": 1.0}, TypeError, "Did you mean weight_decay"),
    ({"group": 7}, ValueError, "group=7 is a int; allowed are a process group"),
    ({"group": [0, 1]}, ValueError, "group=.* is a list"),
    (
        {"precision": Precision(reduce="fp32")},
        ValueError,
        r"reduce='fp32'\); gradients are.*in one of.*bfloat16",
    ),
    ({"precision": Precision(reduce=torch.int8)}, ValueError, r"reduce=torch\.int8"),
    ({"precision": Precision(reduce=torch.complex64)}, ValueError, r"reduce=torch\.complex64"),
    ({"precision": torch.bfloat16}, ValueError, r"precision=torch.bfloat16; it takes a zoo\.zero\.Precision"),
    ({"units": "x"}, ValueError, "units='x' is a str; allowed are a list"),
    ({"units": nn.Linear}, ValueError, "units=<class .* is a type; allowed are a list"),
    ({"units": ["x"]}, ValueError, "units= has 'x' in it"),
    ({"units": [nn.Conv2d]}, ValueError, r"units=\[Conv2d\] matches no module"),
    ({"params": 5}, ValueError, "params=5 is a int; give parameters"),
    ({"params": torch.ones(2)}, ValueError, "is a Tensor; give parameters"),
    ({"precision": Precision(predivide="a")}, ValueError, r"predivide='a'\); gradients are divided by a number"),
    ({"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}, ValueError, "are one option; leave one out"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("options", "error", "match"), WRONG)
def test_arguments_of_wrong_kinds_are_refused_by_a_sentence(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = small()
    with pytest.raises(error, match=match):
        Stage2Optimizer(model, **options)
    train(model, Stage2Optimizer(model, lr=0.1), 0)  # nothing was changed


def test_documented_names_of_options_are_keywords(caplog: pytest.LogCaptureFixture) -> None:
    zero: Any = Stage3Optimizer
    made = zero(
        small(), stage3_prefetch_bucket_size=5, contiguous_gradients=False, cpu_offload=True, max_live_parameters=None
    ).config
    assert (made.prefetch_bucket_size, made.offload_optimizer.device, made.max_live_parameters) == (5, "cpu", None)
    assert "contiguous_gradients=False has no effect" in caplog.text
    assert "cpu_offload is deprecated" in caplog.text
    made = zero(small(), config={"stage3_max_live_parameters": 7, "overlap_comm": False}, overlap_comm=True).config
    assert (made.stage, made.max_live_parameters, made.overlap_comm) == (3, 7, True)
    assert ZeroOptimizer(small(), config={"stage": 2}).config.stage == 2


def test_the_largest_gradient_by_either_name() -> None:
    model = small()
    optimizer = Stage1Optimizer(model, lr=0.1)
    model(data(0)).square().mean().backward()
    norm: Any = "inf"
    assert optimizer.global_norm(norm) == optimizer.global_norm(math.inf) > 0
    with pytest.raises(ValueError, match="norm_type='two'"):
        optimizer.clip_grad_norm_(1.0, norm_type="two")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [5, None, nn.Linear])
def test_what_is_no_model_is_refused_by_a_sentence(model: Any) -> None:
    with pytest.raises(ValueError, match=r"the model is .*; give an nn\.Module that was made"):
        Stage2Optimizer(model, lr=0.1)


def test_a_stage_that_is_not_there_is_refused_by_a_sentence() -> None:
    with pytest.raises(ValueError, match="stage") as error:
        ZeroOptimizer(small(), stage=4)
    assert "pydantic" not in str(error.value)


def test_gradients_from_before_construction_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    model(torch.randn(2, next(model.parameters()).shape[1])).sum().backward()
    with caplog.at_level(logging.WARNING, "zoo.zero"):
        Stage2Optimizer(model, lr=0.1)
    assert "have gradients from before construction" in caplog.text
    assert all(p.grad is None for p in model.parameters())
