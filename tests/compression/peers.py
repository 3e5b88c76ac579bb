"""What DeepSpeed's compression really does: weights, masks, shapes and outputs of small models.

0.18.9 is the last release that has it. ``python tests/compression/peers.py`` in an environment of its own (torch, and
``DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.18.9``) writes peers.json, which quick tests read.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".json")
WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    """Attention whose forward cuts heads by their size, so that some of them may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        found: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return found


class Stack(nn.Module):
    """Some layers and a head, for layer reduction."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = torch.relu(layer(x))
        found: Tensor = self.head(self.norm(x))
        return found


def number(count: int, start: int) -> Tensor:
    """(count,) numbers within ±1 that are all there is to a tensor: none is zero, and few magnitudes are alike."""
    return torch.tensor([((37 * i + 53 * start + 11) % 257 - 127.3) / 129 for i in range(count)])


def filled(model: nn.Module, start: int = 0) -> nn.Module:
    """The model, with numbers that follow from the places of its parameters."""
    for place, parameter in enumerate(model.parameters()):
        parameter.data = number(parameter.numel(), start + place).view(parameter.shape)
    return model


def models() -> dict[str, nn.Module]:
    """By kind, always with the same numbers."""
    made = {
        "linear": nn.Sequential(nn.Linear(12, 4, bias=False)),
        "embedding": nn.Sequential(nn.Embedding(6, WIDTH)),
        "mlp": nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 4)),
        "sigmoid": nn.Sequential(nn.Linear(WIDTH, 12), nn.Sigmoid(), nn.Linear(12, 4)),
        "conv": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        "attention": Attention(),
        "student": Stack(2),
    }
    return {name: filled(model).eval() for name, model in made.items()}


def given(kind: str) -> Tensor:
    """What such a model is called with."""
    shapes = {"linear": (5, 12), "conv": (2, 3, 5, 5), "attention": (2, 3, WIDTH)}
    if kind == "embedding":
        return torch.arange(6)
    shape = shapes.get(kind, (5, WIDTH))
    return number(torch.Size(shape).numel(), 91).view(shape)


def section(
    name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any
) -> dict[str, Any]:
    """``{name: ...}`` with one group."""
    group = {"params": params, "modules": modules, **({} if related is None else {"related_modules": related})}
    return {
        name: {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"g": group}}
    }


def weights(bits: int, groups: int = 1, kind: str = "symmetric", module: str = "0") -> dict[str, Any]:
    """Of so many bits from the beginning."""
    params = {"start_bits": bits, "target_bits": bits, "quantization_period": 1}
    return section(
        "weight_quantization", params, [module], quantize_weight_in_forward=True, quantize_groups=groups,
        quantization_type=kind, quantizer_kernel=False, quantize_verbose=False, rounding="nearest",
    )  # fmt: skip


def inputs(bits: int, kind: str, calibration: str = "dynamic") -> dict[str, Any]:
    """Of so many bits, of the first layer."""
    return section(
        "activation_quantization", {"bits": bits}, ["0"], quantization_type=kind, range_calibration=calibration
    )


def rows(ratio: float, related: bool) -> dict[str, Any]:
    return section("row_pruning", {"dense_ratio": ratio}, ["0"], [["2"]] if related else None, method="l1")


def sparse(ratio: float) -> dict[str, Any]:
    return section("sparse_pruning", {"dense_ratio": ratio}, ["0"], method="l1", schedule_offset_end=9)


SCORES = {"heads go": [0.3, 0.9, 0.1, 0.5], "channels go": [0.3, 0.9, 0.1, 0.5, 0.8, 0.2, 0.7, 0.4]}
"""Learned scores, which begin otherwise here and there."""
REDUCED = {
    "enabled": True,
    "module_name_prefix": "layer",
    "teacher_layer": [1, 3],
    "other_module_name": ["norm", "head"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{kind} {bits} bits, {groups} groups": ("linear", weights(bits, groups, kind))
        for kind in ("symmetric", "asymmetric") for bits in (8, 4, 3) for groups in (1, 8)
    },
    **{f"{bits} bits, {groups} groups": ("linear", weights(bits, groups)) for bits in (2, 1) for groups in (1, 8)},
    "rows of an embedding": ("embedding", weights(4, 1, "asymmetric")),
    **{
        f"{kind} inputs of {bits} bits": ("linear", inputs(bits, kind))
        for kind in ("symmetric", "asymmetric") for bits in (8, 4)
    },
    "inputs of a convolution": ("conv", inputs(4, "asymmetric")),
    **{f"elements, {ratio}": ("linear", sparse(ratio)) for ratio in (0.25, 0.5, 0.51)},
    "rows stay": ("mlp", rows(0.5, False)),
    "rows go": ("mlp", rows(0.5, True)),
    "rows go, 0.45": ("mlp", rows(0.45, True)),
    "rows of constants go": ("sigmoid", rows(0.5, True)),
    "channels go": (
        # Its l1 asks torch for a norm over three dims, which torch refuses.
        "conv", section("channel_pruning", {"dense_ratio": 0.5}, ["0"], [["1", "3"]], method="topk"),
    ),
    "heads go": (
        "attention",
        section(
            "head_pruning", {"dense_ratio": 0.5}, ["output"], [["query", "key", "value"]], method="topk",
            num_heads=HEADS,
        ),
    ),
    "elements and 1 bit": ("linear", {**sparse(0.5), **weights(1)}),
    "elements and asymmetric 4 bits": ("linear", {**sparse(0.5), **weights(4, 1, "asymmetric")}),
    "rows and asymmetric 4 bits": ("mlp", {**rows(0.5, True), **weights(4, 1, "asymmetric")}),
    "layers": ("student", {"layer_reduction": REDUCED}),
}  # fmt: skip
SCHEDULES = [(8, 3, 2), (6, 4, 3), (4, 4, 1), (5, 1, 1)]
"""Start bits, target bits, period."""
NUM_STEPS, CHANGE = 20, 0.125


def teacher() -> nn.Module:
    """Of the student."""
    return filled(Stack(4), 40).eval()


def document(compression: dict[str, Any]) -> dict[str, Any]:
    """A ds_config."""
    return {"train_batch_size": 1, "compression_training": compression}


def nested(value: Tensor) -> Any:
    """Lists of numbers of 6 decimals, for a file that is read by people too."""
    return [nested(v) for v in value] if value.dim() else round(float(value), 6) + 0.0


def found(kind: str, model: nn.Module) -> dict[str, Any]:
    """Shapes and values of its parameters, and what it gives."""
    values = {name: nested(p.detach()) for name, p in model.named_parameters() if "scores" not in name}
    return {"parameters": values, "outputs": nested(model(given(kind)).detach())}


def _case(name: str, kind: str, compression: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.compression.compress import init_compression, redundancy_clean
    from deepspeed.compression.config import get_compression_config
    from deepspeed.compression.scheduler import compression_scheduler

    config = document(compression)
    model = init_compression(models()[kind], copy.deepcopy(config), teacher_model=teacher()).eval()
    scheduler = compression_scheduler(model, get_compression_config(copy.deepcopy(config)))
    for parameter, value in model.named_parameters():
        if "scores" in parameter:
            value.data.copy_(torch.tensor(SCORES[name]).view(value.shape))
    if "sparse_pruning" in compression:
        # Its scheduler asks for an end of sparse pruning, which its configuration keeps for snip_momentum only.
        scheduler.check_sparse_pruning = lambda: setattr(model[0], "sparse_pruning_enabled", True)
    scheduler.step(step_zero_check=True)
    before = nested(model(given(kind)).detach())
    if compression.get("layer_reduction"):
        return {"training": before, **found(kind, model)}
    return {"training": before, **found(kind, redundancy_clean(model, copy.deepcopy(config)).eval())}


def _ranges() -> list[list[float]]:
    """The static range of an input after each of some steps of training."""
    from deepspeed.compression.basic_layer import QuantAct

    act, after = QuantAct(quant_mode="asymmetric").train(), []
    for step in range(4):
        act(number(7, step) * (step + 1), 8)
        after.append(nested(act.x_min_max))
    return after


def _schedule(start: int, target: int, period: int, *, mixed: bool) -> list[Any]:
    """Bits, or the share of what is quantised, of the forward after 1, 2, ... steps."""
    from deepspeed.runtime.quantize import Quantizer

    quantizer = Quantizer(q_mixed_fp16=mixed, q_change_ratio=CHANGE, q_type="symmetric", q_rounding="nearest")
    after: list[Any] = []
    state = start, target, period
    for _ in range(NUM_STEPS):
        parameter: Any = number(12, 0).view(2, 6)
        parameter.start_bits, parameter.target_bits, parameter.q_period = state
        quantizer.quantize([[parameter]], overflow=False, eigenvalue_enabled=False)
        state = parameter.start_bits, parameter.target_bits, parameter.q_period
        after.append(1 - quantizer.quantize_real_ratio if mixed else parameter.start_bits)
    return after


def everything() -> dict[str, Any]:
    """What the file has."""
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    return {
        "deepspeed": deepspeed.__version__,
        "cases": {name: _case(name, *case) for name, case in CASES.items()},
        "ranges": _ranges(),
        "schedules": [_schedule(*each, mixed=False) for each in SCHEDULES],
        "shares": _schedule(*SCHEDULES[0], mixed=True),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(everything()).replace('}, "', '},\n"') + "\n", encoding="utf-8")
