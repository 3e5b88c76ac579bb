"""Linear layers become codes in place; what cannot is named and stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.kernels.packed_linear import pack_weight, packed_linear, unpack_weight
from zoo.nn import PackedLinear, pack_linears
from zoo.zero import ZeroOptimizer


class Tied(nn.Module):
    """Words, two layers of which one stands in two places, and a head with the weight of the words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(48, width)
        self.first = nn.Linear(width, width)
        self.again = self.first
        self.odd = nn.Linear(width, 24, bias=False)
        self.back = nn.Linear(24, width)
        self.head = nn.Linear(width, 48, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.first(self.words(ids))))
        return self.head(x + self.back(self.odd(x)))  # type: ignore[no-any-return]


@examples(times=1)
@given(
    bits=st.sampled_from([8, 4]), group=st.sampled_from([16, 32, None]), symmetric=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_multiplies_by_the_nearest_codes(bits: int, group: int | None, symmetric: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Tied()
    right = copy.deepcopy(model)
    left = pack_linears(model, bits=bits, group_size=group, symmetric=symmetric)
    assert list(left) == ["back"]
    assert "24" in left["back"]
    assert model.first is model.again
    with torch.no_grad():
        right.head.weight = nn.Parameter(right.words.weight.clone())
        weights = {"first": right.first.weight, "odd": right.odd.weight, "head": right.head.weight}
        for weight in weights.values():
            weight.copy_(unpack_weight(pack_weight(weight, bits=bits, group_size=group, symmetric=symmetric)))
        ids = torch.randint(48, (3, 5))
        torch.testing.assert_close(model(ids), right(ids), rtol=1e-4, atol=1e-5)
    assert isinstance(model.words.weight, nn.Parameter)


@pytest.mark.parametrize("bits", [8, 4])
def test_activations_in_8_bits_are_asked_for_and_kept(bits: int) -> None:
    torch.manual_seed(0)
    exact, model = Tied(), Tied()
    model.load_state_dict(exact.state_dict())
    pack_linears(exact, bits=bits)
    pack_linears(model, bits=bits, activations="int8")
    x = torch.randn(5, 32)
    copied = copy.deepcopy(model)
    copied.load_state_dict(exact.state_dict())  # codes alone: how x is multiplied is none of its
    for one in (model, copied):
        assert one.odd.activations == "int8"
        assert "activations=int8" in repr(one.odd)
        assert torch.equal(one.odd(x), packed_linear(x, one.odd.packed, activations="int8"))
        assert not torch.equal(one.odd(x), exact.odd(x))
        torch.testing.assert_close(one.odd(x), exact.odd(x), rtol=0, atol=0.05)
    assert exact.odd.activations == "exact"
    assert "activations" not in repr(exact.odd)
    assert list(model.state_dict()) == list(exact.state_dict())


def test_what_is_left_out_stays() -> None:
    model = Tied()
    left = pack_linears(model, leave_out=["*head", "first"])
    assert {name: left[name] for name in ("first", "head")} == {"first": "leave_out", "head": "leave_out"}
    assert type(model.head) is nn.Linear
    assert type(model.again) is nn.Linear
    assert isinstance(model.odd, PackedLinear)


def test_what_cannot_be_codes_is_told_before_anything_changes() -> None:
    model = Tied()
    with pytest.raises(ValueError, match="'nothing' fits none of the linear layers first"):
        pack_linears(model, leave_out=["nothing"])
    with pytest.raises(ValueError, match=r"it must be a list of patterns, such as \['\*head'\]"):
        pack_linears(model, leave_out="*head")
    for options in ({"bits": 3}, {"group_size": 24}, {"group_size": 0}, {"bits": 8.0}, {"group_size": 32.0}):
        with pytest.raises(ValueError, match="bits are 8 or 4, a group a multiple of 16"):
            pack_linears(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations='fp8'; allowed are 'exact' and 'int8'"):
        pack_linears(model, activations="fp8")  # type: ignore[arg-type]
    with torch.no_grad():
        model.odd.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the weight of odd has NaN or infinite elements"):
        pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    with pytest.raises(ValueError, match=r"no layer of Linear can be packed\. : it is the model itself"):
        pack_linears(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="It has no linear layers"):
        pack_linears(nn.Embedding(3, 4))


def test_a_bias_that_is_not_trained_is_not_trained_as_codes() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(False)
    pack_linears(model)
    assert [bool(layer.bias.requires_grad) for layer in model] == [False, True]  # type: ignore[union-attr]


def test_weights_that_others_read_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 2, 32), nn.Linear(32, 32), nn.Linear(32, 1))
    model[2].register_forward_hook(lambda *_: None)
    nn.utils.parametrizations.weight_norm(model[3])
    left = pack_linears(model)
    reasons = " ".join(left.values())
    assert list(left) == ["1.self_attn.out_proj", "1.linear1", "1.linear2", "2", "3"]
    assert all(part in reasons for part in ("reads its weight without calling it", "it has hooks"))
    assert isinstance(model[0], PackedLinear)


def test_a_file_does_not_change_with_the_order_of_codes() -> None:
    torch.manual_seed(0)
    model = Tied()
    pack_linears(model, bits=4)
    state = model.state_dict()
    other = Tied()
    pack_linears(other, bits=4)
    other.load_state_dict(state)
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids), other(ids))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("strict", [True, False])
def test_codes_that_are_not_all_there_are_not_loaded(bits: int, strict: bool) -> None:
    """Codes of another kind, or without their scales, would be other numbers."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        torch.manual_seed(0)
        mine, other = nn.Sequential(nn.Linear(32, 64)), nn.Sequential(nn.Linear(32, 64))
        pack_linears(mine, bits=bits, symmetric=symmetric)
        pack_linears(other, bits=bits, symmetric=not symmetric)
        before, state = mine(x), mine.state_dict()
        bias = state["0.bias"].clone()
        more = {**state, "0.minima": state["0.scales"]} if symmetric else {"0.minima": state["0.minima"]}
        less = {name: value for name, value in state.items() if name != "0.scales"}
        for wrong in (other.state_dict(), less, {"0.q": state["0.q"]}, more):
            with pytest.raises(RuntimeError, match=r"the packed layer '0'( takes q, scales|: q is torch)"):
                mine.load_state_dict(wrong, strict=strict)
            assert torch.equal(mine(x), before)
        mine.load_state_dict({"0.bias": torch.zeros(64)}, strict=False)  # none of them is no mistake
        torch.testing.assert_close(mine(x), before - bias)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_that_are_trained_do_not_become_codes(stage: int) -> None:
    def fn(rank: int) -> None:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer = ZeroOptimizer(model, stage=stage, lr=1e-2)
        with pytest.raises(ValueError, match="the weight of 0 is one that an engine or optimizer of zoo trains"):
            pack_linears(model)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
        pack_linears(copy.deepcopy(model))
        optimizer.close()
        pack_linears(model)

    sim.run(2, fn)
