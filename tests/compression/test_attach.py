"""Transforms on modules: what they change, and what stays the user's."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.compression.doubles import Masked, Times, site
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.compression.attach import attach, attached_to, class_of, detach, transforms_of


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TwoTensors(nn.Module):
    def forward(self, index: Tensor, *, x: Tensor) -> tuple[Tensor, Tensor]:
        return index, x


class Recursive(nn.Linear):
    """Calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = x @ self.weight.t()
        return self(y, depth - 1) @ self.weight.t() if depth else y


def compressed(factor: float = 3.0, offset: int = 0) -> Block:
    torch.manual_seed(0)
    block = Block()
    attach(block.first, "weight", "weight", Times(site("first"), factor=factor, offset=offset))
    return block


def expected(block: Block, x: Tensor, factor: float = 3.0) -> Tensor:
    first = nn.functional.linear(x, block.first.weight * factor, block.first.bias)
    return nn.functional.linear(torch.tanh(first), block.second.weight, block.second.bias)


def test_the_forward_sees_the_changed_weight_and_the_gradient_goes_through() -> None:
    block, x = compressed(), torch.randn(2, 4)
    weight = block.first.weight
    out = block(x)
    assert torch.equal(out, expected(block, x))
    out.sum().backward()
    grad = weight.grad
    weight.grad = None
    expected(block, x).sum().backward()
    assert torch.equal(grad, weight.grad)
    assert block.first.weight is weight
    assert "weight" not in block.first.__dict__


def test_before_its_offset_everything_is_the_untouched_module_bit_for_bit() -> None:
    block, x = compressed(offset=3), torch.randn(2, 4)
    plain = Block()
    plain.load_state_dict(block.state_dict())
    for step in range(3):
        for transform in transforms_of(block):
            transform.set_step(step)
        assert torch.equal(block(x), plain(x))
    for transform in transforms_of(block):
        transform.set_step(3)
    assert torch.equal(block(x), expected(block, x))
    assert not torch.equal(block(x), plain(x))


def test_class_name_keys_and_signature_stay_and_detach_gives_the_class_back() -> None:
    block = compressed()
    first = block.first
    assert isinstance(first, nn.Linear)
    assert type(first) is not nn.Linear
    assert class_of(first) is nn.Linear
    assert type(first).__name__ == "Linear"
    assert type(first).__qualname__ == "Linear"
    assert type(first).__module__ == nn.Linear.__module__
    assert repr(first) == repr(nn.Linear(4, 4))
    assert inspect.signature(first.forward) == inspect.signature(nn.Linear(4, 4).forward)
    assert list(block.state_dict()) == list(Block().state_dict())
    assert [n for n, _ in block.named_parameters()] == [n for n, _ in Block().named_parameters()]
    detach(block)
    assert type(first) is nn.Linear
    assert first.__dict__.keys() == nn.Linear(4, 4).__dict__.keys()
    assert not first._forward_pre_hooks
    assert not transforms_of(block)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save", "copy of a copy"])
def test_copies_have_transforms_of_their_own(how: str) -> None:
    block, x = compressed(), torch.randn(2, 4)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(block))
    elif how == "deepcopy":
        other = copy.deepcopy(block)
    elif how == "copy of a copy":
        other = pickle.loads(pickle.dumps(copy.deepcopy(block)))
    else:
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), block(x))
    assert type(other.first) is type(block.first)
    theirs, ours = transforms_of(other)[0], transforms_of(block)[0]
    assert theirs is not ours
    assert isinstance(theirs, Times)
    theirs.factor = 5.0
    assert torch.equal(block(x), expected(block, x))
    assert torch.equal(other(x), expected(block, x, 5.0))
    detach(other)
    assert torch.equal(block(x), expected(block, x))
    assert type(other.first) is nn.Linear


class OddReduce(nn.Linear):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return _odd, (self.in_features, self.out_features), self.__dict__


def _odd(a: int, b: int) -> OddReduce:
    return OddReduce(a, b)


