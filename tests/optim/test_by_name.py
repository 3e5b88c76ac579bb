"""The name of an optimizer in a configuration means what is documented for it, whatever the defaults of classes are."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.optim.peers import CASES, STEPS, gradient, start, trajectory
from torch import nn

from zoo import optim, registry, sim
from zoo.config import ConfigError, json_schema, load
from zoo.engine import initialize
from zoo.zero import ZeroOptimizer

PEERS = json.loads((Path(__file__).parent / "peers.json").read_text(encoding="utf-8"))

ADAM = {
    # FusedAdam, with its list of parameters
    "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True, "weight_decay": 0.0,
    "amsgrad": False, "set_grad_none": True,
    # DeepSpeedCPUAdam; adamw_mode is another name of adam_w_mode
    "fp32_optimizer_states": True,
}  # fmt: skip
DOCUMENTED: dict[str, dict[str, Any]] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "Lamb": {  # FusedLamb
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "eps_inside_sqrt": False,
        "weight_decay": 0.0, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01, "amsgrad": False,
    },
    # Of a later release: FusedLion and DeepSpeedCPULion, DeepSpeedCPUAdagrad.
    "Lion": {
        "lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "set_grad_none": True, "fp32_optimizer_states": True,
    },
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "amsgrad": False, "fp32_optimizer_states": True},
}  # fmt: skip
"""Arguments and defaults of the API pages, 9.1.1 (Adam on CPU), 9.1.2 (FusedAdam) and 9.1.3 (FusedLamb)."""


def build(name: str, params: dict[str, Any], tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = registry.build("optimizer", name, params, params=tensors)
    assert isinstance(found, torch.optim.Optimizer)
    return found


def after(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.Tensor:
    """The parameters after each of some steps."""
    parameter = nn.Parameter(torch.tensor(start()))
    return torch.tensor(trajectory(make([parameter]), parameter), dtype=torch.float64)


# -- arguments and defaults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_argument_has_its_documented_default(name: str) -> None:
    made, problems = registry.DEFAULT.parse("optimizer", name, {})
    assert problems == []
    assert {key: getattr(made, key) for key in DOCUMENTED[name]} == DOCUMENTED[name]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_defaults_are_those_that_deepspeed_has(name: str) -> None:
    made, _ = registry.DEFAULT.parse("optimizer", name, {})
    for signature in PEERS["signatures"][name].values():
        for key, value in signature.items():
            default = getattr(made, {"adamw_mode": "adam_w_mode"}.get(key, key))
            assert default == (tuple(value) if isinstance(value, list) else value), key


@pytest.mark.parametrize("name", ["ADAM", "adamw", "lAMB", "lion", "AdaGrad", "sgd", "MUON", "rmsprop", "nadam"])
def test_names_are_found_in_any_case(name: str) -> None:
    assert type(build(name, {}, [nn.Parameter(torch.ones(2, 2))])).__name__.lower() in (name.lower(), "adamw")


# -- meaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_the_steps_are_those_of_deepspeed(number: int) -> None:
    name, params = CASES[number]
    peer = PEERS["cases"][number]
    assert (peer["name"], peer["params"]) == (name, params), "python tests/optim/peers.py writes peers.json again"
    expected = torch.tensor(peer["after"], dtype=torch.float64)
    assert expected.diff(dim=0).abs().max() > 1e-4
    assert torch.allclose(after(lambda p: build(name, params, p)), expected, rtol=0, atol=1e-5)


torchs = torch.optim
SAME: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("Adam", {}, torchs.AdamW, {"weight_decay": 0.0}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.5}, torchs.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    (
        "Adam", {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False}, torchs.Adam, {"lr": 0.1, "weight_decay": 0.5},
    ),
    ("Adam", {"lr": 0.1, "weight_decay": 0.5, "adamw_mode": False}, torchs.Adam, {"lr": 0.1, "weight_decay": 0.5}),
    ("Adam", {"lr": 0.1, "betas": [0.5, 0.7], "eps": 0.1}, torchs.Adam, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 0.1}),
    ("Adam", {"lr": 0.1, "maximize": True}, torchs.Adam, {"lr": 0.1, "maximize": True}),
    ("AdamW", {"lr": 0.1}, torchs.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": True}, torchs.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    ("AdamW", {"lr": 0.1, "set_grad_none": False}, torchs.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
    ("AdamW", {"lr": 0.1, "torch_adam": True}, torchs.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
    ("AdamW", {"lr": 0.1, "torch_adam": True, "amsgrad": True}, torchs.AdamW,
     {"lr": 0.1, "weight_decay": 0.0, "amsgrad": True}),
    ("Adam", {"lr": 0.1, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.5, "foreach": False}, torchs.Adam,
     {"lr": 0.1, "weight_decay": 0.5}),
    ("Adagrad", {}, torchs.Adagrad, {}),
    ("Adagrad", {"lr_decay": 0.3, "initial_accumulator_value": 0.2, "weight_decay": 0.5, "maximize": True},
     torchs.Adagrad, {"lr_decay": 0.3, "initial_accumulator_value": 0.2, "weight_decay": 0.5, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, torchs.SGD, {"lr": 0.1, "momentum": 0.9}),
    ("RMSprop", {"alpha": 0.5}, torchs.RMSprop, {"alpha": 0.5}),
    ("NAdam", {}, torchs.NAdam, {}),
    ("RAdam", {}, torchs.RAdam, {}),
    ("Adamax", {}, torchs.Adamax, {}),
    ("Adadelta", {}, torchs.Adadelta, {}),
    ("ASGD", {}, torchs.ASGD, {}),
    ("Rprop", {}, torchs.Rprop, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", SAME, ids=lambda case: "-".join([case[0], *case[1]]))
def test_it_is_torchs_optimizer_with_other_defaults(case: tuple[str, dict[str, Any], Any, dict[str, Any]]) -> None:
    name, params, cls, arguments = case
    found, expected = after(lambda p: build(name, params, p)), after(lambda p: cls(p, **arguments))
    assert torch.allclose(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [True, False])
def test_torch_adam_is_torchs_class(mode: bool) -> None:
    made = build("Adam", {"torch_adam": True, "adam_w_mode": mode, "fused": True}, [nn.Parameter(torch.ones(2))])
    assert type(made) is (torch.optim.AdamW if mode else torch.optim.Adam)
    assert made.defaults["fused"] is True


def lamb(
    *, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
    max_coeff: float = 10.0, min_coeff: float = 0.01,
) -> torch.Tensor:  # fmt: skip
    """Some steps of LAMB (You et al. 2020, algorithm 2) in fp64."""
    p = torch.tensor(start(), dtype=torch.float64)
    m, v, found = torch.zeros_like(p), torch.zeros_like(p), []
    for t in range(1, STEPS + 1):
        g = torch.tensor(gradient(t - 1), dtype=torch.float64)
        if max_grad_norm:
            g = g * min(max_grad_norm / (float(g.norm()) + 1e-6), 1.0)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        first, second = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
        root = (v / second + eps).sqrt() if eps_inside_sqrt else (v / second).sqrt() + eps
        d = m / first / root + weight_decay * p
        p = p - lr * min(max(float(p.norm() / d.norm()), min_coeff), max_coeff) * d
        found.append(p)
    return torch.stack(found)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.5},
        {"lr": 0.1, "bias_correction": False},
        {"lr": 0.1, "eps": 0.1},
        {"lr": 0.1, "eps": 0.1, "eps_inside_sqrt": True, "betas": (0.5, 0.7)},
        {"lr": 0.1, "max_coeff": 0.5},
        {"lr": 0.1, "min_coeff": 3.0},
        {"lr": 0.1, "eps": 0.1, "max_grad_norm": 0.3},
    ],
    ids=lambda params: "-".join(params) or "defaults",
)
def test_lamb_is_its_formula(params: dict[str, Any]) -> None:
    assert torch.allclose(after(lambda p: build("Lamb", params, p)), lamb(**params), rtol=2e-6, atol=2e-6)


def test_clipping_before_a_step_counts_gradients_as_the_step_does() -> None:
    parameter = nn.Parameter(torch.tensor(start()))
    optimizer: Any = build("Lamb", {"lr": 0.1, "eps": 0.1, "max_grad_norm": 0.3}, [parameter])
    for step in range(STEPS):
        parameter.grad = torch.tensor(gradient(step)) * 8
        optimizer.step(grad_scale=1 / 8)
    expected = lamb(lr=0.1, eps=0.1, max_grad_norm=0.3)[-1]
    assert torch.allclose(parameter.detach().double(), expected, rtol=2e-6, atol=2e-6)


def test_the_classes_keep_torchs_defaults() -> None:
    assert optim.AdamW([nn.Parameter(torch.ones(1))]).defaults["weight_decay"] == 1e-2
    assert ZeroOptimizer(nn.Linear(2, 2), stage=1, optimizer=optim.AdamW).param_groups[0]["weight_decay"] == 1e-2
    named = ZeroOptimizer(nn.Linear(2, 2), stage=1, optimizer="adamw", lr=0.5)
    assert (named.param_groups[0]["weight_decay"], named.param_groups[0]["lr"]) == (0.0, 0.5)


@pytest.mark.parametrize("name", ["Adam", "Lion", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_fp32_or_of_the_parameters(name: str, dtype: torch.dtype) -> None:
    for wide in (True, False):
        p = nn.Parameter(torch.ones(5, dtype=dtype))
        optimizer = build(name, {"fp32_optimizer_states": wide}, [p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        kept = [state for key, state in optimizer.state[p].items() if key not in ("step", "master")]
        assert kept
        assert all(state.dtype is (torch.float32 if wide else dtype) for state in kept)


def test_states_in_fp16_are_refused() -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.float16))
    optimizer = build("Adam", {"fp32_optimizer_states": False}, [p])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"an fp16 parameter of shape \(5,\): squares of gradients below 2e-4 are 0"):
        optimizer.step()


def test_a_state_dict_from_before_bias_correction_loads() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([p])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["bias_correction"]
    optimizer.load_state_dict(saved)
    p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["bias_correction"] is True


def test_an_option_without_effect_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zoo.optim"):
        build("Lamb", {"set_grad_none": False}, [nn.Parameter(torch.ones(1))])
    assert "set_grad_none = false changes nothing" in caplog.text


# -- under the engine -------------------------------------------------------------------------------------------------


def train(optimizer: dict[str, Any], stage: int, **root: Any) -> list[torch.Tensor]:
    """The weights after each of three steps on two ranks."""

    def fn(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "optimizer": optimizer, **root}
        engine = initialize(config, nn.Linear(3, 2))[0]
        found = []
        for step in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(x).square().mean())
            engine.step()
            found.append(engine.optimizer.consolidated_parameters()["weight"].clone())
        return found

    return sim.run(2, fn)[0]


def plain(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clip: float = math.inf) -> list[torch.Tensor]:
    """The same by torch alone."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, found = make(list(model.parameters())), []
    for step in range(3):
        x = [torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        optimizer.zero_grad()
        model(torch.cat(x)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(model.weight.detach().clone())
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", [SAME[1], SAME[2], SAME[6], SAME[9], SAME[12]], ids=lambda case: "-".join(case[1]))
def test_the_engine_carries_it_out(case: tuple[str, dict[str, Any], Any, dict[str, Any]], stage: int) -> None:
    name, params, cls, arguments = case
    found = train({"type": name.upper(), "params": params}, stage)
    for one, other in zip(found, plain(lambda p: cls(p, **arguments)), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("clipping", "norm"), [(0.0, 0.1), (0.05, 0.05), (5.0, 0.1)])
def test_the_smaller_of_two_norms_clips_under_the_engine(stage: int, clipping: float, norm: float) -> None:
    params = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.3}
    config = {"type": "Lamb", "params": {**params, "max_grad_norm": 0.1}}
    found = train(config, stage, gradient_clipping=clipping)
    expected = plain(lambda p: build("Lamb", params, p), clip=norm)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_instance_that_zero_takes_over_clips_the_norm_of_all_ranks(stage: int) -> None:
    params = {"lr": 0.1, "eps": 0.1}

    def fn(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        zero = ZeroOptimizer(
            model, stage=stage, optimizer=build("Lamb", {**params, "max_grad_norm": 0.1}, list(model.parameters()))
        )
        found = []
        for step in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            zero.backward(model(x).square().mean())
            zero.step()
            zero.zero_grad()
            found.append(zero.consolidated_parameters()["weight"].clone())
        return found

    for one, other in zip(sim.run(2, fn)[1], plain(lambda p: build("Lamb", params, p), clip=0.1), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_states_in_bf16_under_zero() -> None:
    def fn(rank: int) -> set[torch.dtype]:
        model = nn.Linear(3, 2).bfloat16()
        zero = ZeroOptimizer(model, stage=2, optimizer="Adam", fp32_optimizer_states=False)
        model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        zero.step()
        return {state["exp_avg"].dtype for state in zero.updater.inner.state.values()}

    assert sim.run(2, fn) == [{torch.bfloat16}] * 2


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("Adam", {"amsgrad": True}, "amsgrad = true: documented as not supported by Adam. Leave it out, or set torch"),
        ("AdamW", {"amsgrad": True}, "amsgrad = true: documented as not supported by AdamW."),
        ("Lamb", {"amsgrad": True}, "amsgrad = true: documented as not supported by Lamb."),
        ("Adagrad", {"amsgrad": True}, "amsgrad = true: Adagrad's sum of squares never falls."),
        ("Adam", {"adam_w_mode": True, "adamw_mode": False}, "adam_w_mode and adamw_mode are one option in two"),
        ("Adam", {"max_grad_norm": 1.5}, "max_grad_norm = 1.5 is no option of Adam; write gradient_clipping = 1.5"),
        ("Lion", {"max_grad_norm": 1}, "max_grad_norm = 1 is no option of Lion;"),
        ("Adagrad", {"max_grad_norm": 1}, "max_grad_norm = 1 is no option of Adagrad;"),
        ("Adam", {"torch_adam": True, "bias_correction": False}, "bias_correction = false with torch_adam = true:"),
        ("Lamb", {"min_coeff": 11}, "min_coeff = 11 is above max_coeff = 10."),
        ("OneBitAdam", {"amsgrad": True}, "amsgrad = true: documented as not supported by OneBitAdam"),
        ("OnebitLamb", {"freeze_step": 5}, "freeze_step = 5 with coeff_beta = 0.9: the average"),
        ("zerooneadam", {"amsgrad": True}, "amsgrad = true: documented as not supported by ZeroOneAdam"),
    ],
)
def test_what_cannot_be_is_one_sentence(name: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 1, "optimizer": {"type": name, "params": params}}, world_size=1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"optimizer.params: {said}")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"lr": "3"}, "lr: allowed is float (given '3')"),
        ({"lr": -1}, "lr: Input should be greater than or equal to 0 (given -1)"),
        ({"lr": float("nan")}, "lr: Input should be"),
        ({"bias_correction": 1}, "bias_correction: allowed is bool (given 1)"),
        ({"betas": [0.9]}, "betas.1: Field required"),
        ({"betas": [0.9, 1.0]}, "betas.1: Input should be less than 1 (given 1.0)"),
        ({"betas": ["0.9", 0.99]}, "betas.0: Input should be a valid number (given '0.9')"),
        ({"weight_decey": 0}, "weight_decey: unknown key; did you mean 'weight_decay'? known: lr, betas, eps,"),
    ],
)
def test_wrong_values_are_found_when_a_document_is_read(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 1, "optimizer": {"type": "adamw", "params": params}}, world_size=1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"optimizer.params.{said}"), problem


