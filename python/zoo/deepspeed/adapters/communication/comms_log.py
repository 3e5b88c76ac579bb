"""``CommsLogger``: what went through ``deepspeed.comm``, by operation and size of the message."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from zoo.deepspeed.adapters.configuration.sections import DeepSpeedConfigModel
from zoo.deepspeed.adapters.utilities.logs import log_dist

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
# By how the message, and what a rank has to send of it, follow from the bytes given.
_TIMES_RANKS = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_REDUCES = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")


def bytes_of(value: Any) -> int:
    """Of a tensor, or of all in a sequence; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def convert_size(size_bytes: int) -> str:
    """``1536`` → ``"1.5 KB"``, with units of 1024."""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return "0B" if not size_bytes else f"{round(value, 2)} {_UNITS[unit]}"


def calc_bw_log(comm_op: str, size: int, duration: float, ranks: int | None = None) -> tuple[float, float]:
    """(throughput, bus bandwidth) in Gbit/s of ``size`` bytes given in ``duration`` milliseconds, as DeepSpeed counts.

    The message is ``size``; N times that for all-gather and reduce-scatter, also where what was given is whole; twice
    it for all-reduce. The bus bandwidth counts what a rank has to send with the best algorithm: (N-1)/N of the message
    for these and all-to-all, the message for anything else.
    """
    n = ranks or (dist.get_world_size() if dist.is_initialized() else 1)
    message = size * (n if comm_op in _TIMES_RANKS else 2 if comm_op in _REDUCES else 1)
    wire = (n - 1) / n if comm_op in (*_TIMES_RANKS, *_REDUCES, *_EXCHANGES) else 1.0
    speed = message * 8 / max(duration, 1e-9) / 1e6
    return speed, speed * wire


def get_caller_func(frame: int = 3) -> str:
    """Name of the function ``frame`` calls up from here."""
    return sys._getframe(frame).f_code.co_name


