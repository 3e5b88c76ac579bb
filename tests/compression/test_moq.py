"""Curvature against the exact Hessian, the periods that follow from it, and ``quantize_training`` under an engine."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compression.models import Words, document, inputs, masters, start, train, weights
from tests.profiles import examples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.compression import CompressionScheduler, init_compression, redundancy_clean, transforms_of
from zoo.compression.moq import Guide, eigenvalues, factors_of, power_iteration
from zoo.compression.moq.periods import GuidedQuantizer
from zoo.compression.moq.sections import CurvatureSection
from zoo.compression.schedule import bits_at, steps_at_bits
from zoo.config import ConfigError
from zoo.engine import initialize
from zoo.layout import declare_split
from zoo.pipe import LayerSpec, PipelineModule


def moq(
    *, start: int = 8, target: int = 3, period: int = 2, offset: int = 0, layer_name: str = "layer",
    guided: bool = True, curvature: dict[str, Any] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sections of a document."""
    eigenvalue = {"enabled": True, "layer_name": layer_name, **(curvature or {})} if guided else {}
    return {
        "quantize_training": {
            "enabled": True, "quantize_bits": {"start_bits": start, "target_bits": target},
            "quantize_schedule": {"quantize_period": period, "schedule_offset": offset},
            "eigenvalue": eigenvalue, **more,
        }
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- eigenvalues


@example([1e-202], 0)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.integers(0, 9))
def test_of_a_matrix_the_largest_magnitude_is_found(values: list[float], seed: int) -> None:
    dice = np.random.default_rng(seed)
    rotation = np.linalg.qr(dice.normal(size=(len(values), len(values))))[0]
    matrix = torch.from_numpy(rotation @ np.diag(values) @ rotation.T)
    matrix = (matrix + matrix.T) / 2
    wanted = np.abs(np.linalg.eigvalsh(matrix.numpy())).max()
    found = power_iteration(
        lambda v: matrix @ v, torch.from_numpy(dice.normal(size=len(values))), max_iter=30, tol=1e-9
    )
    assert found <= wanted * (1 + 1e-9) + 1e-12, "a Rayleigh quotient is in between"
    sizes = sorted(map(abs, values))
    if len(sizes) == 1 or sizes[-2] < 0.5 * sizes[-1]:
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_iterations_end_when_they_are_told_to() -> None:
    matrix, calls = torch.diag(torch.tensor([3.0, 2.9, 1.0])), []

    def product(v: Tensor) -> Tensor:
        calls.append(1)
        return matrix @ v

    power_iteration(product, torch.ones(3), max_iter=4, tol=1e-9)
    assert len(calls) == 4
    calls.clear()
    power_iteration(product, torch.ones(3), tol=0.5)
    assert len(calls) == 2
    assert power_iteration(lambda v: 0 * v, torch.ones(3)) == 0
    assert not np.isfinite(power_iteration(lambda v: v / 0, torch.ones(3)))


