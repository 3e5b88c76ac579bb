"""What compression made of a model, layer by layer: bits, sparsity, bytes, FLOPs; and how good it is."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.compression.packed import PackedLinear

Tensor = torch.Tensor
Measure = Callable[[nn.Module], float]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """A module with parameters of its own, before or after.

    Attributes:
        shape: of its weight, or of the largest tensor that it has.
        numel: elements of its parameters; a packed weight counts as its elements.
        bits: that hold an element of the weight, numbers of groups counted.
        levels: distinct values of the weight: 2^bits or fewer in a group that is quantised, more where scales differ.
        nonzero: share of the weight's elements.
        num_bytes: of all its tensors.
        flops: of a forward, without those of modules inside; None where no inputs were given.
    """

    kind: str
    shape: tuple[int, ...]
    numel: int
    bits: float
    levels: int
    nonzero: float
    num_bytes: int
    flops: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Two models beside each other.

    Attributes:
        layers: by name, before and after; None where the model lacks the layer.
        measured: what ``measure`` gave, before and after; None without.
    """

    layers: Mapping[str, tuple[LayerReport | None, LayerReport | None]]
    measured: tuple[float, float] | None
    unit: str

    def totals(self) -> list[dict[str, float]]:
        """Of before and of after: ``numel``, ``nonzero`` (share), ``bits`` an element, ``num_bytes``, ``flops``."""
        found = []
        for side in (0, 1):
            rows = [row for pair in self.layers.values() if (row := pair[side]) is not None]
            numel = sum(row.numel for row in rows)
            num_bytes = sum(row.num_bytes for row in rows)
            flops = math.fsum(row.flops or 0 for row in rows)
            kept = math.fsum(row.nonzero * row.numel for row in rows)
            found.append({
                "numel": numel, "nonzero": kept / max(numel, 1), "bits": 8 * num_bytes / max(numel, 1),
                "num_bytes": num_bytes, "flops": flops,
            })  # fmt: skip
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "layers": {name: [row and dataclasses.asdict(row) for row in pair] for name, pair in self.layers.items()},
            "totals": self.totals(), "measured": self.measured, "unit": self.unit,
        }  # fmt: skip

    def table(self) -> str:
        """A line a layer, "before > after" where they differ, and the totals."""
        header = ["layer", "kind", "shape", "bits", "levels", "zeros", "bytes", "FLOPs"]
        rows = [header, *(_row(name, pair) for name, pair in self.layers.items())]
        before, after = self.totals()
        texts: list[Callable[[dict[str, float]], str]] = [
            lambda t: f"{t['numel']:,}", lambda t: f"{t['bits']:.2f}", lambda t: "",
            lambda t: f"{1 - t['nonzero']:.1%}", lambda t: f"{t['num_bytes']:,}", lambda t: _count(t["flops"]),
        ]  # fmt: skip
        rows.append(["all", "", *(_both(text(before), text(after)) for text in texts)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.measured is not None:
            first, second = self.measured
            change = f" ({second / first - 1:+.2%})" if first else ""
            lines.append(f"{self.unit}: {first:.5g} before, {second:.5g} after{change}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Bars of bytes and of the share that is not zero, by layer, as a PNG, PDF or SVG."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        names = list(self.layers)
        places = range(len(names))
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.22 * len(names)), sharey=True)
        for side, (label, offset) in enumerate((("before", -0.2), ("after", 0.2))):
            rows = [pair[side] for pair in self.layers.values()]
            at = [place + offset for place in places]
            left.barh(at, [0 if row is None else row.num_bytes / 1e3 for row in rows], 0.4, label=label)
            right.barh(at, [0 if row is None else 100 * row.nonzero for row in rows], 0.4, label=label)
        left.set_yticks(list(places), labels=names, fontsize=7)
        left.invert_yaxis()
        left.set(xlabel="kB", title="size")
        right.set(xlabel="% of the weight", title="not zero")
        left.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def report(
    before: nn.Module, after: nn.Module, *, inputs: Any = None, measure: Measure | None = None, unit: str = "measure"
) -> Report:
    """Looks at both models; neither is changed.

    Args:
        inputs: of one forward, for FLOPs: a tensor, a tuple of arguments, or a mapping of them by name.
        measure: of a model, in evaluation mode without gradients, such as its loss on held-out data; ``unit``: of what.
    """
    sides = []
    measured: list[float] = []
    for model in (before, after):
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                flops = None if inputs is None else _flops(model, inputs)
                sides.append(_layers(model, flops))
                if measure is not None:
                    measured.append(float(measure(model)))
        finally:
            for module, training in modes:
                module.training = training
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    return Report(
        layers={name: (sides[0].get(name), sides[1].get(name)) for name in names},
        measured=(measured[0], measured[1]) if measure is not None else None, unit=unit,
    )  # fmt: skip


def _layers(model: nn.Module, flops: Mapping[str, int] | None) -> dict[str, LayerReport]:
    found, seen = {}, set[int]()
    for name, module in model.named_modules():
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        own = [t for t in own if id(t) not in seen]
        if not own or not (module._parameters or isinstance(module, PackedLinear)):
            continue
        seen |= {id(t) for t in own}
        if isinstance(module, PackedLinear):
            weight, numel = module.dense(), module.in_features * module.out_features
            numel += 0 if module.bias is None else module.bias.numel()
            bits = 8 * (module.num_bytes - (0 if module.bias is None else module.bias.nbytes)) / max(weight.numel(), 1)
        else:
            parameters = [p for p in module._parameters.values() if p is not None]
            weight = module._parameters.get("weight")
            weight = max(parameters, key=lambda p: p.numel()).detach() if weight is None else weight.detach()
            numel, bits = sum(p.numel() for p in parameters), 8.0 * weight.element_size()
        found[name or "(model)"] = LayerReport(
            kind=type(module).__name__, shape=tuple(weight.shape), numel=numel, bits=bits,
            levels=len(torch.unique(weight)), nonzero=float((weight != 0).float().mean()) if weight.numel() else 1.0,
            num_bytes=sum(t.nbytes for t in own), flops=None if flops is None else flops.get(name, 0),
        )  # fmt: skip
    return found


def _flops(model: nn.Module, inputs: Any) -> dict[str, int]:
    """Multiplications and additions of matrix products by module, as ``torch.utils.flop_counter`` counts them, without
    those of the modules that it calls."""
    from torch.utils.flop_counter import FlopCounterMode

    found: dict[str, int] = {}
    inside: list[tuple[str, nn.Module]] = []
    seen = 0

    def settle() -> None:
        """What came since the last time is the innermost module's."""
        nonlocal seen
        before, seen = seen, int(counter.get_total_flops())
        name, module = inside[-1] if inside else ("", None)
        if module is not None and not isinstance(module, PackedLinear):
            found[name] = found.get(name, 0) + seen - before

    def entering(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            settle()
            inside.append((name, module))
            if isinstance(module, PackedLinear):  # the counter does not know its kernels, only their reference
                x = args[0] if args else kwargs["x"]
                found[name] = found.get(name, 0) + 2 * x.numel() * module.out_features

        return enter

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        settle()
        inside.pop()

    handles = []
    with FlopCounterMode(display=False) as counter:
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        finally:
            for handle in handles:
                handle.remove()
    return found


def _row(name: str, pair: tuple[LayerReport | None, LayerReport | None]) -> list[str]:
    def of(text: Callable[[LayerReport], str]) -> str:
        return _both(*("-" if row is None else text(row) for row in pair))

    return [
        name, of(lambda r: r.kind), of(lambda r: "×".join(map(str, r.shape))), of(lambda r: f"{r.bits:.2f}"),
        of(lambda r: f"{r.levels:,}"), of(lambda r: f"{1 - r.nonzero:.1%}"), of(lambda r: f"{r.num_bytes:,}"),
        of(lambda r: "-" if r.flops is None else _count(r.flops)),
    ]  # fmt: skip


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} > {after}"


def _count(n: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"
