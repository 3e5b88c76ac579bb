"""Whether an optimizer computes the same of flat segments as of parameters, found out by trying it.

Segments are flat, of other lengths, in another order, without attributes, and no ``nn.Parameter``. Stand-ins for the
parameters have their shapes, strides, attributes, names and places in the groups; an update of them, and one of the
same elements laid flat and cut elsewhere, must agree. Shapes that would take too much memory are cut to fewer rows, and
tried in full on the device "meta", where tensors have no values: there both have to be made by the same operations with
the same numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.shard.quantised_parameters import class_of

LR = 1e-2
"""The learning rate of a trial: a schedule may begin with 0, and what is multiplied by little shows little."""
MOST_ELEMENTS = 1 << 21
"""Of all stand-ins of one trial."""
LEAST_ELEMENTS = 1 << 8
"""Of a stand-in, before rows are left out."""
TRIED_ALONE = 1 << 22
"""Elements of a parameter that is tried in full where the device "meta" cannot be used."""
UNQUANTISED = 1 << 10
"""Elements up to which optimizers keep states as they are that they quantise otherwise, in blocks of any tensor."""
SCALES = (1.0, 0.01, 100.0)
"""Of the gradients of a trial's steps: what is done to a norm above a limit shows."""
LATER_STEPS = 20
"""Of a second trial with smaller stand-ins, for rules that begin in a later step."""
LENGTHS = (1 << 10, 1 << 16)
"""Of flat segments that are tried for a parameter of many elements, beside its own length and that of all together."""
_CODES = frozenset({torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})

Build = Callable[[list[dict[str, Any]]], Any]
"""Makes the optimizer of parameter groups."""


class Unlike(Exception):
    """The two do not agree; how, as the end of a sentence."""


