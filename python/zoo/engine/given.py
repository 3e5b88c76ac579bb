"""What ``initialize`` was given, checked before anything is built of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zoo import parts as protocols
from zoo.registry import Registry

_KINDS = (
    protocols.Prepares, protocols.OnBatch, protocols.OnLoss, protocols.ScalesLr, protocols.BeforeUpdate,
    protocols.AfterUpdate, protocols.GivesMetrics, protocols.HasState, protocols.Closes, protocols.MakesLoader,
)  # fmt: skip
_OF_PARTS = tuple(name for kind in _KINDS for name in vars(kind) if not name.startswith("_"))
"""What has none of these methods takes no part."""
_HELD = frozenset({
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
})  # fmt: skip


def check_given(
    model: Any, *, parts: Any, sinks: Any, loader: Any, collate_fn: Any, params: Any, monitors: Any, required: Any,
    registry: Any,
) -> None:  # fmt: skip
    """Raise ValueError for an argument that cannot be what it should be, by its name."""
    _is("model", model, nn.Module, "the nn.Module to train, on its device")
    _check_wrapped(model)
    _check_shapes(model)
    _is("registry", registry, Registry, "a zoo.registry.Registry")
    _is("monitors", monitors, bool, "True or False")
    if required is not None:
        _is("dist_init_required", required, bool, "True, False or None")
    if collate_fn is not None and not callable(collate_fn):
        raise _wrong("collate_fn", collate_fn, "a callable that makes a batch of a list of samples")
    if params is not None and not isinstance(params, Iterable):
        raise _wrong("model_parameters", params, "parameters, (name, parameter) pairs or groups of them")
    _check_named("parts", parts, _OF_PARTS, "engine parts (zoo.parts)")
    _check_named("sinks", sinks, ("write",), "sinks of records, which have write(record)")
    if loader is not None and not isinstance(loader, Mapping):
        raise _wrong("loader", loader, "further arguments of zoo.engine.ShardedLoader by name")


def _check_wrapped(model: nn.Module) -> None:
    """Raise ValueError for what does an engine's work already, and for what no Python code can watch."""
    for path, module in model.named_modules():
        where = f"initialize got a model {f'whose {path!r} is' if path else 'that is'}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} a ScriptModule of TorchScript: what is done with its parameters cannot be seen. Give "
                "initialize the module that it was made of."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} a DistributedDataParallel, which reduces gradients too. Give initialize the module in it "
                "(.module)."
            )


def _check_shapes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"initialize got a model whose {name!r} has no shape yet, as lazy layers before their first forward: "
                "call the model once on a batch before initialize."
            )


def check_buffers(model: nn.Module) -> None:
    """Raise ValueError for a persistent buffer that no checkpoint can hold: not after hours of training."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                why = _cannot_be_saved(buffer)
                full = f"{path}.{name}" if path else name
                if why:
                    raise ValueError(
                        f"initialize got a model whose buffer {full!r} cannot be saved: {why}. Keep it as a dense "
                        "tensor, or out of checkpoints: register_buffer(name, value, persistent=False)."
                    )


def _cannot_be_saved(buffer: torch.Tensor) -> str:
    if buffer.layout is not torch.strided:
        return f"it is a sparse tensor ({buffer.layout}), and a checkpoint holds dense ones"
    if buffer.dtype in _HELD:
        return ""
    from zoo.checkpointing.format.tensors import CODES, PAIRS  # for few models

    return "" if buffer.dtype in CODES or buffer.dtype in PAIRS else f"no checkpoint holds {buffer.dtype}"


def _wrong(name: str, given: Any, allowed: str) -> ValueError:
    return ValueError(f"initialize got {name}={given!r:.80} ({type(given).__name__}); it takes {allowed}.")


def _is(name: str, given: Any, kind: type, allowed: str) -> None:
    if not isinstance(given, kind):
        raise _wrong(name, given, allowed)


def _check_named(name: str, given: Any, methods: tuple[str, ...], what: str) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise _wrong(name, given, f"{what} by name, {{'mine': ...}}")
    for key, item in given.items():
        if not any(callable(getattr(item, method, None)) for method in methods):
            raise ValueError(
                f"initialize got {name}={{{key!r}: ...}}, a {type(item).__name__} that has none of the methods "
                f"{', '.join(methods)}: it would never be called. {name} are {what}."
            )
