"""``deepspeed.init_inference`` and ``default_inference_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters import asserting
from zoo.deepspeed.adapters.configuration.sections import DeepSpeedZeroConfig
from zoo.deepspeed.adapters.configuration.translation import read_document
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig, by_field
from zoo.deepspeed.adapters.inference.engine import InferenceEngine
from zoo.registry.errors import near


def default_inference_config() -> dict[str, Any]:
    """The fields of :class:`DeepSpeedInferenceConfig` and their defaults, as a dict that ``init_inference`` takes."""
    return DeepSpeedInferenceConfig().model_dump()


@asserting
def init_inference(
    model: nn.Module, config: str | dict[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:  # fmt: skip
    """An engine that generates with a model, which is changed in place.

    Args:
        model: of transformers, or any other module; with weights, or on the meta device with ``checkpoint``.
        config: fields of :class:`DeepSpeedInferenceConfig`, or the path of a file with them.
        kwargs: more fields. One that is in ``config`` too has the same value there.

    Returns:
        The engine; ``engine.module`` is the model.

    Raises:
        ValueError: (zoo.config.ConfigError among them) what cannot work, and how to say it; an AssertionError too.
        NotImplementedError: what zoo does not have.
    """
    return InferenceEngine(model, settings_of(config, kwargs))


def settings_of(config: Any, kwargs: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
    """``config`` and ``kwargs`` as one.

    Raises:
        ConfigError: ``config`` is neither dict nor path, a key has two values, or is none, or a value is wrong.
    """
    if config is not None and not isinstance(config, (str, dict)):
        raise ConfigError(f"'config' argument expected string or dictionary, got {type(config)}")
    given = read_document(config) if isinstance(config, str) else dict(config or {})
    try:
        given, more = by_field(DeepSpeedInferenceConfig, given), by_field(DeepSpeedInferenceConfig, kwargs)
        for key in given.keys() & more.keys():
            if given[key] != more[key]:
                raise ValueError(f"Conflicting argument '{key}' in 'config':{given[key]} and kwargs:{more[key]}")
        return DeepSpeedInferenceConfig(**{**given, **more})
    except ValueError as error:
        told = _sentences(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(told, "init_inference") from None


def _sentences(error: ValidationError) -> list[str]:
    found = []
    for problem in error.errors():
        path = ".".join(map(str, problem["loc"]))
        told = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":  # of the section zero
            like = near(str(problem["loc"][-1]), DeepSpeedZeroConfig.model_fields)
            told = "it is no key of that section" + (f"; near it: {', '.join(like)}." if like else ".")
        found.append(f"{path}: {told}" if path else told)
    return found