class CommsLogger:
    """What went through ``deepspeed.comm`` while it was ``enabled``, which makes each operation wait for its end.

    What engines send themselves is not here: ``engine.engine.comm.log`` has it, whether this is on or not.

    Attributes:
        comms_dict: name → bytes that a rank gave → [count, milliseconds, Gbit/s, bus Gbit/s], the last three lists.
        enabled, prof_all, prof_ops: whether anything is counted; everything, or the names (``log_name``) of the list.
        verbose: log each operation. debug: names have the function that called behind them.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled, self.verbose, self.debug = False, False, False
        self.prof_all, self.prof_ops = True, list[str]()

    def set(self, **given: Any) -> None:
        """Attributes by name; None leaves one as it is.

        Raises:
            ValueError: there is none of that name.
        """
        known = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
        wrong = sorted(set(given) - set(known))
        if wrong:
            raise ValueError(f"the section comms_logger has {', '.join(wrong)}; it knows {', '.join(known)}.")
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)

    def configure(self, comms_config: Any) -> None:
        """From an object with ``comms_logger_enabled`` and, where that is true, the section ``comms_logger``, whose own
        ``enabled`` counts if it has one."""
        section = comms_config.comms_logger if comms_config.comms_logger_enabled else None
        self.set(enabled=section is not None and bool(getattr(section, "enabled", True)))
        if section is not None:
            self.set(**{name: getattr(section, name) for name in ("verbose", "debug", "prof_ops", "prof_all")})

    def start_profiling_comms(self) -> None:
        """Count everything."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Count what :meth:`start_profiling_op` named, and calls with ``prof=True``."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Count these operations too."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Do not count these."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def wants(self, name: str, prof: bool) -> bool:
        """Whether a call with this ``log_name`` is counted."""
        return self.enabled and (self.prof_all or prof or name in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Count one: operation, the name it gets here, milliseconds, bytes that a rank gave."""
        self.count(raw_name, record_name, latency, msg_size, None)

    def count(self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int | None) -> None:
        """:meth:`append` in a group of so many ranks."""
        speed, bus = calc_bw_log(raw_name, msg_size, latency, ranks)
        row = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        row[0] += 1
        for column, value in zip(row[1:], (latency, speed, bus), strict=True):
            column.append(value)
        if self.verbose:
            log_dist(
                f"{record_name}: {convert_size(msg_size)} in {latency:.2f} ms, {speed:.2f} Gbit/s, bus {bus:.2f} "
                "Gbit/s", [0],
            )  # fmt: skip

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """A copy of :attr:`comms_dict`."""
        return copy.deepcopy(self.comms_dict)

    def has_data(self) -> bool:
        """Whether anything was counted."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget what was counted."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """In the order in which they first came."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Operations counted."""
        return sum(row[0] for rows in self.comms_dict.values() for row in rows.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Bytes → count, milliseconds and speeds (means without the outer tenths); None for one that never came."""
        from zoo.deepspeed.adapters.utilities.timers import trim_mean

        rows = self.comms_dict.get(operation_name)
        if rows is None:
            return None
        return {
            size: {
                "count": row[0], "total_latency_ms": sum(row[1]), "avg_latency_ms": trim_mean(row[1], 0.1),
                "tput_avg_gbps": trim_mean(row[2], 0.1), "busbw_avg_gbps": trim_mean(row[3], 0.1),
                "msg_size_bytes": size, "msg_size_str": convert_size(size),
            }
            for size, row in sorted(rows.items())
        }  # fmt: skip

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print, or return, all summaries.

        Args:
            print_log: on this rank.
            show_straggler: what this rank waited for slower ones: its time less the shortest of any rank, for each
                operation that all ranks have counted alike. A collective.
            return_dict: return {"summary", "straggler_analysis", "metadata"}; otherwise None.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        waits = self._stragglers() if show_straggler else None
        if print_log:
            print(_table(summary, waits), flush=True)  # noqa: T201
        if not return_dict:
            return None
        joined = dist.is_initialized()
        metadata = {
            "world_size": dist.get_world_size() if joined else 1, "rank": dist.get_rank() if joined else 0,
            "timestamp": datetime.now(timezone.utc).isoformat(),
        }  # fmt: skip
        return {"summary": summary, "straggler_analysis": waits, "metadata": metadata}

    def _stragglers(self) -> dict[str, dict[int, dict[str, Any]]]:
        from zoo.deepspeed.adapters.utilities.timers import trim_mean

        mine = {(name, size): list(row[1]) for name, rows in self.comms_dict.items() for size, row in rows.items()}
        everyone: list[Any] = [mine]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for (name, size), times in mine.items():
            lists = [other.get((name, size), []) for other in everyone]
            if any(len(other) != len(times) for other in lists):
                continue
            shortest = [min(together) for together in zip(*lists, strict=True)]
            waited = [own - least for own, least in zip(times, shortest, strict=True)]
            found.setdefault(name, {})[size] = {
                "count": len(times), "total_comm_lat_ms": sum(shortest), "total_straggler_ms": sum(waited),
                "avg_comm_lat_ms": trim_mean(shortest, 0.1), "avg_straggler_ms": trim_mean(waited, 0.1),
                "msg_size_bytes": size, "msg_size_str": convert_size(size),
            }  # fmt: skip
        return found


def _table(summary: Mapping[str, Any], waits: Mapping[str, Any] | None) -> str:
    more = f"{'waited (ms)':>14}" if waits is not None else ""
    lines = [
        f"{'operation':<26}{'message':>12}{'count':>8}{'total (ms)':>12}{'mean (ms)':>12}{'Gbit/s':>10}"
        f"{'bus Gbit/s':>12}{more}"
    ]
    for name, rows in summary.items():
        for size, row in rows.items():
            waited = ""
            if waits is not None:
                known = waits.get(name, {}).get(size)
                waited = f"{known['total_straggler_ms']:>14.2f}" if known else f"{'-':>14}"
            lines.append(
                f"{name:<26}{row['msg_size_str']:>12}{row['count']:>8}{row['total_latency_ms']:>12.2f}"
                f"{row['avg_latency_ms']:>12.2f}{row['tput_avg_gbps']:>10.2f}{row['busbw_avg_gbps']:>12.2f}{waited}"
            )
    return "\n".join(lines)


comms_logger = CommsLogger()
"""The log of this process."""


def run_logged(
    name: str, tensor: Any, group: Any, call: Callable[[], Any], prof: bool, log_name: str, *, waits: bool = True
) -> Any:
    """The call; timed and counted where the log is on, which then waits for it if ``waits``.

    To be called by the function that the program called: with ``debug`` the record names who called that.
    """
    if not comms_logger.wants(log_name, prof):
        return call()
    if comms_logger.debug:
        log_name = f"{log_name} | [Caller Func: {get_caller_func()}]"
    device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    handle = call()
    if waits and hasattr(handle, "wait"):
        handle.wait()
    if waits and device.type == "cuda":
        torch.cuda.synchronize(device)
    latency_ms = (time.perf_counter() - begin) * 1e3
    ranks = dist.get_world_size(group)
    if ranks > 0:  # outside of the group torch has done nothing
        comms_logger.count(name, log_name, latency_ms, bytes_of(tensor), ranks)
    return handle


class CommsLoggerConfig(DeepSpeedConfigModel):
    """The section ``comms_logger``."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class DeepSpeedCommsConfig:
    """Of a document.

    Attributes:
        comms_logger_enabled: whether the section is there. comms_logger: it; not there without it.
    """

    comms_logger: CommsLoggerConfig

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])
