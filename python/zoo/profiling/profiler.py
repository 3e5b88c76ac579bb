"""The profiler: watches a model for a while, and says what was done."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from zoo.cost.operators import NOTHING, Work
from zoo.profiling import latest, report, strings
from zoo.profiling.calls import Calls, Pass, Sums
from zoo.profiling.counter import OperatorCounter
from zoo.profiling.detours import detour_of_operators
from zoo.profiling.profile import Operator, Profile, gather

__all__ = ["FlopsProfiler"]

_COMPILE = {"torch._dynamo", "torch.nn.attention.flex_attention"}
"""Whoever has imported one of them may compile; the latter does by itself. To ask the compiler imports all of it."""
_NEVER = "no profile yet: call start_profile(), run the model, then stop_profile()."


class FlopsProfiler:
    """FLOPs, seconds and parameters of each module of a model, from :meth:`start_profile` to :meth:`stop_profile`.

    Counted is every operator that runs, whatever called it: F = 2 · multiply-accumulates of products
    (:mod:`zoo.cost.operators`); elementwise operations apart. While it is on, compiled parts of the model run as they
    are written, so that there are operators to see. The forward's are what ``get_total_*`` say; a backward that runs
    while it is on is counted too (:attr:`profile`).

    Args:
        model: a module.
        ds_engine: the engine that trains it, for the job's sizes in what is printed.
        recompute_fwd_factor: forwards that are computed again in backward (1.0 with activation checkpointing of
            everything), for utilisation where no backward is measured.
        peak_flops_per_s: of the device, of dense products in the dtype that is used: utilisation is printed.

    Attributes:
        flops, macs, params: the totals of the latest profile, 0 before.

    Raises:
        ValueError: no module, a factor below 0, or a peak that is not positive.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0, *,
        peak_flops_per_s: float | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise ValueError(f"FlopsProfiler got a {type(model).__name__}; it takes a torch.nn.Module.")
        if not recompute_fwd_factor >= 0:
            raise ValueError(f"recompute_fwd_factor={recompute_fwd_factor}; it is at least 0.")
        if peak_flops_per_s is not None and not peak_flops_per_s > 0:
            raise ValueError(f"peak_flops_per_s={peak_flops_per_s}; it is positive.")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.peak_flops_per_s = peak_flops_per_s
        self.started = False
        self._watched: dict[int, nn.Module] = {}
        self._handles: list[Any] = []
        self._open = contextlib.ExitStack()
        self._calls: Calls | None = None
        self._made: Profile | None = None

    # -- from start to end --------------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin, with everything at 0.

        Args:
            ignore_list: classes of modules that are not looked at by themselves: what they do is their parent's.

        Raises:
            ValueError: what is no class of modules.
        """
        listed: Any = ignore_list or ()
        if not isinstance(listed, Iterable):
            raise ValueError(f"ignore_list={ignore_list!r}; it is a list of classes of modules, [torch.nn.Dropout].")
        ignored = tuple(listed)
        for one in ignored:
            given: Any = one
            if not (isinstance(given, type) and issubclass(given, nn.Module)):
                raise ValueError(f"ignore_list has {one!r}; it takes classes of modules, such as torch.nn.Dropout.")
        self.end_profile()
        # Exactly these classes: nn.Module would be all of them.
        self._watched = {id(m): m for m in self.model.modules() if m is self.model or type(m) not in ignored}
        self.reset_profile()
        self._watch()
        self._open.enter_context(_as_written())
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._open.callback(self._counter.leave)
        self.started = True
        latest.note(self)

    def _watch(self) -> None:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def measure_seconds(self, call: Callable[[], Any]) -> None:
        """Call once more, with the clock alone: its seconds take the place of those of the profile that was stopped.

        Raises:
            ValueError: nothing was started, or it has not been stopped.
        """
        if self._calls is None or self._handles:
            raise ValueError("measure_seconds() is for between stop_profile() and end_profile().")
        for node in self._calls.root.walk():
            node.calls, node.seconds = 0, 0.0
        self._made = None
        self._watch()
        try:
            call()
        finally:
            self.stop_profile()

    def reset_profile(self) -> None:
        """Everything is 0 again; what is on stays on."""
        self._calls, self._made = Calls(), None
        if not self._handles:
            self._counter = OperatorCounter(self._take, self._before)
        self._counter.not_counted, self._counter.overhead_s = Tally(), 0.0
        self._counter.detour_s = detour_of_operators()
        self._operators: dict[str, Sums] = {}
        self._computed = True
        self._pass, self._since, self._before_s = Pass.OUTSIDE, 0.0, 0.0
        self._seconds = dict.fromkeys(Pass, 0.0)

    def stop_profile(self) -> None:
        """Nothing is counted any more; what was counted stays until the next start."""
        if self._handles:
            self._switch(Pass.OUTSIDE)
            self._open.close()
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def end_profile(self) -> None:
        """Stop, and let go of the model's modules. What was measured can still be read."""
        self.stop_profile()
        if self.started:
            self._made = self.profile
        self._watched, self._calls, self.started = {}, None, False

    # -- what happens meanwhile ---------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._watched and self._calls is not None:
            _synchronise()
            now = time.perf_counter()
            if torch._C._current_autograd_node() is None:
                self._switch(Pass.FORWARD)
            self._calls.enter(module)
            self._counter.overhead_s += time.perf_counter() - now
            self._calls.begin(self._counter.overhead_s)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._watched and self._calls is not None:
            _synchronise()
            now = time.perf_counter()
            self._calls.leave(module, now, self._counter.overhead_s)
            self._counter.overhead_s += time.perf_counter() - now

    def _before(self) -> None:
        if self._calls is not None:
            self._place = self._calls.place()
            self._switch(self._place[1])

    def _take(self, name: str, work: Work, again: Work, moved: tuple[int, int], computed: bool) -> None:
        if self._calls is None:
            return
        node, now = self._place
        self._computed &= computed
        node.of(now).add(work, *moved)
        sums = self._operators.get(name)
        if sums is None:
            sums = self._operators[name] = Sums()
        sums.add(work, *moved)
        if again is not NOTHING:
            node.of(Pass.RECOMPUTATION if now is Pass.BACKWARD else now).add(again, 0, 0)
            sums.add(again, 0, 0)
            sums.calls -= 1

    def _switch(self, to: Pass) -> None:
        """Another pass begins; recomputation is a part of backward."""
        to = Pass.BACKWARD if to is Pass.RECOMPUTATION else to
        if to is not self._pass:
            _synchronise()
            now, overhead = time.perf_counter(), self._counter.overhead_s
            if self._pass is not Pass.OUTSIDE:
                self._seconds[self._pass] += now - self._since - (overhead - self._before_s)
            self._pass, self._since, self._before_s = to, now, overhead

    # -- what came of it ----------------------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        """What was measured since the start.

        Raises:
            ValueError: nothing was started.
        """
        if self._made is not None:
            return self._made
        if self._calls is None:
            raise ValueError(_NEVER)
        model, folded = gather(self.model, self._calls, timed=self._computed and self._timed())
        backward = self._seconds[Pass.BACKWARD]
        found = Profile(
            model=model,
            operators={name: Operator(calls=one.calls, work=one.work) for name, one in self._operators.items()},
            not_counted=dict(self._counter.not_counted),
            outside=self._calls.root.work(Pass.OUTSIDE),
            backward_s=backward if backward and self._computed else None,
            recompute_fwd_factor=self.recompute_fwd_factor,
            folded=folded,
        )
        if not self._handles:
            self._made = found
        return found

    def _timed(self) -> bool:
        """Whether the model computes values, which it does not on meta."""
        first = next(self.model.parameters(), None)
        return first is None or first.device.type != "meta"

    @property
    def profile_so_far_has_backward(self) -> bool:
        """Whether a backward has begun since the start."""
        return self._pass is Pass.BACKWARD or self._seconds[Pass.BACKWARD] > 0

    @property
    def seconds_of_counting(self) -> float:
        """What looking at operators has taken since the start, and is in no number."""
        return self._counter.overhead_s

    @property
    def not_counted(self) -> dict[str, int]:
        """How often each operator ran that has no formula; empty where everything was counted."""
        return dict(self.profile.not_counted)

    @property
    def flops(self) -> int:
        """Of the forward; 0 before there is a profile."""
        return self.get_total_flops() if self._has_profile else 0

    @property
    def macs(self) -> int:
        """Of the forward; 0 before there is a profile."""
        return self.get_total_macs() if self._has_profile else 0

    @property
    def params(self) -> int:
        """Of the model; 0 before there is a profile."""
        return self.get_total_params() if self._has_profile else 0

    @property
    def _has_profile(self) -> bool:
        return self._made is not None or self._calls is not None

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the model's forward: 2 · multiply-accumulates; elementwise operations are no part of it."""
        found = self.profile.model.forward.flops
        return strings.number_to_string(found) if as_string else found

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the model's forward."""
        found = self.profile.model.forward.macs
        return strings.macs_to_string(found) if as_string else found

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forward, what counting took left out; None where nothing was computed (on meta)."""
        found = self.profile.model.seconds
        if found is None:
            return "not measured" if as_string else None
        return strings.duration_to_string(found) if as_string else found

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters that this rank computes with, each once; those that ZeRO has partitioned count whole."""
        found = self.profile.model.parameters.numel
        return strings.params_to_string(found) if as_string else found

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
        output_file: str | None = None,
    ) -> None:  # fmt: skip
        """Print the totals, the largest modules and, with ``detailed``, the tree of modules.

        Args:
            profile_step: which step this was, for the heading.
            module_depth, top_modules: see :meth:`print_model_aggregated_profile`.
            output_file: where it is written, in the place of standard output; its folder is made.
        """
        text = report.whole(
            self.profile, step=profile_step, depth=module_depth, top=top_modules, detailed=detailed,
            engine=self.ds_engine, peak_flops_per_s=self.peak_flops_per_s,
        )  # fmt: skip
        report.put(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print which classes of modules have the most parameters, multiply-accumulates and seconds, at each depth.

        Args:
            module_depth: down to which depth, 0 being the model alone; -1: down to the innermost modules.
            top_modules: how many classes at each depth.
        """
        report.put(report.aggregated(self.profile, depth=module_depth, top=top_modules), None)


def _synchronise() -> None:
    """Wait for the device, so that the clock has seen what was launched."""
    if _has_device():
        torch.accelerator.synchronize()


@functools.cache
def _has_device() -> bool:
    return bool(torch.accelerator.is_available())


_stances: list[Any] = []
"""What brings torch.compile's stance back; one entry for each profiler that is on, and they stop in any order."""


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """What torch.compile has compiled runs uncompiled, where it is in use at all, until the last profiler stops."""
    if not _COMPILE & sys.modules.keys():
        yield
        return
    _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    if len(_stances) == 1:
        _stances[0].__enter__()
    try:
        yield
    finally:
        stance = _stances.pop()
        if not _stances:
            stance.__exit__(None, None, None)