class Net(nn.Module):
    """Two layers with a loss; the second's weight is used twice, the first drops out."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.ModuleList([nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)])
        self.norm, self.drop = nn.BatchNorm1d(4, dtype=dtype), nn.Dropout(0.5)
        self.norm.running_var.fill_(0.5)  # type: ignore[union-attr]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.layer[0](self.drop(x))))
        return F.mse_loss(self.layer[1](torch.tanh(self.layer[1](h))), y)


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(5, 3, generator=dice, dtype=dtype), torch.randn(5, 4, generator=dice, dtype=dtype)


def exact(model: nn.Module, layer: int, *batches: tuple[Tensor, Tensor]) -> float:
    """The largest magnitude of the eigenvalues of the whole Hessian by one weight, differentiated twice."""
    twin = copy.deepcopy(model).double().eval()
    weight = twin.layer[layer].weight  # type: ignore[index,union-attr]

    def mean(value: Tensor) -> Tensor:
        given_ = {f"layer.{layer}.weight": value.reshape(weight.shape)}
        losses = [torch.func.functional_call(twin, given_, (x.double(), y.double())) for x, y in batches]
        return torch.stack(losses).mean()

    found = torch.autograd.functional.hessian(mean, weight.detach().flatten())
    return float(np.abs(np.linalg.eigvalsh(found.numpy())).max())


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 2e-4), (torch.float32, 2e-3)])
def test_of_a_network_they_are_those_of_the_exact_hessian(dtype: torch.dtype, rel: float) -> None:
    model = Net().to(dtype)
    x, y = batch(dtype=dtype)
    blocks = {str(i): [layer.weight] for i, layer in enumerate(model.layer)}
    found = eigenvalues(model, lambda: model(x, y), blocks, tol=1e-6)
    for i in range(2):
        assert found[str(i)] == pytest.approx(exact(model, i, (x, y)), rel=rel)
    together = eigenvalues(model, lambda: model(x, y), {"all": [*blocks["0"], *blocks["1"]]}, tol=1e-6)
    assert together["all"] > 0.8 * max(found.values()), "of a matrix with both blocks on its diagonal"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_the_large_ones_are_near_and_factors_the_same(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    x, y = batch(dtype=dtype)
    found = eigenvalues(model, lambda: model(x, y), {str(i): [layer.weight] for i, layer in enumerate(model.layer)})
    wanted = {str(i): exact(model, i, (x, y)) for i in range(2)}
    assert found["1"] == pytest.approx(wanted["1"], rel=0.1)
    assert factors_of(found) == factors_of(wanted)


def test_of_a_quadratic_it_is_its_matrix() -> None:
    """L = |XWᵀ|²/2 has XᵀX for each row of W."""
    model = nn.Linear(4, 3, bias=False)
    x = torch.randn(6, 4)
    found = eigenvalues(model, lambda: model(x).square().sum() / 2, {"w": [model.weight]}, tol=1e-6)
    assert found["w"] == pytest.approx(np.linalg.eigvalsh((x.T @ x).numpy()).max(), rel=1e-3)


def test_nothing_is_left_of_a_measurement() -> None:
    config = {
        **moq(start=6), "compression_training": {"activation_quantization": inputs(bits=5, range_calibration="static")},
    }  # fmt: skip
    model = init_compression(Words().train(), config)
    scheduler = CompressionScheduler(model)
    x = torch.zeros(1, 2, dtype=torch.long)
    model(x, x).backward()
    scheduler.step()
    model(x, x).backward()
    model.layer[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before = copy.deepcopy(
        [{k: v for k, v in vars(t).items() if k not in ("site", "place")} for t in transforms_of(model)]
    )
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    classes = [type(m) for m in model.modules()]
    first = eigenvalues(model, lambda: model(x, x), {"b": [model.layer[0].up.weight, model.embed.weight]})
    assert first == eigenvalues(model, lambda: model(x, x), {"b": [model.layer[0].up.weight, model.embed.weight]})
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if p.grad is not None)
    for transform, old in zip(transforms_of(model), before, strict=True):
        for key, value in vars(transform).items():
            same = torch.equal(value, old[key]) if isinstance(value, Tensor) else value == old.get(key, value)
            assert same, (transform.site.name, key)


def test_a_measurement_that_fails_leaves_nothing_either() -> None:
    model = Net().train()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match="broken"):
        eigenvalues(model, lambda: (_ for _ in ()).throw(RuntimeError("broken")), {"b": [model.layer[0].weight]})
    assert [type(m) for m in model.modules()] == classes
    assert model.norm.training
    with pytest.raises(ValueError, match=r"block 'b': a parameter of shape \(3,\) is none of the model"):
        eigenvalues(model, lambda: torch.zeros(()), {"b": [nn.Parameter(torch.zeros(3))]})


def test_what_nothing_depends_on_is_flat() -> None:
    model = Net()
    x, y = batch()
    model.idle = nn.Linear(2, 2).double()
    assert eigenvalues(model, lambda: model(x, y), {"b": [model.idle.weight]}) == {"b": 0.0}
    assert eigenvalues(model, lambda: model(x, y).detach(), {"b": [model.layer[0].weight]}) == {"b": 0.0}


# ----------------------------------------------------------------------------------------------------------- periods


def test_factors_are_one_to_five() -> None:
    assert factors_of({"a": 8.0, "b": 1.9, "c": 2.0, "d": 0.0}) == {"a": 5, "b": 1, "c": 2, "d": 1}
    assert factors_of({"a": float("nan"), "b": 3.0, "c": 1.0}) == {"a": 5, "b": 5, "c": 2}
    assert factors_of({"a": float("inf"), "b": float("nan")}) == {"a": 5, "b": 5}
    assert factors_of({"a": 0.0, "b": 0.0}) == {"a": 1, "b": 1}


def quantizer(first: int, target: int, period: int, offset: int) -> GuidedQuantizer:
    config = moq(start=first, target=target, period=period, offset=offset)
    model = init_compression(Words(layers=1), config)
    return next(t for t in transforms_of(model) if isinstance(t, GuidedQuantizer))


@given(
    st.integers(3, 6), st.integers(0, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5),
    st.integers(0, 60),
)  # fmt: skip
def test_with_one_factor_it_is_the_schedule_with_a_longer_period(
    target: int, falls: int, period: int, offset: int, factor: int, end: int
) -> None:
    found = quantizer(target + falls, target, period, offset)
    options = {"offset": offset, "start_bits": target + falls, "target_bits": target, "period": period * factor}
    for step in range(end):
        found.set_step(step)
        if found.waits(step):
            found.decide(step, factor)
        assert found.bits == bits_at(step, **options)
        assert found.bits_and_since(step)[1] == steps_at_bits(step, **options)


def test_a_layer_waits_for_as_long_as_it_was_curved_when_its_bits_fell() -> None:
    found = quantizer(6, 3, 2, 1)
    assert not found.waits(0)
    for step, factor in ((1, 3), (7, 1), (9, 2)):
        assert found.waits(step)
        found.decide(step, factor)
        assert not found.waits(step)
    assert found.falls == [7, 9, 17], "1 + 3·2, 7 + 1·2, 9 + 2·4"
    assert not found.waits(17)
    assert [found.bits_and_since(step)[0] for step in (6, 7, 8, 9, 16, 17, 99)] == [6, 5, 5, 4, 4, 3, 3]


# ------------------------------------------------------------------------------------------------- in loops and engines


def test_in_a_loop_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    config = moq(start=6, target=4, period=1, offset=1, curvature={"verbose": True})
    model = init_compression(Words().double(), config)
    with torch.no_grad():
        model.layer[1].up.weight.mul_(20)
    curvature = CurvatureSection(enabled=True, layer_name="layer", verbose=True)
    scheduler, guide = CompressionScheduler(model), Guide(model, curvature)
    x = torch.arange(8).reshape(2, 4)
    looked, bits = [], []
    with caplog.at_level(logging.INFO, "zoo.compression"):
        for _ in range(12):
            looked.append(guide.look(scheduler.steps, lambda: model(x, x)))
            bits.append(tuple(guide.bits().values()))
            scheduler.step()
    wanted = {
        f"layer.{i}": eigenvalues(model, lambda: model(x, x), {"b": [block.up.weight, block.down.weight]})["b"]
        for i, block in enumerate(model.layer)
    }  # fmt: skip
    assert guide.eigenvalues.keys() == wanted.keys()
    factors = factors_of(guide.eigenvalues)
    assert sorted(factors.values())[1] == 5
    assert sorted(factors.values())[0] < 5
    assert looked[:2] == [False, True]
    assert bits[0] == (6, 6)
    assert bits[-1] == (4, 4)
    slow = list(factors.values()).index(5)
    assert all(b[slow] >= b[1 - slow] for b in bits)
    assert any(b[slow] > b[1 - slow] for b in bits)
    assert "layer.0: eigenvalue" in caplog.text
    plain = [t for t in transforms_of(model) if not isinstance(t, GuidedQuantizer)]
    assert {t.site.name for t in plain} == {"embed.weight"}, "with the plain period"
    redundancy_clean(model, config)
    assert len(model.layer[0].up.weight.unique()) <= 15


def test_curvature_is_looked_at_in_every_nth_step_only() -> None:
    model = init_compression(Words(), moq(start=6, target=4, period=1))
    guide = Guide(model, CurvatureSection(enabled=True, layer_name="layer", gas_boundary_resolution=4, max_iter=1))
    x = torch.zeros(1, 2, dtype=torch.long)
    scheduler, looked = CompressionScheduler(model), []
    for step in range(13):
        if guide.look(step, lambda: model(x, x)):
            looked.append(step)
        scheduler.step()
    assert looked == [0, *looked[1:]]
    assert all(step % 4 == 0 for step in looked)
    assert len(looked) >= 2


def run(world: int, stage: int, *, micro: int = 1, recompute: bool = False, **more: Any) -> tuple[Any, ...]:
    """Losses, masters, eigenvalues and bits by step; the same on every rank."""
    sections = moq(**{"start": 7, "target": 4, "period": 1, "offset": 1, **more})

    def job(rank: int) -> tuple[Any, ...]:
        config = document(stage, gradient_accumulation_steps=micro, **sections)
        engine = start(config, Words(recompute=recompute).double())
        losses, seen = [], []
        for _ in range(5):
            losses.append(float(engine.train_batch()))
            part = engine.parts["quantize_training"]
            seen.append((dict(part.guide.eigenvalues), part.guide.bits()))
        return losses, masters(engine), seen

    found = sim.run(world, job)
    for losses, values, seen in found[1:]:
        assert losses == found[0][0]
        assert seen == found[0][2]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())
    return found[0]


@pytest.mark.dear
def test_every_stage_measures_the_same_bits_and_what_one_process_measures() -> None:
    alone = run(1, 0)
    first = run(2, 0)
    assert len(first[2][1][0]) == 2
    assert first[2][-1][1] != first[2][0][1], "bits have fallen"
    torch.testing.assert_close(first[0], alone[0], rtol=1e-9, atol=0)
    for (values, bits), (wanted, wanted_bits) in zip(first[2], alone[2], strict=True):
        assert bits == wanted_bits
        assert values == pytest.approx(wanted, rel=1e-5)
    for stage in (1, 2, 3):
        other = run(2, stage)
        assert other[0] == first[0]
        assert other[2] == first[2]
        assert all(torch.equal(value, first[1][name]) for name, value in other[1].items())
    assert run(2, 3, recompute=True)[2] == first[2]


@pytest.mark.slow
@examples(times=0.5)
@given(
    world=st.sampled_from([2, 4]), stage=st.integers(1, 3), micro=st.sampled_from([1, 2]), recompute=st.booleans(),
    period=st.integers(1, 2), offset=st.integers(0, 2), every=st.integers(1, 3),
)  # fmt: skip
def test_of_the_first_micro_batch_at_any_size_and_stage(
    world: int, stage: int, micro: int, recompute: bool, period: int, offset: int, every: int
) -> None:
    options: dict[str, Any] = {
        "micro": micro, "recompute": recompute, "period": period, "offset": offset,
        "curvature": {"gas_boundary_resolution": every, "max_iter": 5},
    }  # fmt: skip
    first, other = run(world, 0, **options), run(world, stage, **options)
    torch.testing.assert_close(other[0], first[0], rtol=1e-9, atol=0)
    for (values, bits), (wanted, wanted_bits) in zip(other[2], first[2], strict=True):
        assert bits == wanted_bits
        # Stages 2 and 3 reduce each micro-batch for itself, so that weights, and with them gradients, are rounded
        # otherwise; a difference of gradients is divided by h.
        assert values == wanted if micro == 1 else values == pytest.approx(wanted, rel=1e-5)


@pytest.mark.dear
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_never_stopped(beside: bool, tmp_path: Path) -> None:
    more: dict[str, Any] = {"compression": {"activation_quantization": inputs("layer", bits=6)}} if beside else {}
    config = document(0, **moq(start=7, target=4, period=1, offset=1), **more)
    engine = start(config)
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    falls = [t.falls for t in transforms_of(engine.module) if isinstance(t, GuidedQuantizer)]
    assert all(falls)
    falls = copy.deepcopy(falls)
    wanted = train(engine, 4)
    other = start({**config, "zero_optimization": {"stage": 2}}, Words(seed=9))
    other.load_checkpoint(str(tmp_path))
    assert [t.falls for t in transforms_of(other.module) if isinstance(t, GuidedQuantizer)] == falls
    assert train(other, 4) == wanted
    name = f"{'compression_training' if beside else 'quantize_training'}/bits/quantize_training"
    assert engine.record.metrics[name] < 7
    assert engine.record.metrics["quantize_training/bits/layer.0"] < 7


def test_without_curvature_it_is_weight_quantization_with_one_group() -> None:
    options: dict[str, Any] = {
        "quantize_algo": {"rounding": "stochastic"}, "quantize_type": "asymmetric", "quantize_groups": 4,
        "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3},
    }  # fmt: skip
    ours = start(document(**moq(start=6, target=3, offset=1, guided=False, **options)))
    section = weights(
        start=6, target=3, schedule_offset=1, rounding="stochastic", quantization_type="asymmetric",
        quantize_groups=4, fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3},
    )  # fmt: skip
    assert train(ours, 5) == train(start(document(compression={"weight_quantization": section})), 5)
    for name, value in masters(ours).items():
        assert value.isfinite().all(), name


@pytest.mark.dear
def test_other_spellings_mean_the_same() -> None:
    inside = moq(start=6, target=4, period=1)
    outside = {
        "quantize_training": {
            **inside["quantize_training"], "eigenvalue": {}, "quantize_rounding": "stochastic",
        },
        "eigenvalue": inside["quantize_training"]["eigenvalue"],
    }  # fmt: skip
    inside["quantize_training"]["quantize_algo"] = {"rounding": "stochastic"}
    assert train(start(document(**inside)), 4) == train(start(document(**outside)), 4)


class Logits(Words):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": 16, "start": 16}, r"quantize_training\.quantize_bits\.target_bits = 16: 16 bits and more are not"),
        ({"start": 3, "target": 4}, r"quantize_training: target_bits = 4 is more than start_bits = 3"),
        ({"period": 0}, r"quantize_training: quantize_schedule\.quantize_period = 0 with start_bits = 8"),
        ({"start": 20}, r"quantize_training\.quantize_bits\.start_bits: .*20 bits; allowed are 1 to 16, and 32"),
        (
            {"quantize_type": "asymmetric", "quantize_algo": {"q_type": "symmetric"}},
            r"quantize_training\.quantize_type = asymmetric and quantize_training\.quantize_algo\.q_type = symmetric",
        ),
        ({"quantize_type": "asymmetric", "target": 2}, r"target_bits = 2 with asymmetric steps; ternary and binary"),
        ({"quantize_groups": 7}, r"quantize_training: quantize_groups = 7, and layer\.0\.up\.weight has \(12, 8\)"),
        ({"layer_name": "encoder.layers"}, r"quantize_training\.eigenvalue\.layer_name: the model has no module 'enc"),
        ({"layer_name": "layer.0"}, r"eigenvalue\.layer_name = 'layer\.0' is a Block, and no list of layers"),
        ({"curvature": {"layer_num": 3}}, r"eigenvalue\.layer_num = 3, and 'layer' has 2 layers; give at most"),
        ({"curvature": {"tol": 0}}, r"quantize_training\.eigenvalue\.tol"),
        (
            {"quantize_rounding": "stochastic", "quantize_algo": {"rounding": "nearest"}},
            r"quantize_rounding = 'stochastic' and quantize_algo\.rounding = 'nearest'",
        ),
        ({"quantize_eigenvalue": False}, r"quantize_eigenvalue = False and eigenvalue\.enabled = True"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=sentence):
        start(document(**moq(**changes)))
    with pytest.raises((ConfigError, ValueError), match=sentence):
        init_compression(Words(), moq(**changes))


def test_what_is_refused_with_other_sections_and_models() -> None:
    with pytest.raises(ConfigError, match=r"quantize_training\.enabled and compression_training\.weight_quantization"):
        start(document(compression={"weight_quantization": weights()}, **moq()))
    with pytest.raises(ConfigError, match=r"eigenvalue\.enabled without quantize_training\.enabled"):
        start(document(eigenvalue={"enabled": True}))
    with pytest.raises(ConfigError, match=r"eigenvalue\.enabled and quantize_training\.eigenvalue\.enabled: two"):
        start(document(eigenvalue={"enabled": True}, **moq()))
    engine = start(document(**moq()), Logits())
    x, y = (t[:4] for t in engine.dataloader.dataset.tensors)  # type: ignore[union-attr]
    before = len(engine.module._forward_pre_hooks)
    with pytest.raises(ValueError, match=r"eigenvalue: the model returned a Tensor of shape \(4, 4, 12\), and curv"):
        engine(x, y)
    assert len(engine.module._forward_pre_hooks) == before


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def test_a_pipeline_has_bits_that_fall_and_no_curvature() -> None:
    def job(rank: int, guided: bool) -> list[float]:
        model = PipelineModule(
            [LayerSpec(Stage) for _ in range(2)], num_stages=2, loss_fn=F.mse_loss, partition_method="uniform",
            seed_layers=True,
        )  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **moq(start=4, period=1, guided=guided),
        }  # fmt: skip
        engine, *_ = initialize(config, model)
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        for _ in range(2):
            engine.train_batch(iter([(x, x), (x, -x)]))
        return [float(t.bits) for t in transforms_of(engine.module)]  # type: ignore[attr-defined]

    assert sim.run(2, lambda rank: job(rank, False)) == [[3.0], [3.0]]
    with pytest.raises(Exception, match=r"quantize_training\.eigenvalue: on a pipeline no rank has the whole loss"):
        sim.run(2, lambda rank: job(rank, True))


@pytest.mark.dear
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_fall_too_and_every_stage_measures_the_same(precision: str) -> None:
    def losses(stage: int) -> tuple[list[float], list[list[int]]]:
        sections = moq(start=6, target=4, period=1)
        engine = start(document(stage, **sections, **{precision: {"enabled": True}}))
        found = train(engine, 4)
        return found, [t.falls for t in transforms_of(engine.module) if isinstance(t, GuidedQuantizer)]

    first = losses(0)
    assert all(falls for falls in first[1])
    assert losses(3) == first


@pytest.mark.parametrize("named", [("tensor",), ("expert",)])
def test_curvature_of_weights_of_which_ranks_have_parts_is_refused(named: tuple[str, ...]) -> None:
    """Ranks would find other eigenvalues, and let bits of one weight fall in different steps or wait for each other."""

    def job(rank: int, axes: int, guided: bool) -> list[float]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", *named))
        model = Words()
        for name, parameter in model.layer.named_parameters():
            if name.endswith("up.weight"):
                where: dict[str, Any] = {} if named == ("expert",) else {"shape": (12 * axes, 8), "offsets": (0, 0)}
                if axes == 2 and named == ("tensor",):
                    where["offsets"] = (12 * rank, 0)
                declare_split(parameter, named, **where)
        engine = start(document(**moq(guided=guided), mesh={"axes": {"data": 1, named[0]: 2}}), model, mesh=mesh)
        return [float(t.bits) for t in transforms_of(engine.module)]  # type: ignore[attr-defined]

    def refused(rank: int) -> None:
        with pytest.raises(NotImplementedError, match=rf"eigenvalue: of layer\.0\.up\.weight .* axis {named[0]}, and"):
            job(rank, 2, True)

    sim.run(2, refused)
    assert sim.run(2, lambda rank: job(rank, 2, False))[0]
    if named == ("tensor",):
        assert sim.run(2, lambda rank: job(rank, 1, True))[0]
