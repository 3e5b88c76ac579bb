"""Models that are cut by tracing compute what they compute whole, and keep their names."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

import zoo.engine
from zoo import sim
from zoo.layout import split_of
from zoo.pipe import split
from zoo.zero import ZeroOptimizer

WIDTH, VOCABULARY = 6, 13
try:
    import transformers
except ImportError:
    transformers = None
needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor, *, turn: tuple[torch.Tensor, torch.Tensor], mask: Any = None) -> torch.Tensor:
        cos, sin = turn
        y = self.down(torch.tanh(self.up(self.norm(x) * cos + sin)))
        return x + (y if mask is None else y * mask[..., None])


class Turn(nn.Module):
    """Without parameters; two values, which all blocks get."""

    speed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speed", torch.linspace(0.1, 1.0, WIDTH), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] * self.speed
        return angle.cos(), angle.sin()


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Body(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.turn = Turn()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and mask.ndim < 3:
            mask = mask.view(ids.shape[0], -1).to(self.scale.dtype)
        x = self.embed(ids) * self.scale
        shape = x.size()
        turn = self.turn(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, turn=turn, mask=mask)
        return (self.norm(x) * self.scale + self.shift).view(shape)


class Model(nn.Module):
    """Written as language models are: keywords, a body and a head, tied weights, an output with the loss."""

    def __init__(self, num_blocks: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.body = Body(num_blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Linear(2, 2)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(
        self, ids: torch.Tensor | None = None, mask: torch.Tensor | None = None, labels: Any = None, keep: int = 0
    ) -> Output:
        logits = self.head(self.body(ids, mask=mask)[:, keep:])
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, keep:].flatten())
        return Output(logits=logits, loss=loss)


def made(num_blocks: int = 4, tied: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(num_blocks, tied)


def batch(step: int = 0, micro: int = 0, length: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + micro)
    ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    return {"ids": ids, "mask": (ids > 2).long(), "labels": ids}


class Loss(nn.Module):
    """For the plain runner: the loss of a batch that is a dict."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self._fixed = model, fixed

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = self.model(**batch, **self._fixed)
        found: torch.Tensor = out["loss"] if isinstance(out, dict) else out.loss
        return found


def config(micro_batches: int, stage: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60},
    }  # fmt: skip


def whole(make: Callable[[], nn.Module], batches: Any, n: int, **fixed: Any) -> tuple[list[float], dict[str, Any]]:
    engine, *_ = zoo.engine.initialize(config(n), Loss(make(), **fixed))
    losses = [float(engine.train_batch((batches(s, m),) for m in range(n))) for s in range(2)]
    found = {name.removeprefix("model."): v for name, v in engine.optimizer.consolidated_parameters().items()}
    return losses, found


def pipelined(model: nn.Module, batches: Any, n: int, stage: int) -> tuple[list[float], dict[str, Any], float]:
    engine, *_ = zoo.engine.initialize(config(n, stage), model)
    losses = [float(engine.train_batch(batches(s, m) for m in range(n))) for s in range(2)]
    found = engine.optimizer.consolidated_parameters()
    engine.destroy()
    return losses, found, 0.0


def check(make: Callable[[], nn.Module], batches: Any, ranks: int, stage: int, fixed: Any = None, **how: Any) -> None:
    n, fixed = 3, fixed or {}
    expected_losses, expected = whole(make, batches, n, **fixed)

    def one(rank: int) -> tuple[list[float], dict[str, Any], float]:
        return pipelined(split(make(), example={**batches(0, 0), **fixed}, **how), batches, n, stage)

    found: dict[str, Any] = {}
    for losses, parameters, _ in sim.run(ranks, one):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, value in parameters.items():
            assert torch.equal(found.setdefault(name, value), value), name
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "stage", "how"), [
    (2, 0, {"num_stages": 2}),
    (2, 3, {"num_stages": 2, "activation_checkpoint_interval": 1}),
    (3, 2, {"points": ["body.blocks.1", "body.norm"]}),
    (2, 3, {"points": ["body.blocks.0", "body.blocks.2", "head"], "schedule": "interleaved_1f1b"}),
    (4, 1, {"num_stages": 2, "schedule": "zb_h1", "partition_method": "type:Block"}),
])  # fmt: skip
def test_a_model_that_is_cut_trains_as_it_does_whole(ranks: int, stage: int, how: dict[str, Any]) -> None:
    # Four ranks are two pipelines with the same data each.
    check(made, batch, ranks, stage, **how)


