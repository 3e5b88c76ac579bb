"""The re-entrant form: an autograd function that runs backward in its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction as _TorchFunction

__all__ = ["Reentrant"]


class Reentrant(_TorchFunction):
    """torch's function, which saves its arguments where the hooks around it say, and refuses second derivatives.

    torch's would give them without the part that goes through the function.
    """

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the arguments.

        Raises:
            NotImplementedError: with ``create_graph=True``.
        """
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "second derivatives (create_graph=True) through a re-entrant activation checkpoint: they would lack "
                "what goes through the function; use the form that is not (use_reentrant=False)."
            )
        return _TorchFunction.backward(ctx, *grads)  # type: ignore[no-untyped-call]
