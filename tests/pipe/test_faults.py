"""What users do wrong, and what goes wrong on some ranks only: a sentence on all ranks, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import WIDTH, Block, Case, batch, check, config, layers, loss_fn
from torch import nn

import zoo.engine
from zoo import sim
from zoo.comm import RankFailedError
from zoo.config import ConfigError
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec, attach_loss


def everywhere(world: int, words: str, make: Any, kind: Any = ValueError) -> None:
    """Every rank raises it."""

    def fn(rank: int) -> None:
        with pytest.raises(kind, match=words):
            make(rank)

    sim.run(world, fn, seed=0)


def test_arguments_of_the_module() -> None:
    specs = [LayerSpec(Block, n) for n in range(3)]
    everywhere(2, "num_stages=3 with 2 ranks", lambda rank: PipelineModule(specs, num_stages=3))
    everywhere(2, "none of num_stages, topology, mesh", lambda rank: PipelineModule(specs))
    everywhere(4, "3 layers cannot be cut into 4 stages", lambda rank: PipelineModule(specs, num_stages=4))
    everywhere(2, "allowed are 'parameters'", lambda rank: PipelineModule(specs, 2, partition_method="best"))
    everywhere(2, "matches 0 of the layers", lambda rank: PipelineModule(specs, 2, partition_method="type:foo"))
    everywhere(2, r"layer 1 is 3, a int", lambda rank: PipelineModule([specs[0], 3], 2))
    everywhere(2, "takes a class derived", lambda rank: LayerSpec(torch.relu))  # type: ignore[arg-type]
    tied = [TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Linear, 2, 3)]
    everywhere(2, "one module has one description", lambda rank: PipelineModule(tied, 2))
    wrong = [TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="embedding"), specs[0]]
    everywhere(1, "has the parameters weight, bias", lambda rank: PipelineModule(wrong, 1))


def test_a_stage_without_parameters_is_refused_on_all_ranks() -> None:
    specs = [LayerSpec(Block, 0), torch.relu, torch.tanh]
    words = r"pipeline rank 1 of 2 has no parameters: its layers are 2 \(tanh\)"
    everywhere(2, words, lambda rank: PipelineModule(specs, 2, partition_method="uniform"))


def test_a_configuration_for_other_stages_is_refused() -> None:
    def make(**more: Any) -> Any:
        def fn(rank: int) -> None:
            model = PipelineModule(layers(Case()), num_stages=2, loss_fn=loss_fn)
            zoo.engine.initialize({**config(Case()), **more}, model)

        return fn

    everywhere(2, r"pipeline.stages = 3 and mesh.axes.pipe = 2", make(pipeline={"stages": 3}))
    schedule = {"schedule": {"type": "zb_v"}}
    everywhere(2, "section pipeline has its stages on the ranks", make(pipeline=schedule))
    mesh = {"mesh": {"axes": {"data": 1, "pipe": 1, "expert": 2}}, "train_batch_size": 16}
    everywhere(2, r"number 0 of 1 on the axis 'pipe' of the mesh.* as number \d of 2", make(**mesh))
    everywhere(2, "did you mean '1f1b'|there is no", make(pipeline={"schedule": {"type": "1f2b"}}), kind=ConfigError)


def test_the_section_needs_a_pipeline() -> None:
    with pytest.raises(ConfigError, match="the runner 'pipeline' does, and a Linear is run by 'plain'"):
        zoo.engine.initialize(
            {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1}}, "pipeline": {"reduce": "each"}},
            nn.Linear(2, 2),
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_data_that_end_on_some_ranks(stage: int) -> None:
    case = Case(pipe=2, data=2, num_micro=3, stage=stage)

    def fn(rank: int) -> None:
        engine = engine_of(case)
        before = float(engine.eval_batch(batches(case, engine)))
        few = [batch(case, 0, m, engine.batch_rank) for m in range(2 if engine.batch_rank else 3)]
        with pytest.raises(ValueError, match=r"in the middle of a batch of 3 .*rank 1 has 2, rank 3 has 2"):
            engine.train_batch(iter(few))
        with pytest.raises(StopIteration, match="the data ended before a batch of 3 micro-batches, on all ranks"):
            engine.train_batch(iter([]))
        assert float(engine.train_batch(batches(case, engine))) == pytest.approx(before)  # nothing has changed

    sim.run(4, fn, seed=0)


def test_data_that_fail_on_one_rank() -> None:
    case = Case(num_micro=2)

    def broken() -> Any:
        yield batch(case, 0, 0, 0)
        raise OSError("the disk is gone")

    def fn(rank: int) -> None:
        engine = engine_of(case)
        kind, words = (
            (OSError, "the disk is gone") if rank == 1 else (RuntimeError, "rank 1 says OSError: the disk is gone")
        )
        with pytest.raises(kind, match=words):
            engine.train_batch(broken() if rank == 1 else batches(case, engine))
        with pytest.raises(ValueError, match=r"\(inputs, labels\)"):
            engine.train_batch(iter([(1, 2, 3)] * 2))
        assert float(engine.train_batch(batches(case, engine))) > 0

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_one_stage_is_raised_on_all_and_the_next_batch_is_right(
    schedule: str, stage: int, where: str
) -> None:
    case = Case(schedule=schedule, pipe=2, data=1, num_micro=4, stage=stage)

    def train(fails: bool) -> Any:
        def fn(rank: int) -> Any:
            engine = engine_of(case)
            losses = [float(engine.train_batch(batches(case, engine, 0)))]
            if fails:
                hooks = []
                if rank == 1:
                    number = engine.module.bounds[engine.module.stages[0]]
                    layer = engine.module._calls[number]
                    hooks = [(layer.register_forward_hook if where == "forward" else
                              layer.register_full_backward_hook)(explode)]  # fmt: skip
                with pytest.raises((Exploded, RankFailedError), match="boom"):
                    engine.train_batch(batches(case, engine, 1))
                for hook in hooks:
                    hook.remove()
            losses.append(float(engine.train_batch(batches(case, engine, 1))))
            return losses, engine.optimizer.consolidated_parameters()

        return sim.run(2, fn, seed=0, group_timeout_s=5.0)

    for (losses, found), (expected_losses, expected) in zip(train(True), train(False), strict=True):
        assert losses == expected_losses
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Exploded(RuntimeError):
    pass


def explode(*args: Any) -> None:
    raise Exploded("boom")


def test_a_rank_that_goes() -> None:
    case = Case(pipe=3, num_micro=4)

    def fn(rank: int) -> str:
        engine = engine_of(case)
        engine.train_batch(batches(case, engine))
        if rank == 1:
            return "gone"
        with pytest.raises(RuntimeError) as raised:
            engine.train_batch(batches(case, engine))
        return type(raised.value).__name__

    assert sim.run(3, fn, seed=0, group_timeout_s=5.0)[1] == "gone"


def test_outputs_that_cannot_travel() -> None:
    class Odd(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": x, "set": {1, 2}}

    specs = [LayerSpec(Odd, 0), LayerSpec(nn.Linear, WIDTH, 2)]

    def fn(rank: int) -> None:
        model = PipelineModule(specs, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine = zoo.engine.initialize({**config(Case(num_micro=2))}, model)[0]
        words = r"the output of layer 0 has a set at \['set'\]"
        with pytest.raises((ValueError, RankFailedError), match=words):
            engine.train_batch(iter([(torch.ones(5, WIDTH), torch.ones(5, 2))] * 2))

    sim.run(2, fn, seed=0, group_timeout_s=5.0)


def test_losses_that_are_none() -> None:
    specs = [LayerSpec(Block, 0), LayerSpec(Block, 1)]

    def fn(rank: int) -> None:
        model = PipelineModule(specs, num_stages=2)
        engine = zoo.engine.initialize({**config(Case(num_micro=2))}, model)[0]
        words = r"the last layer, as there is no loss_fn, returned \(5, 6\) float32"
        with pytest.raises((ValueError, RankFailedError), match=words):
            engine.train_batch(iter([torch.ones(5, WIDTH)] * 2))

    sim.run(2, fn, seed=0, group_timeout_s=5.0)


def test_attach_loss_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="outside of a pipeline's forward"):
        attach_loss(torch.ones(2, requires_grad=True), torch.ones(()))
    with pytest.raises(ValueError, match=r"a loss of shape \(2,\)"):
        attach_loss(torch.ones(2), torch.ones(2))


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_fewer_micro_batches_than_stages(schedule: str, num_micro: int) -> None:
    check(Case(schedule=schedule, pipe=3, num_micro=num_micro, stage=1))