def test_a_name_given_to_a_zero_optimizer_is_checked_too() -> None:
    with pytest.raises(TypeError, match=r"lrr=1 is an option neither of ZeRO nor of Adam, .* Did you mean lr"):
        ZeroOptimizer(nn.Linear(2, 2), optimizer="Adam", lrr=1)
    with pytest.raises(ValueError, match="optimizer=Adam: amsgrad = true: documented as not supported by Adam"):
        ZeroOptimizer(nn.Linear(2, 2), optimizer="Adam", amsgrad=True)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}, True),  # as transformers writes it
        ({"adamw_mode": False, "torch_adam": True}, True),
        ({"lr": "fast"}, False),
        ({"decay": 1}, False),
    ],
)
def test_editors_know_the_options(params: dict[str, Any], fits: bool) -> None:
    document = {"optimizer": {"type": "Adam", "params": params}}
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(document) is fits


def test_auto_is_a_value_of_an_option_that_lists_it_and_stays_open_elsewhere() -> None:
    def document(**params: Any) -> Any:
        return {"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": params}}

    choice = load(document(freeze_step="auto"), world_size=1).optimizer
    assert choice.params["freeze_step"] == "auto"
    with pytest.raises(ConfigError, match=r'optimizer.params.lr: still "auto"'):
        load(document(lr="auto", freeze_step="auto"), world_size=1)
    with pytest.raises(ConfigError, match=r"optimizer.params.freeze_step.*given 'soon'"):
        load(document(freeze_step="soon"), world_size=1)


def test_the_type_adamw_decides_whatever_adam_w_mode_says(caplog: pytest.LogCaptureFixture) -> None:
    def trained(options: dict[str, Any]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = registry.build("optimizer", "AdamW", {"lr": 0.1, "weight_decay": 0.5, **options}, params=[weight])
        for _ in range(3):
            weight.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
        return weight.detach()

    assert torch.equal(trained({"adam_w_mode": False}), trained({}))
    assert "changes nothing" in caplog.text


def test_adagrad_takes_a_sparse_gradient_as_torchs_does() -> None:
    def trained(cls: Any) -> torch.Tensor:
        table = torch.nn.Embedding(6, 3, sparse=True)
        table.weight.data.copy_(torch.arange(18.0).view(6, 3))
        optimizer = cls(table.parameters(), lr=0.1)
        for rows in ([1, 1, 4], [4, 0, 0]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    torch.testing.assert_close(trained(optim.Adagrad), trained(torch.optim.Adagrad))
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"sparse gradient.*weight_decay = 0\.1"):
        optim.Adagrad([weight], weight_decay=0.1).step()
