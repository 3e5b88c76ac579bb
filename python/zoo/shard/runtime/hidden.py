"""What torch.compile meets where it traces a hook that it is not to see. Imported only then: it brings the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.parts.hooks import HIDDEN
from zoo.shard.runtime.compiled import Compiled


@torch.compiler.disable(reason=HIDDEN)  # type: ignore[no-untyped-call, untyped-decorator]
def enter_hidden(compiled: Compiled, enter: Callable[..., None], *args: Any) -> None:
    """The compiler is tracing this very hook: hide all of them, and enter."""
    compiled.hide(whole=True)
    enter(*args)
