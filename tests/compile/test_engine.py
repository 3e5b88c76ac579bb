"""Whole graphs through the engine, a configuration and the façade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.models import Model, Shape, batch

from zoo import sim
from zoo.config import ConfigError
from zoo.engine import initialize


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Loss(Model):
    """Its output is the loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens)["loss"]


def document(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip


def run(rank: int, config: dict[str, Any], shape: Shape, plain: bool = False) -> tuple[Any, Any]:
    """Two steps, some by ``loss.backward()``."""
    engine, *_ = initialize(config, Loss(shape))
    outputs = []
    for step in range(2):
        for i in range(config.get("gradient_accumulation_steps", 1)):
            loss = engine(batch(10 * step + i, rank))
            engine.backward(loss) if not plain else loss.backward()
            engine.step()
            outputs.append(loss.detach().clone())
        assert engine.record is not None
        outputs.append(torch.tensor(engine.record.grad_norm or 0.0))
    whole = engine.module._compiled_call_impl
    assert whole is None or not whole.reasons
    assert (whole is None) == ("compile" not in config)
    return outputs, engine.optimizer.consolidated_parameters()


GRAPH = {"enabled": True, "deepcompile": True, "backend": "aot_eager"}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "stage 3": document(3, gradient_clipping=0.1),
    "accumulates": document(3, gradient_accumulation_steps=2),
    "fp16": document(2, fp16={"enabled": True, "initial_scale_power": 4}),
    "bf16": document(1, bf16={"enabled": True}),
    "offload": document(
        3, optimizer={"type": "AdamW", "params": {"lr": 0.1}},
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
    ),
}  # fmt: skip
RUNS = [(what, plain) for what in DOCUMENTS for plain in (False, True) if not (plain and what == "fp16")]
"""What is configured, and whether ``loss.backward()`` goes back: a loss that is scaled goes through the engine."""
QUICK = ("accumulates", False)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("what", "plain"), [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in RUNS]
)
def test_an_engine_trains_as_it_does_uncompiled(what: str, plain: bool) -> None:
    config, shape = DOCUMENTS[what], Shape(1)
    compiled = sim.run(2, lambda rank: run(rank, {**config, "compile": GRAPH}, shape, plain))
    hooks = sim.run(2, lambda rank: run(rank, config, shape, plain))
    for (found, values), (right, others) in zip(compiled, hooks, strict=True):
        assert all(map(torch.equal, found, right))
        assert all(torch.equal(values[name], others[name]) for name in others)


def test_what_cannot_be_is_said() -> None:
    engine, *_ = initialize(document(0), Loss(Shape(1)))
    with pytest.raises(ValueError, match=r"schedule=\) without whole=True"):
        engine.compile(schedule=[(0, ["keep"])])
    with pytest.raises(ValueError, match='"inductor" or "aot_eager", not \'eager\''):
        engine.compile("eager", whole=True)
    for whole in (True, False):
        with pytest.raises(ValueError, match=r"engine.compile\(\) has nothing, which torch.compile does not take"):
            engine.compile("aot_eager", whole=whole, nothing=1)
        with pytest.raises(ValueError, match=r"engine.compile\(\): dynamic= is True or False, and not 'yes'"):
            engine.compile("aot_eager", whole=whole, dynamic="yes")
        with pytest.raises(ValueError, match=r"backend=5\): give the name of a backend"):
            engine.compile(5, whole=whole)
    with pytest.raises(ValueError, match=r"backend='inducto'\): torch.compile has no such backend; it has .*inductor"):
        engine.compile("inducto")
    with pytest.raises(ValueError, match=r"compile.backend = 'inducto': torch.compile has no such backend; it has"):
        initialize(document(0, compile={"enabled": True, "backend": "inducto"}), Loss(Shape(1)))
    with pytest.raises(ValueError, match="there is no pass 'mine'"):
        engine.compile("aot_eager", whole=True, schedule=[(0, ["keep", "place", "mine"])])
    assert engine.module._compiled_call_impl is None


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "passes of units": ({"passes": ["mine"]}, r"compile.passes is \['mine'\], .* set compile.deepcompile = true"),
    "schedule of units": ({"schedule": [[0, ["keep"]]]}, r"compile.schedule is .* set compile.deepcompile = true"),
    "empty schedule": ({"schedule": []}, r"compile.schedule is \[\], .* set compile.deepcompile = true"),
    "both": (
        {"deepcompile": True, "passes": ["mine"], "schedule": [[0, ["keep", "place"]]]},
        "compile.passes and compile.schedule .* name mine in its lists",
    ),
    "backend": ({"kwargs": {"backend": "eager"}}, "compile.kwargs has backend; write it as compile.backend"),
    "unknown": (
        {"kwargs": {"dynamics": True}}, "compile.kwargs has dynamics, which torch.compile does not take: .*dynamic, ",
    ),
    "dynamic": ({"kwargs": {"dynamic": "yes"}}, "compile.kwargs: dynamic= is True or False, and not 'yes'"),
    "fullgraph": ({"kwargs": {"fullgraph": 1}}, "compile.kwargs: fullgraph= is True or False, and not 1"),
    "model": ({"kwargs": {"model": None}}, "compile.kwargs has model, which"),
}  # fmt: skip


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("what", WITHOUT_EFFECT)
def test_what_has_no_effect_in_a_configuration_is_said(what: str, enabled: bool) -> None:
    section, said = WITHOUT_EFFECT[what]
    with pytest.raises(ConfigError, match=said):
        initialize(document(0, compile={"enabled": enabled, **section}), Loss(Shape(1)))


@pytest.mark.parametrize("section", [{"passes": None}, {"passes": []}, {"deepcompile": True, "passes": None}])
def test_null_and_no_passes_are_zoos_own(section: dict[str, Any]) -> None:
    engine, *_ = initialize(document(0, compile=section), Loss(Shape(1)))
    engine.compile("aot_eager", whole=True)
    assert [apply.name for apply in engine.module._compiled_call_impl._passes] == ["downcast", "keep", "place"]


@pytest.mark.parametrize("deepcompile", [True, False])
def test_the_passes_that_deepspeed_names_in_a_configuration(deepcompile: bool) -> None:
    section = {"deepcompile": deepcompile, "passes": ["z1", "z3"]}
    with pytest.warns(UserWarning, match="compile.passes names z1, z3: .* at every stage"):
        engine, *_ = initialize(document(0, compile=section), Loss(Shape(1)))
    assert engine.config.compile.passes == []
    config = document(0, compile={"deepcompile": True, "passes": ["z3", "mine"]})
    with pytest.warns(UserWarning, match="compile.passes names z3: "):
        engine, *_ = initialize(config, Loss(Shape(1)))
    assert engine.config.compile.passes == ["mine"]
    for name, other in (("autosp", "DistributedAttention"), ("autotp", "tensor_parallel")):
        with pytest.raises(ConfigError, match=f"compile.passes names {name}, .*{other}"):
            initialize(document(0, compile={"deepcompile": deepcompile, "passes": [name]}), Loss(Shape(1)))


@pytest.mark.dear
def test_deepcompile_of_the_facade() -> None:
    from zoo import deepspeed

    config = document(3, compile={"deepcompile": True, "free_activation": False})
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
    model = Loss(Shape(1))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert not engine.is_compiled
    engine.compile(backend="aot_eager", schedule=[(0, ["keep", "place"])])
    assert engine.is_compiled
    losses = []
    for _ in range(3):
        loss = engine(batch(0, 0))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert losses[2] < losses[0]
    assert not model._compiled_call_impl.reasons  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