@pytest.mark.dear
@pytest.mark.matrix
@needs_transformers
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("stage", [0, 3])
def test_models_of_hugging_face_train_as_they_do_whole(kind: str, stage: int) -> None:
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        found: nn.Module
        if kind == "llama":
            found = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                **small, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
            ))  # fmt: skip
        else:
            found = transformers.GPT2LMHeadModel(transformers.GPT2Config(
                **small, n_embd=8, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            ))  # fmt: skip
        return found

    def batches(step: int, micro: int) -> dict[str, torch.Tensor]:
        found = batch(step, micro, length=5 + micro % 2)
        mask = torch.ones_like(found["ids"])
        mask[0, : micro % 2] = 0  # padding in some batches, and none in others
        return {"input_ids": found["ids"], "attention_mask": mask, "labels": found["labels"]}

    check(make, batches, 2, stage, {"use_cache": False}, num_stages=2)


class Wired(nn.Module):
    """Layers that take what any earlier ones returned; some are used twice, some return two values."""

    def __init__(self, wires: Sequence[Wire], tied: bool) -> None:
        super().__init__()
        self.wires = wires
        self.layers = nn.ModuleList(Cell() for _ in wires)
        self.gain = nn.Parameter(torch.ones(4))
        if tied:
            self.layers[-1].mix.weight = self.layers[0].mix.weight

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        values = [x, x * self.gain]
        for number, wire in enumerate(self.wires):
            given = {"first": values[wire.first % len(values)], "others": [values[wire.other % len(values)], 2.0]}
            out = self.layers[wire.layer if wire.layer is not None else number](given)
            values += [out["sum"] + self.gain, out["both"][1]] if wire.two else [out["sum"]]
        return {"loss": nn.functional.mse_loss(values[-1], target) + values[-2].square().mean(), "out": values[-1]}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        other, factor = given["others"]
        out = torch.tanh(self.mix(given["first"])) + factor * other
        return {"sum": out, "both": (factor, out.sin())}


@dataclass(frozen=True)
class Wire:
    first: int
    other: int
    two: bool
    layer: int | None  # of an earlier one that is used again; its own is then used by nobody


@pytest.mark.dear
@examples(times=0.5)
@given(st.data())
def test_any_wiring_trains_as_it_does_whole(data: st.DataObject) -> None:
    num = data.draw(st.integers(2, 5), label="layers")
    wires = [
        Wire(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9)), data.draw(st.booleans()),
             data.draw(st.sampled_from([None, None, None, *range(n)])) if n > 1 else None)
        for n in range(num)
    ]  # fmt: skip
    tied, stage = data.draw(st.booleans(), label="tied"), data.draw(st.sampled_from([0, 1, 3]), label="stage")
    called = [n for n, wire in enumerate(wires) if wire.layer is None and n > 0]
    points = sorted(data.draw(st.lists(st.sampled_from(called), min_size=1, max_size=2, unique=True), label="points"))

    def make() -> Wired:
        torch.manual_seed(0)
        return Wired(wires, tied)

    def batches(step: int, micro: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * step + micro)
        return {name: torch.randn(2, 4, generator=generator) for name in ("x", "target")}

    check(make, batches, len(points) + 1, stage, points=[f"layers.{n}" for n in points])


def test_a_checkpoint_of_stages_loads_into_the_whole_model(tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, torch.Tensor]:
        engine, *_ = zoo.engine.initialize(config(2, 1), split(made(), num_stages=2, example=batch()))
        engine.train_batch(batch(0, m) for m in range(2))
        engine.save_checkpoint(str(tmp_path))
        found: dict[str, torch.Tensor] = engine.optimizer.consolidated_parameters()
        engine.destroy()
        return found

    first, last = sim.run(2, save)
    model = made()
    engine, *_ = zoo.engine.initialize(config(1), model)
    engine.load_checkpoint(str(tmp_path))
    for name, value in {**first, **last}.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_a_loss_function_gets_the_outputs_and_labels_that_the_model_does_not() -> None:
    def loss_fn(out: Output, labels: torch.Tensor) -> torch.Tensor:
        assert out.loss is None
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())

    inputs = {name: value for name, value in batch().items() if name != "labels"}

    def one(rank: int) -> list[float]:
        part = split(made(), ["body.blocks.2"], example=inputs, loss_fn=loss_fn)
        return pipelined(part, batch, 3, 0)[0]

    with pytest.raises(ValueError, match="got loss_fn= and an example with 'labels'"):
        split(made(), num_stages=1, example=batch(), loss_fn=loss_fn)
    expected, _ = whole(made, batch, 3)
    assert sim.run(2, one) == [pytest.approx(expected, rel=1e-5)] * 2


def stages(num_stages: int, **how: Any) -> list[Any]:
    """The pipelines of all ranks, each with its state."""
    how = {"example": batch(), **how}
    return sim.run(num_stages, lambda rank: split(made(), num_stages=num_stages, **how))


