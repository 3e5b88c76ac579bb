"""What depends on who has called: Python does not tell by other means.

Whether a module's call is still running (no hook hears of a ``KeyboardInterrupt`` that has ended it), and who reads a
parameter of which only a shard is here: torch's functions for saving ask for what others may not, and so do those that
the model's :class:`~zoo.shard.partitioned.ReadPolicy` names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn

from zoo.shard.partitioned import PartitionedAccessError, ReadPolicy

SAVES = nn.Module._save_to_state_dict.__code__
TORCH_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
_DEFAULT = ReadPolicy()
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


def called_by(*modules: str) -> bool:
    """Whether code of a module whose name begins so has led here."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False


def nothing_of(parameter: Any) -> torch.Tensor | None:
    """What a ``state_dict()`` holds of a parameter of which only a shard is here, where it is asked for its names.

    transformers does so at stage 3 before it loads weights, and on ranks that do not save. It gets a tensor without
    memory (of the device "meta"), of which nothing can be computed or written; None for whom the model's
    :class:`ReadPolicy` does not name.

    Raises:
        PartitionedAccessError: the values would be written (``save_pretrained``), see :func:`_refuse_saving`.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_code is not SAVES:
        return None
    owner = getattr(parameter._zoo_bucket, "owner", None)  # what Init made has none yet
    names_for = getattr(owner and owner(), "reads", _DEFAULT).names_for
    if names_for is not None:
        while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
            frame = frame.f_back
        if frame is None or not str(frame.f_globals.get("__name__", "")).startswith(names_for):
            return None
    _refuse_saving(parameter, frame)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _refuse_saving(parameter: Any, frame: FrameType | None) -> None:
    """Refuse ``save_pretrained()`` without ``state_dict=`` (transformers, PEFT, diffusers), on the rank that writes.

    On the others too, unless all ranks have read the whole model since the latest update: then the one that writes may
    have been given the values.
    """
    while frame is not None and frame.f_code.co_name != "save_pretrained":
        frame = frame.f_back
    bucket = parameter._zoo_bucket
    if frame is None or not (frame.f_locals.get("is_main_process", True) or not bucket.read_whole):
        return
    raise PartitionedAccessError(
        f"save_pretrained() without state_dict= at ZeRO stage 3: of {bucket.called(parameter._zoo_slot)!r} this rank "
        "holds a shard, and what is written has to be whole. All ranks call model.save_pretrained(folder, "
        "is_main_process=rank == 0, state_dict=...) with engine.module_state_dict(), which is a collective "
        "(accelerator.get_state_dict(model) under Accelerate); or save inside `with GatheredParameters("
        "list(model.parameters())):`; or use engine.save_16bit_model()."
    )


def split_for_torch(parameter: Any) -> bool:
    """Whether a function of torch's that all ranks call asks for a parameter of which only a shard is here."""
    bucket = parameter._zoo_bucket
    if torch.compiler.is_compiling() or not bucket.parameters.refused or bucket.spec.axes:
        return False
    return hasattr(bucket.owner(), "rows") and called_by(TORCH_FUNCTIONS)


def check_partitioned_call(buckets: Iterable[Any]) -> None:
    """Raise NotImplementedError in a forward of a model with partitioned parameters that runs on other tensors than
    those that are gathered: in a transform of torch.func, or in a trace outside of ``gathered()``."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "a transform of torch.func (vmap, grad, jacrev, jvp, ...) over a model whose parameters are split over "
            "ranks (ZeRO stage 3): it runs the model on other tensors than those that are gathered and reduced. "
            "Use a copy.deepcopy of the model, made inside of gathered(), or close() the optimizer first."
        )
    if torch._C._get_tracing_state() is not None and any(b.partitioned and not b.active for b in buckets):
        raise NotImplementedError(
            "torch.jit.trace (torch.onnx.export too) of a model whose parameters are split over ranks (ZeRO stage 3): "
            "the trace would hold parameters that are not here when it runs. Trace a copy.deepcopy of the model, made "
            "inside of gathered(), or the model after close() of the optimizer."
        )
