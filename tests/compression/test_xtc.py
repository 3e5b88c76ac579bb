"""XTC: a student from some of its teacher's layers, with few bits, that learns to give what the teacher gives."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.compression import CompressionScheduler, Student, hidden_loss, logits_loss, transforms_of, xtc
from zoo.compression.layer_reduction import has_begun
from zoo.engine import initialize

WIDTH, CLASSES = 8, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x + self.down(torch.tanh(self.up(self.norm(x)))), "more"


class Body(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.token = nn.Parameter(torch.randn(width))
        self.layer = nn.ModuleList(Block(width) for _ in range(layers))


class Net(nn.Module):
    def __init__(self, layers: int = 4, *, seed: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = Body(layers, width)
        self.head = nn.Linear(width, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body.embed(x) + self.body.token
        for block in self.body.layer:
            h = block(h)[0]
        out: Tensor = self.head(h) * self.scale
        return out


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes that no line divides."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=dice)
    return x, (x[:, :3].abs().argmax(1))


def fit(model: nn.Module, loss: Any, steps: int, *, count: int = 512, lr: float = 0.01, after: Any = None) -> None:
    x, y = data(count, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    dice = torch.Generator().manual_seed(2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        some = torch.randint(count, (64,), generator=dice)
        optimizer.zero_grad()
        loss(x[some], y[some]).backward()
        optimizer.step()
        if after is not None:
            after()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, y = data(1000, 9)
    return float((model.eval()(x).argmax(1) == y).float().mean())


@functools.cache
def taught() -> Net:
    torch.set_num_threads(1)
    teacher = Net(seed=3, width=16)
    fit(teacher, lambda x, y: F.cross_entropy(teacher(x), y), 250)
    return teacher


LAYERS = "body.layer"


def test_a_student_begins_as_its_teacher_with_few_bits() -> None:
    teacher, model = Net(seed=3), Net(2, seed=4)
    with torch.no_grad():
        teacher.scale.fill_(2.0)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    student = xtc(model, teacher, layers=LAYERS, bits=2)
    assert student.module is model
    for ours, theirs in ((0, 1), (1, 3)):
        wanted = teacher.body.layer[theirs].state_dict()
        assert all(torch.equal(v, wanted[name]) for name, v in model.body.layer[ours].state_dict().items())
    for name in ("body.embed.weight", "body.token", "head.bias", "scale"):
        assert torch.equal(model.state_dict()[name], teacher.state_dict()[name]), name
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert {t.site.name for t in transforms_of(student)} == {
        f"body.layer.{i}.{name}{what}" for i in range(2) for name in ("up", "down") for what in (".weight", ":input")
    }
    assert list(student.state_dict()) == [f"module.{name}" for name in model.state_dict()], "the teacher is no part"
    assert not teacher.training
    chosen = xtc(Net(2), teacher, layers=LAYERS, teacher_layers=[0, 2], modules=["embed"], input_bits=32)
    assert torch.equal(chosen.module.body.layer[1].up.weight, teacher.body.layer[2].up.weight)  # type: ignore[union-attr,index]
    assert "body.embed.weight" in {t.site.name for t in transforms_of(chosen)}
    assert {t.site.where for t in transforms_of(chosen)} == {"weight"}


def hidden_of(model: Net, x: Tensor) -> list[Tensor]:
    h, found = model.body.embed(x) + model.body.token, []
    for block in model.body.layer:
        h = block(h)[0]
        found.append(h)
    return found


def test_the_loss_is_what_it_says() -> None:
    teacher, (x, y) = Net(seed=3), data(16, 0)
    student = xtc(
        Net(2), teacher, layers=LAYERS, temperature=2.0, hidden=0.5, num_inputs=1, task_weight=0.25,
        task=lambda output, y: F.cross_entropy(output, y),
    )  # fmt: skip
    model: Any = student.module
    wanted = (
        logits_loss(model(x), teacher(x), temperature=2.0)
        + 0.5 * hidden_loss(hidden_of(model, x), hidden_of(teacher, x), {0: 1, 1: 3})
        + 0.25 * F.cross_entropy(model(x), y)
    )
    torch.testing.assert_close(student(x, y), wanted)
    student(x, y).backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    assert torch.equal(student.eval()(x, y), model(x)), "in evaluation what the model returns"
    alone = xtc(Net(4), teacher, layers=LAYERS, hidden=0, quantise_from=1)
    assert float(alone(x).detach()) == pytest.approx(0.0, abs=1e-6), "before its bits fall it is its teacher"


class Tokens(nn.Module):
    """As models of Hugging Face: named arguments, an object with logits."""

    def __init__(self, layers: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, WIDTH)
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        h = self.embed(input_ids)
        for block in self.layer:
            h = torch.tanh(block(h))
        return SimpleNamespace(logits=self.head(h), loss=None)


def test_tokens_that_are_masked_do_not_count() -> None:
    student = xtc(Tokens(1), Tokens(2, seed=1), layers="layer")
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = student(input_ids=ids, attention_mask=mask)
    other = ids.clone()
    other[1, 2] = 6
    assert torch.equal(student(input_ids=other, attention_mask=mask), found)
    assert not torch.equal(student(input_ids=other), student(input_ids=ids))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2])
def test_from_teacher_to_cleaned_model_and_distilling_is_better_than_not(bits: int) -> None:
    teacher = taught()
    assert accuracy(teacher) > 0.85
    found = {}
    for how in ("distilled", "labels"):
        student = xtc(Net(2, seed=7, width=16), teacher, layers=LAYERS, bits=bits)
        scheduler = CompressionScheduler(student)
        by_labels = lambda x, y, s=student: F.cross_entropy(s.module(x), y)  # noqa: E731
        loss = (lambda x, y, s=student: s(x)) if how == "distilled" else by_labels
        fit(student, loss, 150, count=64, after=scheduler.step)
        x, _ = data(500, 5)
        model = student.clean()
        assert model is student.module
        values = {1: 2, 2: 3}[bits]
        assert all(len(layer.up.weight.unique()) == values for layer in model.body.layer)  # type: ignore[union-attr]
        assert {t.site.where for t in transforms_of(model)} == {"input"}
        with torch.no_grad():
            found[how] = accuracy(model), float(logits_loss(model(x), teacher(x)))
    assert found["distilled"][0] > found["labels"][0] + 0.04, found
    assert found["distilled"][1] < 0.7 * found["labels"][1], found


def test_exact_weights_come_first_where_that_is_asked_for() -> None:
    student = xtc(Net(2), Net(seed=3), layers=LAYERS, quantise_from=3)
    scheduler = CompressionScheduler(student)
    x, _ = data(4, 0)
    model: Any = student.module
    exact = student.eval()(x)
    for _ in range(3):
        assert torch.equal(student(x), exact)
        scheduler.step()
    assert not torch.equal(student(x), exact)
    assert len(model.body.layer[0].up.weight.unique()) > 3


def engine_of(stage: int, **more: Any) -> Any:
    torch.set_num_threads(1)
    student = xtc(Net(2, seed=7).double(), Net(seed=3).double(), layers=LAYERS, bits=2, **more)
    x, _ = data(16, 1)
    document = {
        "train_batch_size": 8, "seed": 5, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 150},
        **student.config,
    }  # fmt: skip
    return initialize(document, student, training_data=TensorDataset(x.double()))[0]


@pytest.mark.dear
def test_an_engine_trains_it_at_every_stage(tmp_path: Path) -> None:
    def job(stage: int) -> tuple[list[float], Tensor]:
        engine = engine_of(stage)
        losses = [float(engine.train_batch()) for _ in range(4)]
        engine.destroy()
        assert isinstance(engine.module, Student)
        clean: Any = engine.module.clean()
        return losses, clean.body.layer[0].up.weight.detach().clone()

    first = sim.run(2, lambda rank: job(0))
    assert first[0][0][-1] < first[0][0][0]
    for stage in (1, 3):
        other = sim.run(2, lambda rank, stage=stage: job(stage))  # type: ignore[misc]
        for (losses, weight), (wanted, value) in zip(other, first, strict=True):
            assert losses == wanted
            assert torch.equal(weight, value)
    engine = engine_of(0)
    [engine.train_batch() for _ in range(2)]
    engine.save_checkpoint(str(tmp_path))
    wanted_losses = [float(engine.train_batch()) for _ in range(2)]
    other = engine_of(2)
    other.load_checkpoint(str(tmp_path))
    assert [float(other.train_batch()) for _ in range(2)] == wanted_losses


def test_copies_and_pickles() -> None:
    student = xtc(Net(2), Net(seed=3), layers=LAYERS)
    x, _ = data(4, 0)
    for twin in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(twin(x), student(x))
    other = xtc(Net(2, seed=9), Net(seed=3), layers=LAYERS)
    with torch.no_grad():
        student.module.head.weight.mul_(2)  # type: ignore[union-attr,operator]
    other.load_state_dict(student.state_dict())
    assert torch.equal(other(x), student(x))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": "layer"}, r"the student has no module 'layer'; the nearest names are 'body\.layer'"),
        ({"layers": "head"}, r"'head' is a Linear of the student, and no list of layers"),
        ({"model": Net(5)}, r"the student's 'body\.layer' has 5 layers, the teacher's 4; make it with fewer"),
        ({"model": Net(2, width=6)}, r"parameter 'body\.token' of shape \(6,\), and the teacher one of shape \(8,\)"),
        ({"teacher_layers": [1]}, r"teacher_layer = \[1\] names 1 layers, and the student's 'body\.layer' has 2"),
        ({"teacher_layers": [1, 7]}, r"has the layers 0 to 3, and no layer 7"),
        ({"bits": 0}, r"bits = 0; 1 is binary, 2 ternary, and 8 the most"),
        ({"modules": ["hed"]}, r"the pattern 'hed' matches no module"),
        ({"num_groups": 7}, r"quantize_groups = 7, and body\.layer\.0\.up\.weight has \(16, 8\) = 128 elements"),
        ({"temperature": 0.0}, r"temperature = 0\.0, hidden = 1\.0, task_weight = 1\.0; the temperature is above 0"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], sentence: str) -> None:
    model = options.get("model") or Net(2, seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"layers": LAYERS, **{key: value for key, value in options.items() if key != "model"}}
    with pytest.raises(ValueError, match=sentence):
        xtc(model, Net(seed=3), **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not transforms_of(model)
    assert not has_begun(model)


def test_a_model_does_not_teach_itself() -> None:
    model = Net(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"has weights of the teacher itself.*copy\.deepcopy"):
        xtc(model, model, layers=LAYERS)
    assert transforms_of(model) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    xtc(model, copy.deepcopy(model), layers=LAYERS)


class Scalar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


class Skips(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body.layer[0](self.body.embed(x))[0])
        return out


def test_what_a_forward_cannot_return() -> None:
    x, _ = data(4, 0)
    with pytest.raises(ValueError, match="a model returned a scalar, and distillation compares logits"):
        xtc(Scalar(2), Scalar(4), layers=LAYERS)(x)
    with pytest.raises(ValueError, match="the forward has not called layer 1 of the list"):
        xtc(Skips(2), Net(4), layers=LAYERS)(x)