def test_the_states_of_all_stages_are_the_state_of_the_model() -> None:
    model = made()
    expected = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    for part in stages(3):
        found |= part.state_dict()
        assert all("pipe" not in name and not name[0].isdigit() for name in part.state_dict())
    assert set(found) == set(expected)
    other = made()
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(found)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_a_rank_holds_its_own_stage_and_ties_what_others_have_too() -> None:
    first, last = stages(2, points=["body.blocks.2"])
    names = [dict(part.named_parameters()) for part in (first, last)]
    assert {name.split(".")[2] for name in names[0] if ".blocks." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in names[1] if ".blocks." in name} == {"2", "3"}
    assert set(names[0]) & set(names[1]) == {"body.embed.weight", "body.scale"}
    for one in names:
        assert {name: split_of(p).tied for name, p in one.items() if split_of(p).tied} == {
            "body.embed.weight": "body.embed.weight", "body.scale": "body.scale",
        }  # fmt: skip
    assert "unused.weight" in names[0]
    assert "unused.weight" not in names[1]


@pytest.mark.dear
def test_memory_of_other_stages_is_free_when_nobody_holds_the_model() -> None:
    def one(rank: int) -> tuple[int, Any]:
        model = made()
        blocks = [weakref.ref(block) for block in model.body.blocks]
        part = split(model, ["body.blocks.2"], example=batch())
        del model
        gc.collect()
        return [block() is not None for block in blocks], part

    (first, _), (last, _) = sim.run(2, one)
    assert (first, last) == ([True, True, False, False], [False, False, True, True])


def test_a_copy_runs_on_its_own() -> None:
    part = split(made(), num_stages=1, example=batch())
    copied = copy.deepcopy(part)
    expected = part.eval()(batch()).logits
    for parameter in part.parameters():
        parameter.data.zero_()
    assert torch.equal(copied.eval()(batch()).logits, expected)


def test_the_model_itself_stays_as_it_is() -> None:
    model = made()
    before, names = copy.deepcopy(model)(**batch()), [name for name, _ in model.named_modules()]
    split(model, num_stages=1, example=batch())
    assert torch.equal(model(**batch()).loss, before.loss)
    assert [name for name, _ in model.named_modules()] == names


def test_what_the_forward_sets_while_it_is_traced_is_undone() -> None:
    model = Branches("keeps")
    split(model, num_stages=1, example=torch.randn(3, 4))
    assert not hasattr(model, "kept")
    assert not hasattr(model.second, "kept")


def test_evaluation_returns_what_the_model_returns_and_training_its_loss() -> None:
    model = made()
    part = split(model, num_stages=1, example=batch())
    out = part.eval()(batch())
    assert type(out) is Output
    assert torch.equal(out.logits, model(**batch()).logits)
    assert torch.equal(part.train()(batch()), model(**batch()).loss)


def test_other_shapes_than_the_example_has() -> None:
    model = made()
    part = split(model, num_stages=1, example=batch(length=3)).eval()
    for length in (1, 3, 8):
        assert torch.equal(part(batch(length=length)).logits, model(**batch(length=length)).logits)


def test_fixed_arguments_are_those_of_the_example() -> None:
    model = made()
    part = split(model, num_stages=1, example={**batch(), "keep": 2}).eval()
    assert torch.equal(part(batch()).logits, model(**batch(), keep=2).logits)


class Branches(nn.Module):
    """Forwards that decide, in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "value" and x.sum() > 0:
            x = -x
        if self.how == "shape" and x.shape[0] > 2:
            x = x * 2
        if self.how == "type" and isinstance(x, torch.Tensor):
            x = x + 5
        if self.how == "unpack":
            rows, columns = x.shape
            x = x.reshape(columns, rows).reshape(rows, columns) + rows
        if self.how == "loop":
            for row in range(len(x)):
                x = x + row
        if self.how == "training" and self.training:
            x = x + 3
        if self.how == "random":
            x = x + torch.rand(4)
        if self.how == "mode":
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.how == "assigns":
            x = x.clone()
            x[1:, 0] = x[:-1, 1].clone()
        if self.how == "function":
            x = x + nn.Softmax(-1)(x)
        if self.how == "external":
            x = weighed(x)
        if self.how == "object":
            x = self.second(x, object())
        if self.how == "keeps":
            self.kept = self.second.kept = x
        return self.second(x)


def weighed(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.matrix
@pytest.mark.parametrize(
    "how", ["shape", "type", "unpack", "loop", "training", "random", "mode", "assigns", "function"]
)
def test_branches_over_shapes_types_and_modes(how: str) -> None:
    model, x = Branches(how), torch.randn(3, 4)
    part = split(model, ["second"], example=x, num_stages=1, schedule=OneRank(), loss_fn=lambda out, labels: out)
    for training in (True, False):
        for _ in range(2):
            torch.manual_seed(5)
            expected = model.train(training)(x)
            torch.manual_seed(5)
            assert torch.equal(part.train(training)(x), expected)


class OneRank:
    """Two stages on one rank."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return (0, 0)