def test_a_class_that_says_how_it_is_pickled() -> None:
    layer, x = OddReduce(2, 2), torch.randn(1, 2)
    attach(layer, "weight", "weight", Times(site()))
    other = pickle.loads(pickle.dumps(layer))
    assert torch.equal(other(x), layer(x))
    assert class_of(other) is OddReduce
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_an_exception_leaves_the_module_as_it_was() -> None:
    block = compressed()
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 5))
    assert "weight" not in block.first.__dict__
    x = torch.randn(2, 4)
    assert torch.equal(block(x), expected(block, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_with_the_changed_weight(reentrant: bool) -> None:
    block, x = compressed(), torch.randn(2, 4, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=reentrant)
    out.square().sum().backward()
    found, there = block.first.weight.grad, x.grad
    block.zero_grad()
    x.grad = None
    expected(block, x).square().sum().backward()
    torch.testing.assert_close(found, block.first.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(there, x.grad, rtol=0, atol=0)


def test_a_module_that_calls_itself_is_changed_once_in_each_call() -> None:
    layer, x = Recursive(3, 3, bias=False), torch.randn(1, 3)
    attach(layer, "weight", "weight", Times(site(), factor=2.0))
    plain = Recursive(3, 3, bias=False)
    plain.weight.data = layer.weight.data * 2
    assert torch.equal(layer(x), plain(x))
    assert "weight" not in layer.__dict__


def test_masks_come_before_quantisers_whatever_order_they_are_attached_in() -> None:
    for swap in (False, True):
        layer = nn.Linear(3, 3, bias=False)
        pair = [Times(site(), factor=-1.0), Masked(site(technique="masked"))]
        for transform in reversed(pair) if swap else pair:
            attach(layer, "weight", "weight", transform)
        x = torch.randn(2, 3)
        weight = layer.weight
        assert torch.equal(layer(x), x @ (weight * (weight > 0) * -1.0).t())


def test_two_that_quantise_one_weight_contradict_each_other() -> None:
    layer = nn.Linear(3, 3)
    attach(layer, "weight", "weight", Times(site("fc")))
    before = dict(attached_to(layer))
    for technique in ("times", "another"):
        with pytest.raises(ValueError, match=r"fc\.weight is changed twice in one way"):
            attach(layer, "weight", "weight", Times(site("fc", technique=technique)))
    assert dict(attached_to(layer)) == before
    attach(layer, "input", "", Times(site("fc", where="input")))


def test_inputs_and_outputs() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = copy.deepcopy(layer)
    attach(layer, "input", "", Times(site(where="input"), factor=2.0))
    attach(layer, "output", "", Times(site(where="output"), factor=-1.0))
    assert torch.equal(layer(x), -plain(2 * x))
    assert torch.equal(layer(input=x), -plain(2 * x))
    two, index = TwoTensors(), torch.arange(2)
    attach(two, "input", "", Times(site(where="input"), factor=2.0))
    attach(two, "output", "", Times(site(where="output"), factor=2.0))
    found = two(index, x=x)
    assert found[0] is index
    assert torch.equal(found[1], 4 * x)
    with pytest.raises(TypeError, match="called without a tensor of floating point"):
        two(index, x=index)


def test_what_is_learned_is_a_parameter_of_the_module_and_goes_with_the_transform() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    attach(layer, "weight", "weight", Masked(site(technique="masked"), shape=(3, 3)))
    assert list(layer.state_dict()) == ["weight", "bias", "mask_scores"]
    other = copy.deepcopy(layer)
    transform = transforms_of(other)[0]
    assert isinstance(transform, Masked)
    assert other.mask_scores is transform.scores
    other(x).sum().backward()
    assert transform.scores is not None
    assert transform.scores.grad is not None
    detach(layer)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_what_cannot_have_a_transform_is_refused_by_name() -> None:
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"fc\.weight: the module 'fc' has a forward of its own"):
        attach(layer, "weight", "weight", Times(site("fc")))
    with pytest.raises(ValueError, match=r"max_norm = 1\.0"):
        attach(nn.Embedding(3, 3, max_norm=1.0), "weight", "weight", Times(site("embed")))
    with pytest.raises(ValueError, match="has no parameter 'scale'"):
        attach(nn.Linear(3, 3), "weight", "scale", Times(site("fc", "scale")))


def test_the_fused_path_of_an_encoder_layer_does_not_pass_by_a_transform() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0).eval()
    plain, x = copy.deepcopy(layer), torch.randn(2, 3, 4)
    attach(layer.linear1, "weight", "weight", Times(site("linear1")))
    attach(layer.self_attn, "weight", "in_proj_weight", Times(site("self_attn", "in_proj_weight")))
    attach(layer.self_attn, "weight", "out_proj.weight", Times(site("self_attn", "out_proj.weight")))
    for weight in (plain.linear1.weight, plain.self_attn.in_proj_weight, plain.self_attn.out_proj.weight):
        weight.data *= 3
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-6)
    assert "weight" not in layer.self_attn.out_proj.__dict__


@pytest.mark.parametrize("offset", [0, 2])
def test_a_compiled_model_computes_the_same(offset: int) -> None:
    block, x = compressed(offset=offset), torch.randn(2, 4)
    plain = Block()
    plain.load_state_dict(block.state_dict())
    compiled = torch.compile(block, backend="aot_eager")
    for step in range(4):
        for transform in transforms_of(block):
            transform.set_step(step)
        wanted = plain(x) if step < offset else expected(block, x)
        found = compiled(x)
        torch.testing.assert_close(found, wanted)
        block.zero_grad()
        found.sum().backward()
        grad = block.first.weight.grad
        block.zero_grad()
        block(x).sum().backward()
        torch.testing.assert_close(grad, block.first.weight.grad)


def test_subclasses_and_containers_that_are_not_called_as_modules() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=Recursive(3, 3)))
    attach(model.b, "weight", "weight", Times(site("b"), factor=1.0))
    assert isinstance(model.b, Recursive)
    assert type(model.b).forward is not Recursive.forward
    assert type(Recursive(2, 2)).forward is Recursive.forward, "other modules of the class stay as they are"


def test_a_weight_that_is_taken_away_afterwards_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    attach(model[0], "weight", "weight", Times(site("0")))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"0\.weight is no parameter any more .*parametrize"):
        model(torch.randn(2, 4))
