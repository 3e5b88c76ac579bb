"""Every optimizer, in one line each: what all of them must do is in test_battery.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from zoo import optim


@dataclass(frozen=True)
class Entry:
    cls: Any
    options: dict[str, Any] = field(default_factory=dict)
    torch: Any = None  # the class of torch that it must agree with, given the same options
    elementwise: bool = True  # runs on flat shards
    meets: bool = False  # compresses between ranks, in steps that all parameters have in common; states are fp32
    smooth: bool = True  # a small change of a gradient makes a small change of the step


BATTERY = {
    "Adam": Entry(optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, torch.optim.Adam),
    "Adam-amsgrad": Entry(optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.9)}, torch.optim.Adam),
    "Adam-uncorrected": Entry(optim.Adam, {"lr": 0.01, "bias_correction": False, "eps": 1e-2}),
    "AdamW": Entry(optim.AdamW, {"lr": 0.01, "eps": 1e-2}, torch.optim.AdamW),
    "AdamW-maximize": Entry(optim.AdamW, {"lr": 0.01, "maximize": True, "weight_decay": 0.2}, torch.optim.AdamW),
    "SGD": Entry(optim.SGD, {"lr": 0.1}, torch.optim.SGD),
    "SGD-momentum": Entry(
        optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, torch.optim.SGD
    ),
    "SGD-nesterov": Entry(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "Adagrad": Entry(
        optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1},
        torch.optim.Adagrad,
    ),
    "Lion": Entry(optim.Lion, {"lr": 0.01, "weight_decay": 0.1}, smooth=False),
    "Lamb": Entry(optim.Lamb, {"lr": 0.01, "weight_decay": 0.1}, elementwise=False),
    "Lamb-plain": Entry(
        optim.Lamb, {"lr": 0.01, "bias_correction": False, "eps_inside_sqrt": True, "max_coeff": None},
        elementwise=False,
    ),
    "OnebitAdam": Entry(optim.OnebitAdam, {"lr": 0.01, "freeze_step": 2, "weight_decay": 0.1}, meets=True),
    "OnebitAdam-inside": Entry(optim.OnebitAdam, {"lr": 0.01, "freeze_step": 1, "eps_inside_sqrt": True}, meets=True),
    "OnebitLamb": Entry(
        optim.OnebitLamb, {"lr": 0.01, "freeze_step": 2, "coeff_beta": 0.5}, elementwise=False, meets=True
    ),
    "ZeroOneAdam": Entry(optim.ZeroOneAdam, {"lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 2}, meets=True),
    "LocalSGD": Entry(optim.LocalSGD, {"lr": 0.1, "sync_every": 2, "momentum": 0.5}, meets=True),
    "DiLoCo": Entry(optim.DiLoCo, {"lr": 0.01, "sync_every": 2}, meets=True),
    "Muon": Entry(optim.Muon, {"lr": 0.01}, torch.optim.Muon, elementwise=False, smooth=False),
}  # fmt: skip
