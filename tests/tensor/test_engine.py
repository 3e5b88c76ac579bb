"""Tensor parallelism by configuration: the engine makes the mesh, cuts the model, and trains, saves and loads it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.tensor.models import Decoder, Shape, plan_of
from tests.tensor.test_loss import llama, plan_of_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zoo.engine
from zoo import sim
from zoo.layout import split_of
from zoo.tensor import Parts
from zoo.tensor.config import TensorParallelConfig
from zoo.tensor.part import TensorParallelPart, digest

SHAPE = Shape(heads=6, kv=2, inner=9, vocab=11, bias=False)


def document(degree: int, stage: int, data: int, **more: Any) -> dict[str, Any]:
    section = {"autotp_size": degree, "plan": plan_of(SHAPE).as_data()}
    return {
        "train_batch_size": 8, "gradient_accumulation_steps": 4 // data, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50},
        "tensor_parallel": section if degree > 1 else {}, **more,
    }  # fmt: skip


class Model(Decoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(SHAPE.vocab, (4, 2, 5), generator=generator))


def train(engine: Any, steps: range, data: int) -> list[float]:
    losses = []
    for step in steps:
        mine = batches(step)[engine.batch_rank :: data]
        for ids in mine:
            engine.backward(engine(ids))
            engine.step()
        losses.append(float(engine.record.loss))
    return losses


def run(degree: int, stage: int, data: int, steps: range, folder: str | None = None, tag: str = "", **more: Any) -> Any:
    """Losses, norms, whole parameters; loads ``folder`` where steps do not begin at 0, and saves to ``tag``."""

    def fn(rank: int) -> Any:
        engine, *_ = zoo.engine.initialize(document(degree, stage, data, **more), Model(SHAPE))
        assert engine.batch_ranks == data
        if steps.start:
            engine.load_checkpoint(folder)
        losses = train(engine, steps, data)
        found = losses, float(engine.get_global_grad_norm()), engine.optimizer.consolidated_parameters()
        if tag:
            engine.save_checkpoint(folder, tag)
        engine.destroy()
        return found

    return sim.run(degree * data, fn, seed=0) if degree * data > 1 else [fn(0)]


@pytest.mark.dear
@examples(times=0.1)
@given(
    degree=st.integers(2, 3), stage=st.integers(0, 3), data=st.sampled_from([1, 2]), then=st.integers(1, 3),
    stage_then=st.integers(0, 3),
)  # fmt: skip
@example(degree=2, stage=3, data=2, then=3, stage_then=1)
def test_the_engine_trains_and_goes_on_at_any_degree(
    degree: int, stage: int, data: int, then: int, stage_then: int
) -> None:  # fmt: skip
    (expected,) = run(1, 0, 1, range(3))
    with tempfile.TemporaryDirectory() as folder:
        first = run(degree, stage, data, range(2), folder, "two")
        second = run(then, stage_then, data, range(2, 3), folder)
    for found, steps in ((first, slice(2)), (second, slice(2, 3))):
        assert sum(losses[0] for losses, *_ in found) / len(found) == pytest.approx(expected[0][steps][0], rel=1e-9)
    for _, norm, parameters in second:
        assert norm == pytest.approx(expected[1], rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[2][name], rtol=1e-9, atol=1e-11, msg=name)


def test_a_degree_and_a_mesh_that_do_not_fit_are_told() -> None:
    odd = {"name": "x", "rules": [{"module": "a", "cuts": 1}]}

    def fn(rank: int) -> None:
        for section, error in (
            (
                {"autotp_size": 2, "plan": plan_of(SHAPE).as_data()},
                "asks for 2 ranks, and the mesh has 3 along 'tensor'",
            ),
            ({"tp": {"tp_size": 3}}, "no configuration with a model_type"),
            ({"autotp_size": 3, "plan": odd}, r"tensor_parallel\.plan: rule got cuts"),
            ({"autotp_size": 3, "tp": {"tp_size": 2}}, "keep one of them"),
            ({"autotp_size": 2}, "2 does not divide 3|do not divide|mesh"),
        ):
            given = {"train_batch_size": 4, "tensor_parallel": section}
            if "has 3 along" in error:
                given["mesh"] = {"axes": {"data": -1, "tensor": 3}}
            with pytest.raises(ValueError, match=error):
                zoo.engine.initialize(given, Model(SHAPE))

    sim.run(3, fn, seed=0)


def test_ranks_with_different_samples_are_told_before_the_first_forward() -> None:
    def fn(rank: int) -> None:
        engine, *_ = zoo.engine.initialize(document(2, 0, 2), Model(SHAPE))
        (ids, other), (mine, *_) = batches(0)[:2], batches(1)
        with pytest.raises(ValueError, match="rank 3 got other samples than rank 2"):  # on every rank
            engine((ids, ids, other, mine)[rank])
        with pytest.raises(ValueError, match="rank 1 got other samples than rank 0"):
            engine(ids=ids if rank % 2 else ids[:1])
        loss = engine((ids, other)[rank // 2])  # data-parallel ranks have their own
        engine.backward(loss)
        engine.destroy()

    sim.run(4, fn, seed=0)


def test_a_stage_of_a_pipeline_that_sees_no_samples_is_not_waited_for() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3, 1, 2), mesh_dim_names=("pipe", "data", "tensor"))
        part = TensorParallelPart(TensorParallelConfig(autotp_size=2, plan=plan_of(SHAPE).as_data()))
        part.prepare(Model(SHAPE), mesh)
        first, *_, last = batches(0)
        if rank // 2 == 0:  # of the first stage
            with pytest.raises(ValueError, match="rank 1 got other samples than rank 0"):
                part.on_batch((first if rank else last,), {}, None)
        elif rank // 2 == 2:
            part.on_batch((last,), {}, None)

    sim.run(6, fn, seed=0)


@pytest.mark.dear
def test_every_key_of_the_section_does_what_it_says() -> None:
    ids = torch.randint(11, (1, 6), generator=torch.Generator().manual_seed(1))

    def engine_of(**section: Any) -> Any:
        given = {"train_batch_size": 2, "tensor_parallel": {"plan": plan_of_llama().as_data(), **section}}
        return zoo.engine.initialize({**given, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, llama())[0]

    def fn(rank: int) -> None:
        whole = engine_of()
        assert whole.batch_ranks == 2
        expected = whole(ids, labels=ids)
        whole.destroy()
        for asked in ({"autotp_size": 2}, {"tp": {"tp_size": 2}}):
            engine = engine_of(**asked)
            assert (engine.batch_ranks, dict(zip(engine.mesh.mesh_dim_names, engine.mesh.shape, strict=True))) == (
                1, {"data": 1, "tensor": 2},
            )  # fmt: skip
            found = engine(ids, labels=ids)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            engine.destroy()
        wrong = plan_of_llama().as_data()
        wrong["rules"][3]["rows"] = "dim kv"  # values would be cut inside of heads
        with pytest.raises(ValueError, match="degree 2"):
            engine_of(autotp_size=2, plan=wrong)
        engine = engine_of(autotp_size=2, plan=None, sequence=True)
        torch.testing.assert_close(engine(ids, labels=ids).loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert any(split_of(p).partial for _, p in engine.module.named_parameters())  # norms, of a share of the tokens
        engine.destroy()
        engine = engine_of(autotp_size=2, plan=None, prove=False, vocab_parallel_lm_head=True)
        found = engine(ids, labels=ids)
        assert isinstance(found.logits, Parts)
        engine.backward(found.loss)
        engine.step()
        engine.destroy()
        with pytest.raises(ValueError, match="11 cannot be dealt in multiples of 4"):
            engine_of(autotp_size=2, tp={"tp_grain_size": 4})

    sim.run(2, fn, seed=0)


@pytest.mark.dear
def test_deepspeeds_ways_to_say_how_a_model_is_cut() -> None:
    ids = torch.randint(11, (1, 6), generator=torch.Generator().manual_seed(1))
    rows, ends = ["self_attn.o_proj", "mlp.down_proj"], r"(self_attn\.[qkv]_proj|mlp\.(up|gate)_proj)\.weight$"
    specs = [
        {"patterns": [rf".*\.{ends}"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
    ]
    mlp = [{"patterns": [r".*self_attn\."], "partition_type": "skip"}]

    def fn(rank: int) -> None:
        whole = llama()
        expected = whole(ids, labels=ids)
        names = {name for name, _ in whole.named_modules() if name.endswith("_proj")}
        for section, cut in (
            ({"partition_config": {"layer_specs": specs}}, names),
            ({"preset_model": "llama"}, names),
            ({"preset_model": "llama", "partition_config": {"layer_specs": mlp}}, {n for n in names if "mlp" in n}),
            ({"preset_model": "llama", "partition_config": {"layer_specs": specs[:1] * 2 + specs[1:],
                                                            "use_default_specs": False}}, names),
            ({"injection_policy_tuple": rows}, names),
            ({"injection_policy_tuple": {"LlamaDecoderLayer": rows}, "tp_overlap_comm": True}, names),
        ):  # fmt: skip
            given = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2, **section}}
            engine = zoo.engine.initialize({**given, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, llama())[0]
            found = {n.removesuffix(".weight") for n, p in engine.module.named_parameters() if split_of(p).box}
            assert found == cut, section
            loss = engine(ids, labels=ids).loss
            torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
            engine.backward(loss)
            engine.step()
            engine.destroy()
        for section, told in (
            ({"partition_config": {"layer_specs": specs[:1]}}, "is refused: the split model fails"),
            (
                {"partition_config": {"specs": []}},
                "tensor_parallel.partition_config: partition_config has no key 'specs'",
            ),
            ({"preset_model": "gpt"}, "tensor_parallel.preset_model: preset_model 'gpt'; there are bloom"),
            ({"preset_model": "llama", "injection_policy_tuple": rows}, "keep one of them"),
            ({"partition_config": {}, "plan": {"name": "x"}}, "plan, partition_config say how"),
            ({"plan": {"name": "x"}}, "tensor_parallel.plan has no rules"),
            ({"injection_policy_tuple": {}}, "it takes names of row-parallel layers"),
            ({"sequence": True, "tp_overlap_comm": True}, "tokens are summed and scattered whole"),
            ({"injection_policy_tuple": ["o_project"]}, "names o_project, and LlamaForCausalLM has no list"),
        ):
            with pytest.raises(ValueError, match=told):
                zoo.engine.initialize(
                    {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2, **section}}, llama()
                )

    sim.run(2, fn, seed=0)


def test_an_optimizer_of_whole_tensors_is_told_that_no_stage_makes_parts_whole() -> None:
    def fn(rank: int) -> None:
        model = Model(SHAPE)
        given = {name: value for name, value in document(2, 0, 1).items() if name != "optimizer"}
        with pytest.raises(NotImplementedError, match=r"along the mesh axes \('tensor',\)\. Leave these axes out"):
            zoo.engine.initialize(given, model, optimizer=torch.optim.Adafactor(model.parameters()))

    sim.run(2, fn, seed=0)


def test_batches_of_every_layout_are_compared() -> None:
    one, other = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    jagged = [torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged) for x in (one, other)]
    strided = [torch.nested.nested_tensor([x[0], x[1, :1]]) for x in (one, other)]
    of_all = [jagged, strided]
    of_all += [[make(x) for x in (one, other)] for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr)]
    of_all += [[torch.complex(x, x).conj() for x in (one, other)]]
    for first, second in of_all:
        assert digest(first) == digest(first.clone())
        assert digest(first) != digest(second)
    assert digest(one.to("meta")) == digest(other.to("meta"))
