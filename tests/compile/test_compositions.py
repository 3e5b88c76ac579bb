"""Whole graphs with what else an engine does: the numbers of the hooks, as graphs or, with a reason, by the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.models import Model, Shape
from tests.compile.models import batch as words
from tests.compile.test_engine import GRAPH, Loss, document
from torch import nn
from torch.nn import functional as F

import zoo.engine
from zoo import sim
from zoo.activation_checkpointing import ActivationCheckpointing
from zoo.compile import compile_whole
from zoo.zero import ZeroOptimizer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    adapters: nn.Module = peft.inject_adapter_in_model(config, Loss(Shape(2)))
    return adapters


class Recomputed(Model):
    """Its blocks are recomputed by zoo's own function."""

    def __init__(self) -> None:
        super().__init__(Shape(2))
        self.recompute = ActivationCheckpointing()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.recompute(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def experts() -> nn.Module:
    from tests.moe.test_engine import Net

    return Net(2, noise=False)


def numbers(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5 * step + rank)
    return tuple(torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (3, 1))


QUANTIZED = {
    "shared_parameters": {
        "enabled": True, "schedule_offset": 1, "quantize_groups": 1, "quantization_type": "symmetric",
        "rounding": "nearest", "quantize_weight_in_forward": True,
    },
    "different_groups": {"all": {
        "params": {"start_bits": 4, "target_bits": 4, "quantization_period": 1}, "modules": ["up"],
    }},
}  # fmt: skip
ADAM = {"type": "AdamW", "params": {"lr": 0.05}}


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **options}}


def blocks() -> nn.Module:
    return Loss(Shape(2, tied=True, recomputed=True))


Run = tuple[Callable[[], nn.Module], Callable[[int, int], Any], dict[str, Any], str | None]
RUNS: dict[str, Run] = {
    "adapters": (adapted, words, document(3), ""),
    "adapters, bf16": (adapted, words, document(3, bf16={"enabled": True}), ""),
    "updates in backward": (
        blocks, words, document(3, optimizer=ADAM, **zero(3, update_in_backward=True, reduce_bucket_size=1)), "",
    ),
    "updates in backward, stage 1": (
        blocks, words, document(1, optimizer=ADAM, **zero(1, update_in_backward=True, reduce_bucket_size=1)), "",
    ),
    "1-bit Adam": (
        blocks, words, document(0, optimizer={"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}), "",
    ),
    "0/1 Adam": (
        blocks, words,
        document(0, optimizer={"type": "ZeroOneAdam", "params": {
            "lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 4,
        }}), "",
    ),
    "overflows": (blocks, words, document(2, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}), ""),
    "autocast": (lambda: Loss(Shape(2)), words, document(3, torch_autocast={"enabled": True, "dtype": "bfloat16"}), ""),
    "recomputed by zoo": (Recomputed, words, document(3), None),  # a graph unless threads have said how to
    "recomputed by the engine": (
        lambda: Loss(Shape(2)), words, document(3, activation_checkpointing={"blocks": "auto"}),
        "activation_checkpointing",
    ),
    "compressed": (
        lambda: Loss(Shape(2)), words, document(3, compression_training={"weight_quantization": QUANTIZED}), "disable",
    ),
    "experts": (experts, numbers, document(2), "data-dependent"),
}  # fmt: skip
"""A model, its batches, a configuration, and why it is no graph."""


@pytest.mark.slow
@pytest.mark.parametrize("what", RUNS)
def test_an_engine_trains_as_it_does_uncompiled(what: str) -> None:
    make, batches, config, why = RUNS[what]

    def fn(rank: int, compiles: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
        engine, *_ = zoo.engine.initialize({**config, **({"compile": GRAPH} if compiles else {})}, make())
        losses = []
        for step in range(5):
            given = batches(step, rank)
            loss = engine(*given) if isinstance(given, tuple) else engine(given)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().nan_to_num(-1.0))
        return losses, engine.optimizer.consolidated_parameters(), engine.module._compiled_call_impl

    graphs, hooks = (sim.run(2, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (losses, values, whole), (right, others, _) in zip(graphs, hooks, strict=True):
        assert all(map(torch.equal, losses, right))
        assert all(torch.equal(values[name], others[name]) for name in others)
        assert all((why or "") in reason for reason in whole.reasons.values())
        if why is not None:
            assert bool(whole.reasons) == bool(why)
        assert whole.reasons or whole.plans


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("stage", [1, 3])
def test_stages_of_a_pipeline(schedule: str, stage: int) -> None:
    from tests.pipe.test_engine import batches, engine_of
    from tests.pipe.test_training import Case

    def fn(rank: int, compiles: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        case = Case(schedule=schedule, pipe=2, data=1, stage=stage)
        engine = engine_of(case)
        if compiles:
            engine.compile("aot_eager", whole=True)
        losses = [float(engine.train_batch(batches(case, engine, step))) for step in range(2)]
        losses.append(float(engine.eval_batch(batches(case, engine))))
        return losses, engine.optimizer.consolidated_parameters(), engine.module._compiled_call_impl

    graphs, hooks = (sim.run(2, lambda rank, c=c: fn(rank, c), seed=0) for c in (True, False))
    for (losses, values, whole), (right, others, _) in zip(graphs, hooks, strict=True):
        assert losses == right
        assert all(torch.equal(values[name], others[name]) for name in others)
        assert set(whole.reasons.values()) <= {
            "its backward comes in two parts (a pipeline's schedule), and that of a graph has one"
        }
        assert bool(whole.reasons) == (schedule == "zb_h1")


@pytest.mark.slow
def test_layers_that_are_split_over_ranks_run_by_the_hooks() -> None:
    from tests.tensor.models import Decoder, plan_of
    from tests.tensor.models import Shape as Heads
    from torch.distributed.device_mesh import init_device_mesh

    from zoo.tensor import split

    def fn(rank: int, compiles: bool) -> tuple[dict[str, torch.Tensor], Any]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        model = Decoder(Heads(tied=False))
        split(model, plan_of(Heads(tied=False)), mesh)
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, optimizer=torch.optim.SGD, mesh=mesh, data_axes=["data"],
            param_persistence_threshold=0,
        )  # fmt: skip
        whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
        for step in range(2):
            ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(ids).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters(), whole

    graphs, hooks = (sim.run(2, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (values, whole), (others, _) in zip(graphs, hooks, strict=True):
        assert all(torch.equal(values[name], others[name]) for name in others)
        assert list(whole.reasons) == [(True, True)]
