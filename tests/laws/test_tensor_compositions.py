"""Law 2 on the tensor axis with what else an engine does, all of it at once.

States and parameters on the host and in files, layers that are computed again in three ways, compression, LoRA of peft,
shares of tokens: losses, norms and parameters after steps are those of one process that compresses or adapts alike.
Compiled blocks are those of blocks that are not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.processes import run_ranks
from tests.profiles import examples
from tests.tensor.models import Decoder, Shape, plan_of
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zoo.engine
from zoo import sim
from zoo.activation_checkpointing import ActivationCheckpointing

STEPS, BATCHES = 2, 2
QUANTIZED = {"schedule_offset": 0, "quantize_groups": 1, "quantization_type": "symmetric", "rounding": "nearest"}
COMPRESSION: dict[str, dict[str, Any]] = {
    "": {},
    "quantized": {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True, **QUANTIZED},
        "different_groups": {"all": {
            "params": {"start_bits": 6, "target_bits": 6, "quantization_period": 50},
            "modules": ["perceptron", "attention"],
        }},
    }},
    "sparse": {"sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": "l1"},
        "different_groups": {"all": {"params": {"dense_ratio": 0.5}, "modules": ["perceptron", "attention"]}},
    }},
    "rows": {"row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": "l1"},
        "different_groups": {"all": {
            "params": {"dense_ratio": 0.5}, "modules": ["perceptron.up"], "related_modules": [["perceptron.down"]],
        }},
    }},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """offload: "", "cpu" or "nvme", of states and, at stage 3, of parameters. again: how layers are computed again."""

    shape: Shape = Shape(heads=3, kv=1, inner=5, vocab=7, bias=False)  # noqa: RUF009 - frozen
    degree: int = 2
    data: int = 1
    stage: int = 3
    offload: str = ""
    again: str = ""
    compression: str = ""
    lora: bool = False
    sequence: bool = False
    compiled: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv = draw(st.integers(1, 2))
    shape = Shape(
        heads=kv * draw(st.integers(1, 3)), kv=kv, inner=draw(st.integers(5, 6)), vocab=draw(st.integers(5, 7)),
        bias=False, tied=draw(st.booleans()), norm=draw(st.booleans()),
    )  # fmt: skip
    lora = draw(st.booleans())
    return Case(
        shape=shape, degree=draw(st.integers(1, min(3, shape.heads))), data=draw(st.integers(1, 2)),
        stage=draw(st.integers(0, 3)), offload=draw(st.sampled_from(["", "cpu", "nvme"])),
        again=draw(st.sampled_from(["", "torch", "reentrant", "zoo"])),
        compression="" if lora else draw(st.sampled_from(sorted(COMPRESSION))), lora=lora,
        sequence=False if lora else draw(st.booleans()),
    )  # fmt: skip


WAYS: dict[str, Callable[..., Any]] = {
    "": lambda block, x: block(x),
    "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "zoo": lambda block, x: ActivationCheckpointing()(block, x),
}


class Model(Decoder):
    again = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if not x.requires_grad:  # below LoRA: torch's reentrant way asks for it
            x = x.detach().requires_grad_()
        for block in self.blocks:
            x = WAYS[self.again](block, x)
        return F.cross_entropy(self.head(self.last(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def model_of(case: Case) -> Any:
    model = Model(case.shape)
    model.again = case.again
    if not case.lora:
        return model
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q", "v", "out", "up", "down"], init_lora_weights=False)
        return peft.get_peft_model(model, config).double()


def document(case: Case, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40}
    where = {"device": case.offload, "nvme_path": folder}
    if case.offload and case.stage > 0:
        zero["offload_optimizer"] = where
    if case.offload and case.stage == 3:
        zero["offload_param"] = where
    cut = {"autotp_size": case.degree, "plan": plan_of(case.shape).as_data(), "sequence": case.sequence}
    return {
        "train_batch_size": BATCHES, "gradient_accumulation_steps": BATCHES // case.data, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}}, "zero_optimization": zero,
        "tensor_parallel": cut if case.degree > 1 else {}, "compression_training": COMPRESSION[case.compression],
    }  # fmt: skip


def trained(case: Case, folder: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    engine, *_ = zoo.engine.initialize(document(case, folder), model_of(case))
    if case.compiled:
        for block in engine.module.blocks:
            block.compile(backend="eager")
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for ids in torch.randint(5, (BATCHES, 1, 5), generator=generator)[engine.batch_rank :: case.data]:
            engine.backward(engine(ids))
            engine.step()
        losses.append(float(engine.record.loss))
        norms.append(float(engine.get_global_grad_norm()))
    parameters = engine.optimizer.consolidated_parameters()
    engine.destroy()
    return losses, norms, parameters


def is_as_one_process(case: Case, run: Callable[[Case, str], list[Any]]) -> None:
    alone = replace(case, degree=1, data=1, stage=1, offload="", again="", sequence=False, compiled=False)
    with tempfile.TemporaryDirectory() as folder:
        losses, norms, expected = trained(alone, folder)
        for of_losses, of_norms, parameters in run(case, folder):
            assert of_losses == pytest.approx(losses, rel=1e-9)
            assert of_norms == pytest.approx(norms, rel=1e-8)
            assert parameters.keys() == expected.keys()
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10, msg=name)


def simulated(case: Case, folder: str) -> list[Any]:
    if case.degree * case.data == 1:
        return [trained(case, folder)]
    return sim.run(case.degree * case.data, lambda rank: trained(case, folder), seed=0)


@pytest.mark.dear
@examples(times=0.1)
@given(case=cases())
@example(case=Case(offload="nvme", again="reentrant", compression="quantized", sequence=True))
@example(case=Case(offload="cpu", again="zoo", lora=True, data=2, stage=2))
@example(case=Case(again="torch", compression="rows", data=2, sequence=True))
def test_a_split_model_trains_as_one_process_with_all_of_it(case: Case) -> None:
    if case.lora:
        pytest.importorskip("peft")
    is_as_one_process(case, simulated)


def compiled(rank: int, more: dict[str, Any], folder: str) -> Any:
    return trained(Case(compiled=True, **more), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"again": "torch", "offload": "cpu"}, {"sequence": True, "compression": "quantized"}]
)
def test_compiled_blocks_of_a_split_model_train_as_one_process(more: dict[str, Any]) -> None:
    def run(case: Case, folder: str) -> list[Any]:
        found = run_ranks(2, compiled, more, folder)
        assert len(found) == 2
        return list(found.values())

    is_as_one_process(Case(compiled=True, **more), run)
