"""``deepspeed.elasticity``: the batch that many numbers of ranks fit, and the section of a document that asks for it.
The arithmetic is :mod:`zoo.launch.elastic`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from zoo.deepspeed.adapters.configuration.plain_values import as_meant
from zoo.deepspeed.adapters.utilities.logs import logger
from zoo.launch.elastic import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    Policy,
    table,
    table_of_nodes,
)

__all__ = [
    "ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize",
    "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config", "with_elastic_batch",
]  # fmt: skip

_SCHEDULERS = "DEEPSPEED_ELASTICITY_CONFIG"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OLDEST = (0, 3, 8)


class ElasticityConfig:
    """The section ``elasticity``, with its defaults.

    Raises:
        ElasticityConfigError: it is enabled without ``max_train_batch_size`` or ``micro_batch_sizes``, or a value
            cannot be.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        self.enabled = bool(param_dict.get("enabled", False))
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if self.enabled and key not in param_dict:
                raise ElasticityConfigError(f"elasticity is enabled without {key}; give it.")
        self.max_acceptable_batch_size = param_dict.get("max_train_batch_size", 2000)
        self.micro_batches = param_dict.get("micro_batch_sizes", [2, 4, 6])
        if not isinstance(self.micro_batches, list):
            raise ElasticityConfigError(f"elasticity.micro_batch_sizes is {self.micro_batches!r}; give a list.")
        self.min_gpus = param_dict.get("min_gpus", 1)
        self.max_gpus = param_dict.get("max_gpus", 10000)
        self.model_parallel_size = param_dict.get("model_parallel_size", 1)
        self.num_gpus_per_node = param_dict.get("num_gpus_per_node", 1)
        for key in ("min_gpus", "max_gpus", "model_parallel_size", "num_gpus_per_node"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 1:
                raise ElasticityConfigError(
                    f"elasticity.{key} is {getattr(self, key)!r}; give a whole number from 1 on."
                )
        self.min_time = param_dict.get("min_time", 0)
        self.version = param_dict.get("version", 0.2)
        self.prefer_larger_batch_size = param_dict.get("prefer_larger_batch", True)
        self.ignore_non_elastic_batch_info = param_dict.get("ignore_non_elastic_batch_info", False)
        self.policy()

    def policy(self) -> Policy:
        """What :func:`zoo.launch.elastic.table` takes."""
        return Policy(
            micro_batches=self.micro_batches, max_batch=self.max_acceptable_batch_size, min_ranks=self.min_gpus,
            max_ranks=self.max_gpus, prefers_larger=self.prefer_larger_batch_size,
        )  # fmt: skip

    def repr(self) -> dict[str, Any]:
        """Its values."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the section ``elasticity`` of a document is enabled."""
    return bool(_section(ds_config).get("enabled", False))


def _section(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = as_meant({"elasticity": document.get("elasticity") or {}})["elasticity"]
    return found


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The batch of an elastic job, and the numbers of data-parallel ranks that fit; with ``world_size`` or
    ``return_microbatch`` the micro-batch of that number of ranks too, which WORLD_SIZE gives where 0 is given.

    Raises:
        ElasticityError: the document has no such section or a version that is not 0.1 or 0.2, or
            ``target_deepspeed_version`` is older than 0.3.8.
        ElasticityConfigError: values that cannot be, or no number of ranks where one is needed.
        ElasticityIncompatibleWorldSize: the number of ranks does not fit.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"compute_elastic_config got a {type(ds_config).__name__}; give the document as a dict.")
    if "elasticity" not in ds_config or not elasticity_enabled(ds_config):
        raise ElasticityConfigError("the document has no section elasticity that is enabled; add one.")
    config = ElasticityConfig(_section(ds_config))
    _check_versions(config, target_deepspeed_version)
    ranks = world_size or _ranks_of_launch()
    if str(config.version) == "0.2":
        if not ranks:
            raise ElasticityConfigError(
                "elasticity v0.2 needs the number of ranks; give world_size, or set WORLD_SIZE."
            )
        found = table_of_nodes(config.policy(), ranks, config.num_gpus_per_node, config.model_parallel_size)
    else:
        if return_microbatch and not ranks:
            raise ElasticityConfigError("a micro-batch needs the number of ranks; give world_size, or set WORLD_SIZE.")
        found = table(config.policy(), (ranks or None) if world_size or return_microbatch else None)
    sizes = list(found.world_sizes)
    if found.micro_batch is not None and (world_size or return_microbatch):
        return found.batch, sizes, found.micro_batch
    return found.batch, sizes


def _check_versions(config: ElasticityConfig, target: str) -> None:
    if str(config.version) not in ("0.1", "0.2"):
        raise ElasticityError(f"elasticity.version is {config.version!r}; give 0.1 or 0.2.")
    numbers = tuple(int(part) for part in target.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers + (0,) * (3 - len(numbers)) < _OLDEST:
        raise ElasticityError(f"version {target} of DeepSpeed has no elasticity; 0.3.8 is the first that has.")
    if str(config.version) == "0.1" and config.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"elasticity v0.1 knows no model parallelism (model_parallel_size={config.model_parallel_size}); "
            'give "version": 0.2.'
        )


def _ranks_of_launch() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 0


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare with the section that a scheduler has planned by, the JSON of DEEPSPEED_ELASTICITY_CONFIG.

    Raises:
        ElasticityConfigError: the largest batch, the micro-batches or the version differ.
    """
    if _SCHEDULERS not in os.environ:
        logger.warning("%s is not set: nothing says by which elastic configuration ranks were given.", _SCHEDULERS)
        return
    planned = ElasticityConfig(json.loads(os.environ[_SCHEDULERS]))
    here = ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        if getattr(planned, name) != getattr(here, name):
            raise ElasticityConfigError(
                f"the scheduler has planned with {name} = {getattr(planned, name)!r} ({_SCHEDULERS}), and the document "
                f"has {getattr(here, name)!r}; they have to be the same."
            )


def with_elastic_batch(document: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The document with the batch sizes that its section ``elasticity`` gives for these ranks, and without it.

    Raises:
        ElasticityError: as :func:`compute_elastic_config`; or the document has batch sizes of its own and does not say
            that they are to be ignored.
    """
    section = document.get("elasticity")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return document
    given = [key for key in _BATCH_KEYS if document.get(key) not in (None, "auto")]
    if given and not section.get("ignore_non_elastic_batch_info", False):
        raise ElasticityConfigError(
            f"the batch is elasticity's, and the document has {', '.join(given)} too; leave them out, or set "
            "elasticity.ignore_non_elastic_batch_info."
        )
    if _SCHEDULERS in os.environ:
        ensure_immutable_elastic_config(section)
    found = compute_elastic_config(document, "0.19.8", ranks, True)
    batch, micro = found[0], found[-1]
    if not isinstance(micro, int):
        raise AssertionError(f"a number of ranks, {ranks}, has no micro-batch.")
    groups = ranks // int(section.get("model_parallel_size", 1))
    rest = {key: value for key, value in document.items() if key not in (*_BATCH_KEYS, "elasticity")}
    sizes = (batch, micro, batch // (micro * groups))
    return {**rest, **dict(zip(_BATCH_KEYS, sizes, strict=True))}