def test_a_batch_that_would_take_another_branch_is_refused() -> None:
    for how, other in (("shape", 2), ("loop", 4)):
        part = split(Branches(how), num_stages=1, example=torch.randn(3, 4))
        with pytest.raises(ValueError, match=r"test_tracing.py:\d+: this batch takes another path than the example"):
            part(torch.randn(other, 4))


def test_without_an_example_shapes_are_not_known() -> None:
    model, x = Branches("unpack"), torch.randn(3, 4)
    assert torch.equal(split(model, num_stages=1, loss_fn=lambda out, labels: out)(x), model(x))
    sentence = (
        r"test_tracing.py:\d+, in the forward of Branches, cannot be traced \(`if self.how == \"shape\".*"
        r"a branch is decided by what is not known.*give split\(\) an example="
    )
    with pytest.raises(ValueError, match=sentence):
        split(Branches("shape"), num_stages=1)
    with pytest.raises(ValueError, match=r"Model\.forward has defaults for all of its parameters; give split"):
        split(made(), num_stages=1)


def test_what_values_decide_is_refused_by_line_and_goes_as_a_leaf() -> None:
    x = torch.randn(3, 4)
    for how, line in (("value", 'if self.how == "value"'), ("external", "return x \\* 2 if")):
        with pytest.raises(ValueError, match=rf"`{line}.*a branch is decided by the values of a tensor"):
            split(Branches(how), num_stages=1, example=x)
    model = Branches("external")
    part = split(model, num_stages=1, example=x, leaf_functions=[weighed])
    for sign in (1, -1):
        assert torch.equal(part(sign * x), model(sign * x))
    assert weighed.__module__ == __name__
    assert weighed is globals()["weighed"]
    with pytest.raises(ValueError, match="an object of class object, made in forward, goes to a submodule"):
        split(Branches("object"), num_stages=1, example=x)


@pytest.mark.dear
def test_points_that_are_none_are_refused() -> None:
    for points, sentence in (
        (["body.blocks.9"], "names 'body.blocks.9', which is no submodule of this Model; there are body, body.embed"),
        (["body.norm", "body.blocks.1"], "names 'body.norm' before 'body.blocks.1', and the forward calls them the"),
        (["unused"], "names 'unused', which the forward does not call"),
        ("head", "points='head'; it takes a list"),
        ([], r"points=\[\]; it takes a list"),
    ):
        with pytest.raises(ValueError, match=sentence):
            split(made(), points, example=batch())
    with pytest.raises(ValueError, match="2 points make 3 stages, and 1 pipeline ranks have 1 with this schedule"):
        split(made(), ["body.blocks.1", "head"], num_stages=1, example=batch())


def test_an_example_with_an_argument_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"example with 'idz', which Model\.forward does not take; its arguments are ids"
    ):
        split(made(), num_stages=1, example={**batch(), "idz": batch()["ids"]})
    with pytest.raises(ValueError, match=r"it takes a torch\.nn\.Module"):
        split(weighed, num_stages=1, example=batch())  # type: ignore[arg-type]


def test_hooks_of_submodules_run_and_those_of_what_is_cut_are_refused() -> None:
    model, seen = made(), []
    model.body.blocks[1].register_forward_hook(lambda module, given, out: seen.append(out))
    part = split(model, num_stages=1, example=batch())
    seen.clear()
    part(batch())
    assert [type(out) for out in seen] == [torch.Tensor]
    model.body.register_forward_hook(lambda module, given, out: None)
    with pytest.raises(ValueError, match=r"body \(Body\) has hooks, and a cut goes through it"):
        split(model, num_stages=1, example=batch())


def test_a_model_that_an_engine_has_is_split_before_and_a_copy_of_it_at_any_time() -> None:
    model = made()
    optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"is in an engine, under a ZeRO optimizer or compressed; split it before"):
        split(model, num_stages=1, example=batch())
    again = split(copy.deepcopy(model), num_stages=1, example=batch())
    assert torch.equal(again.eval()(batch()).logits, made().eval()(**batch()).logits)
    optimizer.close()
    split(model, num_stages=1, example=batch())


def test_a_model_on_the_meta_device_gets_its_values_later() -> None:
    with torch.device("meta"):
        model = Model()
    part = split(model, num_stages=1, example=batch())
    state = made().state_dict()
    part.load_state_dict(state, assign=True)
    part.body.turn.speed = made().body.turn.speed
    assert torch.equal(part.eval()(batch()).logits, made()(**batch()).logits)


def test_a_batch_without_what_was_traced_is_refused() -> None:
    part = split(made(), num_stages=1, example=batch())
    with pytest.raises(ValueError, match="traced with a batch that has 'mask'; this one has 'ids', 'labels'"):
        part({name: value for name, value in batch().items() if name != "mask"})