class Flat(torch.Tensor):
    """A segment that notes which attributes it was asked for, and has not."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    asked: set[str]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name != "asked":
            self.asked.add(name)
        raise AttributeError(f"a tensor has no attribute {name!r}")


class Trial:
    """Tries an optimizer on stand-ins for the parameters of some groups.

    Args:
        build: makes it.
        groups: with the model's parameters.
        name: of the optimizer, for messages.
    """

    def __init__(self, build: Build, groups: Sequence[Mapping[str, Any]], name: str) -> None:
        self._build, self._groups, self._name = build, groups, name
        self.asked: set[str] = set()
        """Attributes of parameters that it looked for, which flat segments have not."""
        self.quantises = False
        """States are kept in blocks of codes."""

    def why_whole(self) -> str | None:
        """Why it needs parameters as they are, as the end of a sentence; None if flat segments will do.

        Raises:
            NotImplementedError: a step of whole tensors ends with an exception.
            Exception: what its constructor says of its options.
        """
        count = sum(len(group["params"]) for group in self._groups)
        most = max(MOST_ELEMENTS // max(count, 1), LEAST_ELEMENTS)
        with torch.random.fork_rng(devices=[]):
            try:
                try:
                    self._compare([dict(group) for group in self._groups], most)
                    if not self._of_a_library():
                        self._compare([dict(group) for group in self._groups], LEAST_ELEMENTS, LATER_STEPS)
                except _Quantises:
                    self.quantises, most = True, UNQUANTISED
                    self._compare([dict(group) for group in self._groups], most)
                    return self._why_asked()
                for group in _alone(self._groups, most):
                    self._in_full(group)
            except Unlike as unlike:
                return str(unlike)
        return self._why_asked()

    def _why_asked(self) -> str | None:
        for group in self._groups:
            for parameter in group["params"]:
                for name in sorted(self.asked & vars(parameter).keys()):
                    return f"it looks at the attribute {name!r} of parameters"
        return None

    def _of_a_library(self) -> bool:
        """Whether what it does in a later step is known not to differ from its first ones."""
        first = [{**in_trial(g), "params": [nn.Parameter(torch.ones(2, 2))]} for g in _unnamed(self._groups[:1])]
        try:
            made = self._build(first)
        except Exception:
            return False
        return type(made).__module__.startswith(("torch.optim.", "zoo.optim.")) and "step" not in vars(made)

    def _compare(self, groups: list[dict[str, Any]], most: int, steps: int = len(SCALES)) -> None:
        """Raise Unlike unless both updates give the same values."""
        generator = torch.Generator().manual_seed(0)
        shapes = [[_cut(p.shape, most) for p in group["params"]] for group in groups]
        scales = (1, *islice(cycle(SCALES), steps))
        values, *grads = ([[torch.randn(s, generator=generator) * k for s in of] for of in shapes] for k in scales)
        expected, codes = self._whole_results(groups, values, grads)
        found = self._flat_results(groups, [_joined(of) for of in values], [[_joined(of) for of in g] for g in grads])
        before = [_joined(of) for of in values]
        if all(map(_alike, expected, found, before)):
            return
        if codes and most > UNQUANTISED:
            raise _Quantises
        if any(_is_laid_otherwise(p) for group in groups for p in group["params"]):
            in_order, _ = self._whole_results(groups, values, grads, in_order=True)
            if not all(map(_alike, expected, in_order, before)):
                raise NotImplementedError(
                    f"{self._name} cannot run under a ZeRO optimizer: its update depends on the order of a parameter's "
                    "elements in memory (its strides, channels_last for example), and under a ZeRO optimizer all are "
                    "in flat buffers, in row-major order. Lay the parameters out so (p.data = p.data.contiguous()) "
                    "before it is constructed."
                )
        in_buffer, _ = self._whole_results(groups, values, grads, in_order=True, in_buffer=True)
        if not all(map(_alike, expected, in_buffer, before)):
            raise NotImplementedError(
                f"{self._name} cannot run under a ZeRO optimizer: its update depends on the storage of a parameter "
                "(p.untyped_storage()), and under a ZeRO optimizer many lie in one. Let it look at the parameter."
            )
        raise Unlike("its update of an element depends on other elements, or on what a parameter is beside them")

    def _whole_results(
        self, groups: list[dict[str, Any]], values: Any, grads: Any, *, in_order: bool = False, in_buffer: bool = False
    ) -> tuple[list[torch.Tensor], bool]:  # fmt: skip
        """The parameters of each group after two updates, and whether states are codes.

        Args:
            in_order: all are in row-major order, as they will be.
            in_buffer: all have one storage, as they will have.
        """
        whole = _with_params(groups, [[_like(v, p, in_order=in_order) for v, p in zip(of, g["params"], strict=True)]
                                      for of, g in zip(values, groups, strict=True)])  # fmt: skip
        tensors = [group["params"] for group in whole]
        if in_buffer:
            _lay_in_one_buffer([tensor for of in tensors for tensor in of])
        optimizer = self._build(whole)  # options that it refuses are not about flat tensors
        try:
            for grad in grads:
                _step(optimizer, tensors, grad)
        except Exception as error:
            raise NotImplementedError(
                f"{self._name} cannot run under a ZeRO optimizer: a step ended with {type(error).__name__}: {error}. "
                "It must work without a closure, on dense gradients."
            ) from error
        codes = any(v.dtype in _CODES for of in optimizer.state.values() for v in _tensors_of(of))
        return [_joined(of) for of in tensors], codes

    def _flat_results(
        self, groups: list[dict[str, Any]], values: list[torch.Tensor], grads: list[list[torch.Tensor]]
    ) -> list[torch.Tensor]:  # fmt: skip
        # Each part by an optimizer of its own, as ranks and pieces of an update have them.
        done: list[list[torch.Tensor]] = []
        for index in range(2):
            flat = _with_params(_unnamed(groups), [[self._segment(part) for part in _parts(v)[index]] for v in values])
            tensors = [group["params"] for group in flat]
            try:
                optimizer = self._build(flat)
                for grad in grads:
                    _step(optimizer, tensors, [_parts(g)[index] for g in grad])
            except Exception as error:
                raise Unlike(f"a step on flat tensors ended with {type(error).__name__}: {error}") from error
            done.append([_joined(of) for of in tensors])
        return [torch.cat(of) for of in zip(*done, strict=True)]

    def _segment(self, values: torch.Tensor) -> Flat:
        within = torch.nn.functional.pad(values, (1, 1))[1:-1]  # of a storage that has more
        made: Flat = torch.Tensor._make_subclass(Flat, within, True)
        made.asked = self.asked
        return made

    def _in_full(self, group: dict[str, Any]) -> None:
        """One parameter in all of its elements, by the operations that update it."""
        (parameter,) = group["params"]
        numel, total = int(parameter.numel()), sum(p.numel() for g in self._groups for p in g["params"])
        flat = _unnamed([group])[0]
        try:
            whole = self._operations(group, _like(torch.empty(parameter.shape, device="meta"), parameter))
            others = [
                self._operations(flat, torch.empty(n, device="meta").requires_grad_()) for n in (*LENGTHS, numel, total)
            ]
        except Exception:  # whatever it says of tensors without values
            if numel <= TRIED_ALONE:
                self._compare([group], numel)
            return
        if any(other != whole for other in others):
            raise Unlike(f"it updates a parameter of shape {tuple(parameter.shape)} otherwise than a flat segment")

    def _operations(self, group: dict[str, Any], tensor: torch.Tensor) -> list[Any]:
        optimizer = self._build(_with_params([group], [[tensor]]))
        with _Noted() as noted:
            for _ in range(2):
                tensor.grad = torch.zeros_like(tensor)
                optimizer.step()
        calls: list[Any] = noted.calls
        return calls


class _Quantises(Exception):
    """States are kept in blocks of codes, which lie otherwise in flat segments."""


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is called, with the numbers among the arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, (bool, int, float))]
        if func._schema.name not in _OF_SHAPE:
            self.calls.append((func._schema.name, numbers))
        return func(*args, **(kwargs or {}))


_OF_SHAPE = frozenset({"aten::view", "aten::detach", "aten::alias", "aten::empty", "aten::empty_strided",
                       "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::as_strided"})  # fmt: skip


# Stand-ins -----------------------------------------------------------------------------------------------------------


def fresh(value: Any) -> Any:
    """A value that an optimizer may change, for a trial."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if not isinstance(value, nn.Parameter) else value
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def in_trial(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a trial: copies, with a learning rate that shows what it does."""
    found = {key: fresh(value) for key, value in options.items()}
    lr = found.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() == 1 and lr.is_floating_point():
        found["lr"] = torch.full_like(lr, LR)
    elif isinstance(lr, (int, float)) and not isinstance(lr, bool):
        found["lr"] = LR
    return found


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _cut(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """The shape with fewer rows, and columns if need be, so that it has at most ``most`` elements."""
    found = list(shape)
    for dim in range(len(found)):
        rest = math.prod(found[:dim] + found[dim + 1 :])
        if rest and rest * found[dim] > most:
            found[dim] = max(most // rest, min(found[dim], 2))
    return tuple(found)


def _alike(mine: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two updates of the same values are the same but for roundings."""
    change = float((mine - before).abs().amax()) if mine.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=1e-6, atol=1e-5 * min(change, LR) + 1e-7, equal_nan=True)


