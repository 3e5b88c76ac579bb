"""Options of inductor that a whole graph is given."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from zoo.compile.passes.pin import PINS


def settings_of(backend: str, mode: Any, options: Any) -> dict[str, Any]:
    """Of inductor, from the arguments ``mode`` and ``options`` of torch.compile.

    Raises:
        ValueError: there is no such mode or option, its value is of another kind, or a whole graph has its own.
    """
    if backend != "inductor":
        if mode is not None or options:
            raise ValueError(f"mode= and options= are of the backend inductor; {backend} has none.")
        return {}
    from torch._inductor import list_mode_options

    modes: dict[Any, Any] = list_mode_options()
    if mode not in (None, *modes):
        raise ValueError(f"mode={mode!r}; there are {', '.join(modes)}, or None.")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options= is a dict of inductor's options by name, and not {options!r}.")
    found = dict(modes[mode]) if mode is not None else {}
    found |= dict(_setting(*given) for given in (options or {}).items())
    if found.get("triton.cudagraphs"):
        raise ValueError(
            "a whole graph with CUDA graphs (mode='reduce-overhead' or 'max-autotune'): these want memory that stays, "
            "and parameters and gradients come and go. 'max-autotune-no-cudagraphs' works."
        )
    return found


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """An option of inductor as inductor calls it, whose value is one of its kind and not for zoo to choose."""
    from torch._inductor import config, list_options

    key, known = str(name).replace("-", "_"), list_options()
    if key not in known:
        near = "".join(f"; {one!r} is one" for one in difflib.get_close_matches(key, known, 1))
        raise ValueError(f"inductor has no option {name!r}{near}. torch._inductor.list_options() has all of them.")
    if key == "custom_partitioner_fn":
        raise ValueError(
            "custom_partitioner_fn of inductor is zoo's own in a whole graph: what backward needs of a parameter that "
            "is released is decided there. Leave it out."
        )
    if value != PINS.get(key, value):
        raise ValueError(
            f"the option {key} of inductor is {PINS[key]} in a whole graph: it moves what is computed to other places, "
            "where parameters may not be. Leave it out, or compile unit by unit (engine.compile())."
        )
    kind = config.get_type(key)  # type: ignore[attr-defined]
    if not _is_of(value, kind):
        named = kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)
        raise ValueError(f"the option {key} of inductor is a {named}, and not {value!r}.")
    return key, value


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type as annotations say it; what elements are is not looked at."""
    origin = get_origin(kind)
    if kind is types.NoneType:  # nobody has said
        return True
    if origin in (Union, types.UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    return not isinstance(origin or kind, type) or isinstance(value, origin or kind)
