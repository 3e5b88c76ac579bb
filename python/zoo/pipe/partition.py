"""Which layers a stage has: consecutive ones, so that the heaviest stage is as light as can be."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat

__all__ = ["balanced", "split_layers", "uniform"]

METHODS = "'parameters', 'uniform', 'type:REGEX', or one weight for each layer (seconds or bytes that were measured)"


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """Bounds b with part p = layers b[p] … b[p+1]-1; the sizes differ by one at most, larger ones first."""
    size, rest = divmod(num_layers, num_parts)
    return [p * size + min(p, rest) for p in range(num_parts + 1)]


def balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of consecutive parts of at least one layer: the heaviest as light as can be, and then Σ weight² least.

    cost(p, j) = min over i < j of cost(p - 1, i) + (the weight of layers i … j - 1)², parts over the bound left out;
    the bound, the least one for which the layers fit, is found by bisection among the weights of runs. O(P L²).

    Raises:
        ValueError: fewer layers than parts, or a weight that is negative or no number.
    """
    num = len(weights)
    if not 1 <= num_parts <= num:
        raise ValueError(f"{num} layers cannot be cut into {num_parts} stages: a stage has at least one layer.")
    given: Sequence[Any] = weights
    if any(not isinstance(w, SupportsFloat) or not 0 <= float(w) < math.inf for w in given):
        raise ValueError(f"weights of layers are finite numbers of at least 0; got {list(weights)}.")
    _, exponent = math.frexp(max(map(float, weights)))  # a power of 2 out of all of them: squares of sums are finite
    sums = [0.0, *itertools.accumulate(math.ldexp(float(w), -exponent) for w in weights)]
    candidates = sorted({sums[j] - sums[i] for i in range(num) for j in range(i + 1, num + 1)})
    most = candidates[bisect.bisect_left(candidates, True, key=lambda bound: _fits(sums, num_parts, bound))]
    best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(math.inf, [])] * num
    for _ in range(num_parts):
        after: list[tuple[float, list[int]]] = [(math.inf, [])] * (num + 1)
        for j in range(1, num + 1):
            for i in range(j - 1, -1, -1):
                weight = sums[j] - sums[i]
                if weight > most:
                    break
                if best[i][0] + weight * weight < after[j][0]:
                    after[j] = best[i][0] + weight * weight, [*best[i][1], j]
        best = after
    return best[num][1]


def _fits(sums: Sequence[float], num_parts: int, most: float) -> bool:
    """Whether the layers fit into parts of at most this weight, none of them empty."""
    num, start = len(sums) - 1, 0
    for part in range(num_parts):
        end, last = start, num - (num_parts - part - 1)  # parts to come need a layer each
        while end < last and sums[end + 1] - sums[start] <= most:
            end += 1
        if end == start:
            return False
        start = end
    return start == num


def split_layers(
    method: str | Sequence[float], num_parts: int, names: Sequence[str], num_parameters: Callable[[], Sequence[int]]
) -> list[int]:
    """Bounds of the parts by a documented method.

    Args:
        method: see ``METHODS``.
        names: of the class of each layer.
        num_parameters: of each layer; called only if needed.

    Raises:
        ValueError: an unknown method, a regular expression that matches too few layers, fewer layers than parts.
    """
    num = len(names)
    if num < num_parts:
        raise ValueError(f"{num} layers cannot be cut into {num_parts} stages: a stage has at least one layer.")
    if not isinstance(method, str):
        if not isinstance(method, Iterable):
            raise ValueError(f"partition_method={method!r}; allowed are {METHODS}.")
        weights: list[Any] = list(method)
        if len(weights) != num:
            raise ValueError(f"partition_method has {len(weights)} weights, and there are {num} layers.")
        return balanced(weights, num_parts)
    lowered = method.lower()
    if lowered == "uniform":
        return uniform(num, num_parts)
    if lowered == "parameters":
        return balanced([float(n) for n in num_parameters()], num_parts)
    if lowered.startswith("type:"):
        pattern = method[len("type:") :]
        try:
            matches = [re.search(pattern, name, re.IGNORECASE) is not None for name in names]
        except re.error as error:
            raise ValueError(f"partition_method={method!r}: {error}.") from None
        if sum(matches) < num_parts:
            raise ValueError(
                f"partition_method={method!r} matches {sum(matches)} of the layers, and there are {num_parts} stages. "
                f"The layers are: {', '.join(dict.fromkeys(names))}."
            )
        return balanced([float(m) for m in matches], num_parts)
    if lowered in ("time", "memory"):
        raise ValueError(
            f"partition_method={method!r}: measure it before, partition_method=measure(layers, sample, "
            f"what={lowered!r}) with zoo.pipe.measure."
        )
    raise ValueError(f"partition_method={method!r}; allowed are {METHODS}.")
