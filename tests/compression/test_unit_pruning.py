"""Rows and channels: what is masked, and that it really goes away."""

from __future__ import annotations

import copy
import functools
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.test_masks import reference
from tests.profiles import examples
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zoo.compression import CompressionScheduler, init_compression, redundancy_clean
from zoo.compression.attach import transforms_of

ROWS, CHANNELS = "compression_training.row_pruning", "compression_training.channel_pruning"


def units(
    modules: list[str], related: list[list[str]] | None, *, ratio: float = 0.5, technique: str = "row_pruning",
    **shared: Any,
) -> dict[str, Any]:  # fmt: skip
    group = {"modules": modules, "related_modules": related, "params": {"dense_ratio": ratio}}
    section = {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}
    return {"compression_training": {technique: section}}


class Mlp(nn.Module):
    def __init__(self, act: Any = None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(6, 10, bias=bias), nn.Linear(10, 4, bias=bias)
        self.act = act or torch.relu

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((6, 10), (6, 10), (10, 6)))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.gate(x)) * self.up(x))
        return out


class ConvNet(nn.Module):
    def __init__(self, padding: int = 1, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=not norm)
        self.bn1: nn.Module = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(8, 6, 3, padding=padding)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(6 * 9 if padding else 6 * 4, 5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.pool(torch.sigmoid(self.conv2(h)))
        out: Tensor = self.fc(torch.flatten(h, 1))
        return out


def images(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return int(counter.get_total_flops())


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def cleaned(model: nn.Module, config: dict[str, Any], x: Tensor) -> tuple[nn.Module, Tensor]:
    """Masked by a configuration, then cleaned: the output stays."""
    model = init_compression(model, config)
    model.eval()
    with torch.no_grad():
        model(x)
        masked = model(x)
        clean = redundancy_clean(copy.deepcopy(model), config)
        found = clean(x)
    torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-5 * float(masked.abs().max()))
    assert not transforms_of(clean)
    return clean, masked


@examples(times=3)
@given(st.sampled_from([0.1, 0.3, 0.5, 1.0]), st.booleans())
def test_rows_of_the_largest_norm_stay_with_their_biases(ratio: float, conv: bool) -> None:
    model = ConvNet(norm=False) if conv else Mlp()
    name, x = ("conv1", images()) if conv else ("fc1", torch.randn(3, 6))
    plain = copy.deepcopy(model)
    config = units([name], None, ratio=ratio)
    model = redundancy_clean(init_compression(model, config), config)
    before, after = getattr(plain, name), getattr(model, name)
    norms = before.weight.detach().abs().flatten(1).sum(1).numpy()
    stays = torch.from_numpy(reference(norms, max(1, round(ratio * len(norms)))))
    assert torch.equal(after.weight, before.weight * stays.view(-1, *[1] * (before.weight.dim() - 1)))
    assert torch.equal(after.bias, before.bias * stays)
    assert model(x).shape == plain(x).shape


def test_learned_rows_get_the_gradient_of_their_mask() -> None:
    model = init_compression(Mlp(), units(["fc1"], None, method="topk"))
    weight, x = model.fc1.weight.detach(), torch.randn(3, 6)
    assert list(model.fc1.state_dict()) == ["weight", "bias", "weight_row_scores"]
    norms = weight.abs().sum(1)
    torch.testing.assert_close(model.fc1.weight_row_scores.detach(), norms / norms.mean())
    model.fc1(x).sum().backward()
    torch.testing.assert_close(model.fc1.weight_row_scores.grad, (x.sum(0) * weight).sum(1))
    stays = reference(norms.numpy(), 5)
    np.testing.assert_array_equal(model.fc1.weight.grad.abs().sum(1).ne(0).numpy(), stays)


@pytest.mark.parametrize("act", [torch.relu, F.gelu, nn.SiLU(), torch.sigmoid, F.softplus, nn.Tanh(), torch.cos])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_go_and_what_they_gave_is_in_the_next_bias(act: Any, bias: bool, method: str) -> None:
    x = torch.randn(5, 6)
    config = units(["fc1"], [["fc2"]], ratio=0.3, method=method)
    clean, _ = cleaned(Mlp(act, bias), config, x)
    assert tuple(clean.fc1.weight.shape) == (3, 6)
    assert tuple(clean.fc2.weight.shape) == (4, 3)
    assert clean.fc1.out_features == clean.fc2.in_features == 3
    gives = float(act(torch.zeros(1))) != 0
    assert (clean.fc2.bias is not None) == (bias or gives)
    assert flops(clean, x) == 2 * 5 * (6 * 3 + 3 * 4)
    assert flops(Mlp(), x) == 2 * 5 * (6 * 10 + 10 * 4)
    assert size(clean) == 3 * 6 + 3 * 4 + (3 if bias else 0) + (4 if bias or gives else 0)


def test_gated_partners_lose_their_rows_too_and_two_masks_leave_what_both_leave() -> None:
    x = torch.randn(2, 5, 6)
    clean, _ = cleaned(Gated(), units(["gate"], [["up", "down"]], ratio=0.4), x)
    assert [tuple(getattr(clean, n).weight.shape) for n in ("gate", "up", "down")] == [(4, 6), (4, 6), (6, 4)]
    both = units(["gate", "up"], [["up", "down"], ["gate", "down"]], ratio=0.5)
    masked = init_compression(Gated(), both)
    masked(x)
    left = int((transforms_of(masked)[0].stays & transforms_of(masked)[1].stays).sum())  # type: ignore[attr-defined]
    clean, _ = cleaned(Gated(), both, x)
    assert clean.down.in_features == left < 5


def test_channels_go_with_their_norm_and_the_next_layer() -> None:
    x = images()
    config = units(["conv1"], [["conv2", "bn1"]], ratio=0.25, technique="channel_pruning")
    clean, _ = cleaned(ConvNet(), config, x)
    assert (clean.conv1.out_channels, clean.bn1.num_features, clean.conv2.in_channels) == (2, 2, 2)
    assert clean.bn1.running_mean.shape == (2,)
    assert flops(clean, x) < flops(ConvNet(), x) / 3


def test_what_a_norm_in_training_makes_of_a_masked_channel_is_zero() -> None:
    config = units(["conv1"], [["conv2", "bn1"]], ratio=0.25, technique="channel_pruning")
    model = init_compression(ConvNet(), config)
    scheduler = CompressionScheduler(model)
    model.train()
    for _ in range(3):
        model(images()).sum().backward()
        scheduler.step()
    stays = transforms_of(model)[0].stays  # type: ignore[attr-defined]
    assert torch.equal(model.bn1.weight.grad.ne(0), stays)
    model.eval()
    masked = model(images())
    torch.testing.assert_close(redundancy_clean(model, config)(images()), masked, rtol=1e-5, atol=1e-5)


def test_a_channel_goes_through_a_flatten_into_blocks_of_columns_of_a_linear_layer() -> None:
    x = images()
    clean, _ = cleaned(ConvNet(), units(["conv2"], [["fc"]], ratio=0.5), x)
    assert clean.conv2.out_channels == 3
    assert clean.fc.in_features == 27
    assert float(torch.sigmoid(torch.zeros(1))) == 0.5, "what goes into the bias of fc"


def test_constants_that_zero_padding_would_cut_off_stay_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = units(["conv1"], [["conv2"]], ratio=0.25, technique="channel_pruning")  # the norm is not masked
    with caplog.at_level(logging.WARNING, "zoo.compression"):
        clean, _ = cleaned(ConvNet(), config, images())
    stay = clean.conv1.out_channels
    assert 2 < stay < 8, "relu makes some of the norm's biases zero, and those channels go"
    assert f"{CHANNELS}.different_groups.g: {stay - 2} of the 6 units of 'conv1' that are zero stay" in caplog.text
    clean, _ = cleaned(ConvNet(padding=0), config, images())
    assert clean.conv1.out_channels == 2, "without padding a constant is a constant everywhere"


class Residual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        out: Tensor = self.fc2(torch.relu(h)) + h[..., :4]
        return out


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.norm(self.fc1(x)))
        return out


class Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h) if h.sum() > 0 else self.fc2(-h)


class Twice(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        out: Tensor = self.fc2(h) + self.other(h)
        return out


class Tied(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 10)
        self.again.weight = self.fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x))) + self.again(x).sum()
        return out


def hooked() -> Mlp:
    model = Mlp()
    model.fc1.register_forward_hook(lambda module, args, output: output + 1)
    return model


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x)) / self.fc1.out_features)
        return out


class Reads(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x))) + self.fc2.weight.sum()
        return out


def wrapped(step: Any) -> Any:
    """A decorator as libraries have them: it takes any arguments and says that it is what it wraps."""

    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def around(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = step(self, forward(self, *args, **kwargs))
            return out

        return around

    return decorate


class Wrapped(Mlp):
    @wrapped(lambda self, out: 2 * out)
    def forward(self, x: Tensor, *more: Tensor, shift: float = 0.25, **others: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x, *more, **others))) + shift
        return out


class WrappedReads(Mlp):
    @wrapped(lambda self, out: out + self.fc2.weight.sum())
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x))) * scale
        return out


class Added(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


class Rolled(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, -1)


def with_own_forward() -> Mlp:
    model = Mlp()
    model.fc1 = Added(6, 10)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Scaled(), "the forward of a Scaled computes with the number of units"),
        (Reads(), r"the forward of a Reads reads 'fc2\.weight' itself"),
        (WrappedReads(), r"the forward of a WrappedReads reads 'fc2\.weight' itself"),
        (with_own_forward(), "an? Added has a forward of its own"),
        (Mlp(Rolled()), "'roll', which is not known to treat each unit alone"),
        (Residual(), "'getitem', which is not known to treat each unit alone"),
        (Normed(), r"goes into a LayerNorm \(norm\), which is not among related_modules"),
        (Branching(), "the forward of a Branching cannot be traced"),
        (Twice(), r"goes into a Linear \(other\), which is not among related_modules"),
        (Tied(), "a weight of a Linear is tied to one of another module"),
        (hooked(), "a Linear has hooks"),
    ],
)
def test_what_cannot_be_followed_stays_and_the_log_says_why(
    model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, x = units(["fc1"], [["fc2"]]), torch.randn(3, 6)
    with caplog.at_level(logging.WARNING, "zoo.compression"):
        clean, _ = cleaned(model, config, x)
    assert tuple(clean.fc1.weight.shape) == (10, 6)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{ROWS}.different_groups.g: the units of 'fc1' stay, as zeros")
    assert re.search(reason, record.getMessage()), record.getMessage()


def test_a_forward_in_a_wrapper_is_followed() -> None:
    x = torch.randn(3, 6)
    clean, _ = cleaned(Wrapped(), units(["fc1"], [["fc2"]]), x)
    assert tuple(clean.fc1.weight.shape) == (5, 6)


STEPS: dict[str, Any] = {
    "relu": torch.relu, "cos": torch.cos, "gelu": F.gelu, "softplus": F.softplus, "twice": lambda h: 2 * h + 1,
    "half": lambda h: (1 - h) / 2, "square": lambda h: h * h, "product": lambda h: torch.sigmoid(h) * torch.tanh(h),
    "sum": lambda h: h + torch.exp(-h.abs()), "clamp": lambda h: h.clamp(-0.5, 0.5), "power": lambda h: h**2,
    "dropout": lambda h: F.dropout(h, 0.5, False),
}  # fmt: skip


class Chain(Mlp):
    def __init__(self, names: list[str], gated: bool, conv: bool, padding: int) -> None:
        super().__init__()
        self.names, self.gated = names, gated
        self.mix = nn.Linear(6, 10)
        if conv:
            self.fc1, self.fc2, self.mix = (
                nn.Conv1d(6, 10, 3),
                nn.Conv1d(10, 4, 3, padding=padding),
                nn.Conv1d(6, 10, 3),
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        for name in self.names:
            h = STEPS[name](h)
        out: Tensor = self.fc2(h * self.mix(x) if self.gated else h)
        return out


@examples(times=5)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), max_size=4), gated=st.booleans(), conv=st.booleans(),
    padding=st.integers(0, 1),
)  # fmt: skip
def test_whatever_is_between_outputs_stay_and_what_can_go_goes(
    names: list[str], gated: bool, conv: bool, padding: int
) -> None:
    related = ["mix", "fc2"] if gated else ["fc2"]
    x = torch.randn(2, 6, 7) if conv else torch.randn(2, 6)
    clean, _ = cleaned(Chain(names, gated, conv, padding), units(["fc1"], [related], ratio=0.3), x)
    constant = torch.zeros(1, dtype=torch.float64)
    for name in names:
        constant = STEPS[name](constant)
    stays = (gated or (conv and padding)) and bool(constant != 0)
    assert clean.fc1.weight.shape[0] == clean.fc2.weight.shape[1] == (10 if stays else 3)


