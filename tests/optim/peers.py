"""What DeepSpeed's optimizers really do: their documented arguments with defaults, and the parameters of a few steps.

``python tests/optim/peers.py`` in an environment that has deepspeed (and a compiler: it builds its CPU optimizers)
writes peers.json, which quick tests read.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
STEPS = 4
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.5}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False}),
    ("Adam", {"lr": 0.1, "betas": [0.5, 0.7], "eps": 0.1, "bias_correction": False}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.5, "bias_correction": False}),
    ("Lion", {}),
    ("Lion", {"lr": 0.1, "weight_decay": 0.5, "betas": [0.3, 0.4]}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.5, "eps": 0.1}),
]


def start() -> list[float]:
    """Where the parameters begin."""
    return [(7 * i % 11 - 5) / 4 for i in range(11)]


def gradient(step: int) -> list[float]:
    """Of each parameter in step ``step``, from 0; never 0, whose sign is 0 in Lion's paper and not in DeepSpeed."""
    return [((5 * i + 3 * step) % 13 - 6.5) / 8 for i in range(11)]


def trajectory(optimizer: Any, parameter: Any) -> list[list[float]]:
    """The parameters after each step."""
    found = []
    for step in range(STEPS):
        parameter.grad = parameter.detach().new_tensor(gradient(step))
        optimizer.step()
        found.append(parameter.tolist())
    return found


def _signature(cls: Any) -> dict[str, Any]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


def main() -> None:
    logging.disable(logging.CRITICAL)
    import deepspeed
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def built(name: str, params: dict[str, Any], parameter: Any) -> Any:
        # As its engine does: the mode is an option of the name "Adam" only.
        mode = params.pop("adam_w_mode", True)
        if name in ("Adam", "AdamW"):
            return DeepSpeedCPUAdam([parameter], **params, adamw_mode=mode or name == "AdamW")
        return (DeepSpeedCPULion if name == "Lion" else DeepSpeedCPUAdagrad)([parameter], **params)

    cases = []
    for name, params in CASES:
        parameter = torch.nn.Parameter(torch.tensor(start()))
        after = trajectory(built(name, dict(params), parameter), parameter)
        cases.append({"name": name, "params": params, "after": after})
    named = {
        "Adam": [FusedAdam, DeepSpeedCPUAdam], "AdamW": [FusedAdam, DeepSpeedCPUAdam], "Lamb": [FusedLamb],
        "Lion": [FusedLion, DeepSpeedCPULion], "Adagrad": [DeepSpeedCPUAdagrad],
    }  # fmt: skip
    signatures = {name: {cls.__name__: _signature(cls) for cls in classes} for name, classes in named.items()}
    text = json.dumps({"deepspeed": deepspeed.__version__, "signatures": signatures, "cases": cases})
    FILE.write_text(text.replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
