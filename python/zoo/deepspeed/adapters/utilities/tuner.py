"""``deepspeed.autotuning``: the tuner's names over :mod:`zoo.tuning`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.config.fates import fates_of
from zoo.config.reading import read_source
from zoo.config.section import documented_default
from zoo.deepspeed.adapters.utilities.logs import logger

GLOBAL = "global"
_OPTIONS = ("--deepspeed_config", "--deepspeed")


class DeepSpeedAutotuningConfig:
    """The section ``autotuning`` of a document as attributes, with the documented defaults."""

    def __init__(self, param_dict: Mapping[str, Any] | None) -> None:
        from zoo.tuning import AutotuningConfig

        given = dict((param_dict or {}).get("autotuning") or {})
        for name, field in AutotuningConfig.model_fields.items():
            setattr(self, name, given.get(name, documented_default(field)))
        for name, fate in fates_of(AutotuningConfig).items():
            setattr(self, name, given.get(name, fate.default))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Node:
    """A host and its slots."""

    def __init__(self, host: str, max_slots: int) -> None:
        self.host, self.max_slots = host, max_slots
        self.idle_slots = list(range(max_slots))


class ResourceManager:
    """What there is to run experiments on. Trials are run by :func:`zoo.tuning.tune`, on this machine.

    Args:
        arg_mappings: key of the document → argument of the script; only kept.
    """

    def __init__(
        self, args: Any, hosts: Iterable[str], num_gpus_per_node: int, results_dir: str | None, exps_dir: str | None,
        arg_mappings: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        self.args, self.results_dir, self.exps_dir = args, results_dir, exps_dir
        self.num_gpus_per_node = num_gpus_per_node
        self.nodes = [Node(host, num_gpus_per_node) for host in hosts]
        self.arg_mappings = {key.strip(): argument.strip() for key, argument in (arg_mappings or {}).items()}


class Autotuner:
    """A search for the document that the arguments of a script name.

    Args:
        args: of ``deepspeed.launcher.runner.parse_args``; ``user_args`` has ``--deepspeed_config FILE``.
        active_resources: host → numbers of its slots.

    Attributes:
        exp_num_nodes, exp_num_gpus: of a trial: as ``--num_nodes`` and ``--num_gpus`` say, else all hosts, and as many
            slots as each of them has.
        optimal_ds_config: the fastest configuration, after :meth:`tune`; None before.

    Raises:
        ValueError: no document is named, there are no slots, or more are asked for than there are.
    """

    def __init__(self, args: Any, active_resources: Mapping[str, Sequence[int]]) -> None:
        self.args = args
        self.user_config = _document_of(args.user_args)
        self.autotuning_config: Any = DeepSpeedAutotuningConfig(self.user_config)
        self.exps_dir: str = self.autotuning_config.exps_dir
        self.results_dir: str = self.autotuning_config.results_dir
        for folder in (self.exps_dir, self.results_dir):
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise ValueError(f"autotuning: {folder!r} cannot be made: {error.strerror}.") from None
        slots = min((len(numbers) for numbers in active_resources.values()), default=0)
        if not slots:
            raise ValueError(f"active_resources = {dict(active_resources)}; each host has at least one slot.")
        self.rm = ResourceManager(
            args, active_resources, slots, self.results_dir, self.exps_dir, self.autotuning_config.arg_mappings
        )
        self.exp_num_nodes = args.num_nodes if args.num_nodes > 0 else len(self.rm.nodes)
        self.exp_num_gpus = args.num_gpus if args.num_gpus > 0 else slots
        if self.exp_num_nodes > len(self.rm.nodes) or self.exp_num_gpus > slots:
            raise ValueError(
                f"--num_nodes {self.exp_num_nodes} --num_gpus {self.exp_num_gpus}, and there are {len(self.rm.nodes)} "
                f"hosts with {slots} slots."
            )
        self.records: dict[str, list[tuple[Any, float | None, int]]] = {}
        self.optimal_ds_config: dict[str, Any] | None = None
        self._table = ""

    def metric(self) -> str:
        """What is made best."""
        return str(self.autotuning_config.metric)

    def fast_enabled(self) -> bool:
        """Whether stage and micro-batch alone are searched."""
        return bool(self.autotuning_config.fast)

    def mp_size(self) -> int:
        """The documented key."""
        return int(self.autotuning_config.mp_size)

    def update_records(self, space_name: str, exp: Any, metric_val: float | None, num_exps: int) -> None:
        """An experiment of a space, its metric (None where it has none), and how many experiments it stands for."""
        self.records.setdefault(space_name, []).append((exp, metric_val, num_exps))

    def get_best_space_record(self, space_name: str) -> tuple[Any, float, int] | None:
        """(experiment, metric, experiments of the space) of the largest metric; None where none has one."""
        records = self.records.get(space_name, [])
        measured = [(exp, value) for exp, value, _ in records if value is not None]
        if not measured:
            return None
        return *max(measured, key=lambda pair: pair[1]), sum(count for _, _, count in records)

    def get_best_space_records(self) -> dict[str, tuple[Any, float, int]]:
        """Space → its best, and under "global" the best of all."""
        found = {name: best for name in self.records if (best := self.get_best_space_record(name)) is not None}
        if found:
            found[GLOBAL] = max(found.values(), key=lambda record: record[1])
        return found

    def tune(self) -> None:
        """Search with :func:`zoo.tuning.tune`; everything goes to ``results_dir``.

        Raises:
            ValueError: the document has no section ``train``: zoo measures jobs of ``zoo train``, where it can change
                batches, meshes and schedules, not a script that has settings of its own; or trials on several hosts.
        """
        from zoo.tuning import report
        from zoo.tuning import tune as search

        if "train" not in self.user_config:
            raise ValueError(
                "the tuner runs jobs of zoo train, and this document has no section train that says which; add one "
                "(docs/reference/configuration.md), or try documents of your script yourself."
            )
        if self.exp_num_nodes > 1:
            raise ValueError(f"trials run on one machine, and {self.exp_num_nodes} hosts are asked for; --num_nodes 1.")
        found = search(self.user_config, (f"autotuning.ranks={self.exp_num_gpus}",), say=logger.info)
        for trial in found.trials:
            seconds = trial.outcome.step_s
            value = None if seconds is None else found.job.batch / seconds if self.metric() != "latency" else -seconds
            exp = {"name": trial.candidate.label(), "candidate": trial.candidate.to_dict()}
            self.update_records(f"z{trial.candidate.stage}", exp, value, 1)
        self.optimal_ds_config = json.loads(Path(self.results_dir, "best.json").read_text(encoding="utf-8"))
        self._table = report.table(found)

    def print_tuning_results(self) -> None:
        """The trials by their speed."""
        print(self._table or "nothing was tuned yet: call tune()")  # noqa: T201


def _document_of(user_args: Sequence[str]) -> dict[str, Any]:
    """The document whose file follows an option, or stands in it after "=".

    Raises:
        ValueError: there is none.
    """
    for number, argument in enumerate(user_args):
        option, equals, value = argument.partition("=")
        if option in _OPTIONS:
            path = value if equals else next(iter(user_args[number + 1 :]), "")
            if path and not path.startswith("-"):
                return dict(read_source(path)[0])
    raise ValueError(f"{' '.join(user_args)!r} names no document; add --deepspeed_config FILE.")