def test_both_takers_of_a_layer_lose_columns() -> None:
    clean, _ = cleaned(Twice(), units(["fc1"], [["fc2", "other"]], ratio=0.2), torch.randn(3, 6))
    assert clean.fc2.in_features == clean.other.in_features == 2


def test_layers_of_a_model_are_related_in_their_order() -> None:
    model = nn.ModuleList(Mlp(nn.GELU()) for _ in range(3))
    stack = nn.Sequential(*[nn.Sequential(layer, nn.Linear(4, 6)) for layer in model])
    config = units(["fc1"], [["fc2"]], ratio=0.3)
    clean, _ = cleaned(stack, config, torch.randn(2, 6))
    assert [m.out_features for n, m in clean.named_modules() if n.endswith("fc1")] == [3, 3, 3]


def test_torchs_own_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    clean, _ = cleaned(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                       units(["linear1"], [["linear2"]], ratio=0.25), torch.randn(2, 3, 8))  # fmt: skip
    assert [m.linear1.out_features for m in clean.layers] == [4, 4]


def test_with_weights_of_few_bits_on_the_same_layers() -> None:
    config = units(["fc1"], [["fc2"]], ratio=0.3)
    config["compression_training"]["weight_quantization"] = {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": 1},
        "different_groups": {"w": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["fc"]}},
    }
    config["compression_training"]["activation_quantization"] = {
        "shared_parameters": {"enabled": True, "range_calibration": "dynamic"},
        "different_groups": {"a": {"params": {"bits": 8}, "modules": ["fc"]}},
    }
    model, x = init_compression(Mlp(), config).eval(), torch.randn(3, 6)
    masked = model(x)
    clean = redundancy_clean(model, config)
    torch.testing.assert_close(clean(x), masked, rtol=1e-5, atol=1e-6)
    assert clean.fc1.out_features == 3


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 10), nn.Linear(7, 4), nn.Linear(10, 3)
        self.conv, self.bn = nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(5)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (units(["fc1"], [["fc2"]]),
         rf"{ROWS}.different_groups.g.related_modules: 'fc2' \(Linear\) has 7 inputs and 4 outputs, and 'fc1'"
         r" \(Linear\) 10 outputs"),
        (units(["fc1"], [["bn"]]), r"'bn' \(BatchNorm2d\) has 5 features, and 'fc1'"),
        (units(["fc1"], [["fd"]]), rf"{ROWS}.different_groups.g.related_modules\[0\]: the pattern 'fd' matches no"),
        (units(["fc1", "fc3"], [["fc3"], []]) , None),
        (units(["fc[12]"], [["fc3"]]), r"the pattern 'fc3' means 1 modules \(fc3\), and 'fc\[12\]' of modules means 2"),
        (units(["conv"], None, technique="channel_pruning"),
         rf"{CHANNELS}.different_groups.g.modules: 'conv' \(Conv2d\) has groups = 2"),
        (units(["bn"], None), r"the pattern 'bn' matches only what cannot be compressed so \(BatchNorm2d\)"),
    ],
)  # fmt: skip
def test_errors_name_section_group_and_module(config: dict[str, Any], sentence: str | None) -> None:
    model = Shapes()
    if sentence is None:
        assert len(transforms_of(init_compression(model, config))) == 4
        return
    with pytest.raises(ValueError, match=sentence):
        init_compression(model, config)
    assert not transforms_of(model)


def test_rows_and_channels_of_one_layer_contradict_each_other() -> None:
    config = units(["conv1"], None)
    config["compression_training"] |= units(["conv1"], None, technique="channel_pruning")["compression_training"]
    with pytest.raises(ValueError, match=rf"conv1.weight is changed twice in one way: {CHANNELS}.* and {ROWS}"):
        init_compression(ConvNet(), config)
    config = units(["conv1"], None)
    group = {"modules": ["conv1"], "params": {"dense_ratio": 0.5}}
    config["compression_training"]["sparse_pruning"] = {
        "shared_parameters": {"enabled": True}, "different_groups": {"s": group},
    }  # fmt: skip
    assert len(transforms_of(init_compression(ConvNet(norm=False), config))) == 3, (
        "single weights of rows are another thing"
    )
