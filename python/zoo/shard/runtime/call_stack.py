"""Whether a module's call is still running: Python does not tell hooks when a ``KeyboardInterrupt`` has ended it."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

_CALLS = ("_call_impl", "_wrapped_call_impl", "_compiled_call_impl")


def exception_of_call() -> BaseException | None:
    """In a forward hook that is always called, and was given None: what the module's call ended with, if it was that.

    Whoever calls the model may be handling an exception of his own: that one was not caught by the call of the module.
    """
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    frame: FrameType | None = sys._getframe(1)
    while trace is not None and frame is not None:
        if frame is trace.tb_frame:
            return error if frame.f_code.co_name in _CALLS else None
        frame = frame.f_back
    return None


def is_called(module: nn.Module) -> bool:
    """Whether a call of ``module`` is on the stack of this thread; True as well where compiled code hides the stack."""
    forward = getattr(type(module).forward, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith("torch_dynamo"):
            return True
        if (code is forward or code.co_name in _CALLS) and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
