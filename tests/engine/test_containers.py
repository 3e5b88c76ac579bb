"""What arrives in a model's forward: containers of the given class, the very ones where nothing changed."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zoo.deepspeed as deepspeed
from zoo.engine import initialize
from zoo.shard.containers import map_tensors


class KeysRead(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class KeysAreAttributes(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Mirrored(OrderedDict):  # type: ignore[type-arg]
    """As outputs of transformers: an item is an attribute too."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Pair(list):  # type: ignore[type-arg]
    kind = "pair"
    x = property(lambda self: self[0])


class Triple(tuple):  # type: ignore[type-arg]
    x = property(lambda self: self[0])


Named = namedtuple("Named", "x n")


class Checked(Named):
    """A constructor of other arguments."""

    def __new__(cls, x: torch.Tensor) -> Checked:
        return super().__new__(cls, x, 1)


class Held(UserDict):  # type: ignore[type-arg]
    x = property(lambda self: self["x"])


class HeldList(UserList):  # type: ignore[type-arg]
    x = property(lambda self: self[0])


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda x: KeysRead(x=x, n=1),
    "self": lambda x: KeysAreAttributes(x=x, n=1),
    "mirrored": lambda x: Mirrored(x=x, n=1),
    "list": lambda x: Pair([x, 1]),
    "tuple": lambda x: Triple((x, 1)),
    "namedtuple": lambda x: Named(x, 1),
    "constructor": Checked,
    "UserDict": lambda x: Held(x=x),
    "UserList": lambda x: HeldList([x]),
    "nested": lambda x: KeysRead(x=x, inner=[Named(x, (Pair([x]),))]),
}


class Model(nn.Module):
    """Keeps what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: Any, *others: Any) -> torch.Tensor:
        self.__dict__["seen"] = (batch, *others)
        return self.linear(batch.x).float().square().mean()


def engine_of(kind: str, dtype: torch.dtype) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    if dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True, "auto_cast": True}
    if kind == "engine":
        return initialize(config, Model())[0]
    return deepspeed.initialize(model=Model(), config=config)[0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as given", "cast"])
def test_containers_arrive_as_what_they_are(name: str, dtype: torch.dtype) -> None:
    engine = engine_of("engine", dtype)
    x = torch.randn(4, 3)
    given = KINDS[name](x)
    engine.backward(engine(given))
    engine.step()
    assert engine.global_samples == 4
    (seen,) = engine.module.seen
    assert type(seen) is type(given)
    assert seen.x.dtype is dtype
    assert (seen["x"] if isinstance(seen, (dict, UserDict)) else seen[0]) is seen.x
    assert given.x is x  # nothing is written into what the caller has
    assert (seen is given) == (dtype is torch.float32)
    torch.testing.assert_close(seen.x.float(), x, atol=0.02, rtol=0.01)


def test_the_facades_containers_too() -> None:
    given = KeysRead(x=torch.randn(4, 3))
    engine = engine_of("deepspeed", torch.float32)
    engine(given, given["x"].shape).backward()
    assert engine.module.seen[0] is given
    assert isinstance(engine.module.seen[1], torch.Size)


def test_what_forward_writes_is_seen_by_the_caller() -> None:
    class Writes(Model):
        def forward(self, batch: Any, *others: Any) -> torch.Tensor:
            loss = super().forward(batch)
            batch["loss"], others[0][0] = loss, "seen"
            return loss

    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = initialize(config, Writes())[0]
    batch, notes = KeysRead(x=torch.randn(4, 3)), [""]
    loss = engine(batch, notes)
    assert batch["loss"] is loss
    assert notes == ["seen"]


def test_other_containers() -> None:
    half = torch.Tensor.half
    x = torch.ones(2, 3)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    found = map_tensors(lambda t: t.half() if t.is_floating_point() else t, [packed, x.max(dim=0), deque([x], 3)])
    assert isinstance(found[0], PackedSequence)
    assert (found[0].data.dtype, found[0].batch_sizes.dtype) == (torch.float16, torch.int64)
    assert type(found[1]) is type(x.max(dim=0))
    assert (found[1].values.dtype, found[1].indices.dtype) == (torch.float16, torch.int64)
    assert (found[2].maxlen, found[2][0].dtype) == (3, torch.float16)
    counts = defaultdict(list, {"x": [x]})
    copied = map_tensors(half, counts)
    assert copied["new"] == []
    assert list(counts) == ["x"]
    assert copied["x"][0].dtype is torch.float16
    size = torch.Size([2])
    assert map_tensors(half, size) is size


def test_a_container_that_cannot_be_copied() -> None:
    class Locked(UserDict):  # type: ignore[type-arg]
        def __copy__(self) -> Any:
            raise RuntimeError("no copies")

    locked = Locked(x=torch.ones(2))
    assert map_tensors(lambda t: t, locked) is locked
    with pytest.raises(ValueError, match=r"in a Locked have to be moved or cast.*RuntimeError: no copies.*take a dict"):
        map_tensors(torch.Tensor.half, locked)


def test_batches_and_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import SequenceClassifierOutput

    encoded = transformers.BatchEncoding({"ids": torch.ones(2, 3, dtype=torch.long), "x": torch.ones(2, 3)})
    output = SequenceClassifierOutput(logits=torch.ones(2), hidden_states=(torch.ones(2), torch.ones(2)))
    found, other = map_tensors(lambda t: t.half() if t.is_floating_point() else t, (encoded, output))
    assert type(found) is transformers.BatchEncoding
    assert (found.ids.dtype, found.x.dtype, encoded.x.dtype) == (torch.int64, torch.float16, torch.float32)
    assert type(other) is SequenceClassifierOutput
    assert other.logits.dtype is other["logits"].dtype is other.hidden_states[1].dtype is torch.float16
    assert other.loss is None
    assert output.logits.dtype is torch.float32


class Padded(nn.Module):
    """Takes nested tensors, of ids (a layer of embeddings) or of features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.to_padded_tensor(self.layer(x), 0.0).square().mean()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_batches(layout: torch.layout) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = initialize(document, Padded(nn.Linear(4, 3)))[0]
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    engine.backward(engine(rows))
    engine.step()
    assert engine.record is not None
    assert (engine.record.samples, engine.record.tokens) == (2, 0)
    if layout is torch.jagged:
        ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], layout=layout)
        engine = initialize(document, Padded(nn.Embedding(10, 3)))[0]
        engine.backward(engine(ids))
        engine.step()
        assert engine.record is not None
        assert (engine.record.samples, engine.record.tokens) == (2, 5)