def _is_laid_otherwise(parameter: torch.Tensor) -> bool:
    """Whether its elements are not in row-major order."""
    return bool(parameter.numel()) and not parameter.is_contiguous()


def _like(values: torch.Tensor, parameter: Any, *, in_order: bool = False) -> nn.Parameter:
    """A parameter with these values, and whatever else the model's has."""
    known = hasattr(type(parameter), "_zoo_bucket") or hasattr(type(parameter), "_zoo_adoptable")
    cls = class_of(parameter) if known or not isinstance(parameter, nn.Parameter) else type(parameter)
    laid = values.clone()
    if laid.shape == parameter.shape and _is_laid_otherwise(parameter) and not in_order:
        laid = torch.empty_strided(laid.shape, parameter.stride(), device=laid.device).copy_(laid)
    try:
        made: Any = torch.Tensor._make_subclass(cls, laid, True)
    except Exception:  # a class with a constructor of its own mind
        made = nn.Parameter(laid)
    made.__dict__.update({k: fresh(v) for k, v in vars(parameter).items() if not k.startswith("_zoo_")})
    return made  # type: ignore[no-any-return]


def _lay_in_one_buffer(tensors: Sequence[torch.Tensor]) -> None:
    flat = _joined(tensors)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = part.view(tensor.shape)


def stand_in(parameter: torch.Tensor, dtype: torch.dtype, device: str) -> nn.Parameter:
    """A parameter of ones with the shape and the attributes of the model's."""
    return _like(torch.ones(parameter.shape, dtype=dtype, device=device), parameter, in_order=True)


def _alone(groups: Sequence[Mapping[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    """Each kind of parameter that has more elements, in its group alone."""
    seen = set()
    for index, group in enumerate(groups):
        names = group.get("param_names", [None] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            kind = (index, tuple(parameter.shape), tuple(sorted(vars(parameter).keys() - {"_zoo_name", "_zoo_slot"})))
            if parameter.numel() > most and kind not in seen:
                seen.add(kind)
                named = {"param_names": [name]} if "param_names" in group else {}
                yield {**group, "params": [parameter], **named}


def _with_params(groups: Sequence[Mapping[str, Any]], params: list[list[Any]]) -> list[dict[str, Any]]:
    return [{**in_trial(g), "params": list(of)} for g, of in zip(groups, params, strict=True)]


def _unnamed(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "param_names"} for group in groups]


def _parts(values: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Flat segments, of which none ends where a tensor does, if that can be; the first of one rank, two of another."""
    first, second = (7 * values.numel()) // 24, (15 * values.numel()) // 24
    return [values[:first]], [part for part in (values[first:second], values[second:]) if part.numel()]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().as_subclass(torch.Tensor).reshape(-1) for t in tensors] or [torch.zeros(0)])


def _step(optimizer: Any, tensors: list[list[Any]], grads: Sequence[Sequence[torch.Tensor]]) -> None:
    for of, given in zip(tensors, grads, strict=True):
        for tensor, grad in zip(of, given, strict=True):
            tensor.grad = grad.clone()
    optimizer.step()


def _tensors_of(state: Any) -> list[torch.Tensor]:
    return [v for v in state.values() if isinstance(v, torch.Tensor)] if isinstance(state, Mapping) else []
