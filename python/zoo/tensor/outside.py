"""What regions do, for code that torch.compile compiles: a graph breaks there.

Imported where something is compiled, since that imports the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, as it is where nothing is compiled."""
    return function(*args)
