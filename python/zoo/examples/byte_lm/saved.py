"""A finished byte model in a folder: its size beside its weights, and the way back."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from zoo.examples.byte_lm.model import ByteGPT, MlpChoice, ModelConfig

_KIND = "byte_lm"


def write_config(folder: str | Path, config: ModelConfig) -> None:
    """``config.json``: what :func:`load` needs beside ``model.safetensors``."""
    values = {key: value for key, value in vars(config).items() if key != "mlp"}
    if config.mlp is not None:
        values["mlp"] = {"type": config.mlp.type, "params": config.mlp.params}
    text = json.dumps({"model_type": _KIND, **values}, indent=2)
    (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: str | Path) -> ByteGPT:
    """The model that a finished run left in ``folder``, with the weights' dtype, in evaluation mode.

    Raises:
        ValueError: ``config.json`` or ``model.safetensors`` is missing, or they are not a byte model's.
    """
    weights, described = Path(folder) / "model.safetensors", Path(folder) / "config.json"
    for path in (weights, described):
        if not path.is_file():
            raise ValueError(f"{str(path)!r} does not exist; give the folder of a finished run's model.")
    names = {field.name for field in fields(ModelConfig)} - {"mlp"}
    try:
        values = json.loads(described.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(described)!r} is not JSON ({error}).") from None
    mlp = values.pop("mlp", None) if isinstance(values, dict) else None
    if (
        not isinstance(values, dict)
        or values.pop("model_type", None) != _KIND
        or set(values) != names
        or not all(type(value) is int for value in values.values())
    ):
        raise ValueError(
            f"{str(described)!r} does not describe a byte model: it has model_type {_KIND!r} and, as integers, "
            f"{', '.join(sorted(names))}."
        )
    try:
        model = ByteGPT(ModelConfig(**values, mlp=None if mlp is None else MlpChoice(**mlp)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(described)!r} has mlp={mlp!r}, which cannot be built: {error}") from None
    try:
        dtypes = {tensor.dtype for tensor in safetensors.torch.load_file(weights).values()}
        if len(dtypes) == 1:
            model.to(dtypes.pop())
        safetensors.torch.load_model(model, weights)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{str(weights)!r} does not hold the weights of this byte model ({error}).") from None
    return model.eval()
