"""Units that are zero go away: rows of the layer, columns of those that take them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.compression.attach import attached_to, class_of
from zoo.compression.pruning.flow import Flow, Unknown, follow
from zoo.compression.pruning.modules import inputs_of, is_convolution, is_plain, is_transposed_linear, out_dim_of
from zoo.compression.pruning.relations import Relation, modules_of
from zoo.layout import split_of
from zoo.parts import has_user_hooks

_log = logging.getLogger("zoo.compression")


def remove_units(model: nn.Module, relation: Relation) -> int:
    """Take away the units of one layer that are zero, as far as they can be; outputs of the model stay.

    What a removed unit gives, c, goes into the bias of the layers that take it: b ← b + Σ_u W[:, u]·c_u. A unit stays
    where its c is not known, or where a convolution pads with zeros and c is not zero.

    Returns:
        how many went. Of what stays, the log says why.
    """
    if not relation.related:
        return 0
    modules = modules_of(model)
    pruned, related = modules[relation.name], [modules[name] for name in relation.related]
    try:
        check_whole([pruned, *related])
        flow = _followed(model, modules, relation, pruned, related)
        check_own(model, [*flow.sources, *flow.norms, *(module for module, _ in flow.takers)])
        goes = _removable(flow)
    except Unknown as why:
        _log.warning("%s: the units of %r stay, as zeros: %s", relation.where, relation.name, why)
        return 0
    masked = _zero_rows(pruned)
    if int((masked & ~goes).sum()):
        _log.warning(
            "%s: %d of the %d units of %r that are zero stay: what they give is no constant that a bias could take",
            relation.where, int((masked & ~goes).sum()), int(masked.sum()), relation.name,
        )  # fmt: skip
    if not goes.numel():
        return 0
    if bool(goes.all()):
        goes = goes.clone()
        goes[0] = False  # a layer without units is none
    _cut(flow, goes)
    return int(goes.sum())


def _followed(
    model: nn.Module, modules: dict[str, nn.Module], relation: Relation, pruned: nn.Module,
    related: Sequence[nn.Module],
) -> Flow:  # fmt: skip
    """Through the smallest module around all of them that can be traced."""
    paths = [name.split(".") for name in (relation.name, *relation.related)]
    common: list[str] = []
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    why: Unknown | None = None
    for size in range(len(common), -1, -1):
        root = modules[".".join(common[:size])]
        if type(root).forward is nn.Module.forward or isinstance(root, (nn.ModuleList, nn.ModuleDict)):
            continue
        try:
            return follow(root, pruned, related)
        except Unknown as error:
            why = why or error
    raise why or Unknown("no module around it has a forward")


def check_whole(layers: Sequence[nn.Module]) -> None:
    """Raise Unknown where other ranks have parts of what would be cut, or have it too."""
    for module in layers:
        for parameter in module.parameters():
            split = split_of(parameter)
            if split.axes and split.shape is not None:
                raise Unknown(
                    f"a weight of a {class_of(module).__name__} is split along the mesh axes {', '.join(split.axes)}; "
                    "bring the whole model to one process to take units away"
                )
            if split.tied:
                raise Unknown(f"a weight of a {class_of(module).__name__} is tied to one of another stage")


def check_own(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise Unknown where somebody else uses what would be cut."""
    paths = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    modules = list(model.modules())
    for module in layers:
        name = class_of(module).__name__
        if paths.count(id(module)) > 1:
            raise Unknown(f"a {name} is in the model under several names")
        if "weight" in dir(module) and not _owns_weight(module):
            raise Unknown(f"a {name} has no weight of its own (torch.nn.utils.parametrize takes it away)")
        for parameter in module._parameters.values():
            holders = [m for m in modules if any(p is parameter for p in m._parameters.values())]
            if parameter is not None and len(holders) > 1:
                raise Unknown(f"a weight of a {name} is tied to one of another module")
        if has_user_hooks(module):
            raise Unknown(f"a {name} has hooks, which may see and change the units")
        if not is_plain(module) and not isinstance(module, nn.MultiheadAttention):
            raise Unknown(f"a {name} has a forward of its own")
        if is_convolution(module) and module.groups > 1:
            raise Unknown(f"a {name} has {module.groups} groups")


def _owns_weight(module: nn.Module) -> bool:
    return module._parameters.get("weight") is not None or getattr(module, "affine", True) is False


def _zero_rows(module: nn.Module) -> Tensor:
    weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
    return (weight.detach().movedim(out_dim_of(module), 0).flatten(1) == 0).all(1).cpu()


def _removable(flow: Flow) -> Tensor:
    """(U,) bool."""
    goes = torch.ones_like(flow.takers[0][1], dtype=torch.bool)
    seen: dict[int, Tensor] = {}
    for module, constant in flow.takers:
        goes &= ~constant.isnan()
        inputs = attached_to(module).get(("input", ""), ())
        if not _folds(module) or inputs:
            goes &= constant == 0
        if any(not transform.keeps_zero for transform in inputs):
            raise Unknown(f"the input of a related {class_of(module).__name__} is quantised, and zero is not zero then")
        goes &= seen.setdefault(id(module), constant).eq(constant)
    for module in flow.sources:
        if ("output", "") in attached_to(module):
            raise Unknown("its output has a transform")
    return goes


def _folds(module: nn.Module) -> bool:
    """Whether a constant input is a constant output, the same everywhere."""
    if not is_convolution(module):
        return True
    padding: Any = module.padding
    padded = padding != "valid" if isinstance(padding, str) else any(padding)
    return not module.transposed and (not padded or module.padding_mode != "zeros")


def _cut(flow: Flow, goes: Tensor) -> None:
    stays = (~goes).nonzero().squeeze(1)
    done: set[int] = set()
    for module, constant in flow.takers:
        if id(module) in done:
            continue
        done.add(id(module))
        block = inputs_of(module) // goes.numel()
        _fold(module, torch.where(goes, constant, 0.0), block)
        columns = (stays[:, None] * block + torch.arange(block)).reshape(-1)
        cut_inputs(module, columns)
    for module in flow.sources:
        cut_outputs(module, stays)
    for norm in flow.norms:
        _cut_norm(norm, stays)


def _fold(module: Any, constant: Tensor, block: int) -> None:
    """b ← b + W·c; a layer without a bias gets one where that is not zero."""
    if not bool((constant != 0).any()):
        return
    weight: Tensor = module.weight.detach()
    matrix = weight.double().movedim(out_dim_of(module), 0).flatten(2).sum(2) if weight.dim() > 2 else weight.double()
    matrix = matrix.t() if is_transposed_linear(module) else matrix
    added = (matrix @ constant.repeat_interleave(block).to(weight.device)).to(weight.dtype)
    if module.bias is None:
        module.bias = nn.Parameter(added, requires_grad=module.weight.requires_grad)
    else:
        replace(module, "bias", module.bias.detach() + added.to(module.bias.dtype))


def cut_outputs(module: Any, stays: Tensor) -> None:
    """Leave these outputs of a linear layer or convolution."""
    replace(module, "weight", module.weight.detach().index_select(out_dim_of(module), stays.to(module.weight.device)))
    if module.bias is not None:
        replace(module, "bias", module.bias.detach().index_select(0, stays.to(module.bias.device)))
    for name in ("out_features", "out_channels", "nf"):
        if hasattr(module, name):
            setattr(module, name, len(stays))


def cut_inputs(module: Any, stays: Tensor) -> None:
    """Leave these inputs of a linear layer or convolution."""
    dim = 1 - out_dim_of(module)
    replace(module, "weight", module.weight.detach().index_select(dim, stays.to(module.weight.device)))
    for name in ("in_features", "in_channels", "nx"):
        if hasattr(module, name):
            setattr(module, name, len(stays))


def _cut_norm(module: Any, stays: Tensor) -> None:
    for name in ("weight", "bias"):
        if module._parameters.get(name) is not None:
            replace(module, name, module._parameters[name].detach().index_select(0, stays.to(module.weight.device)))
    for name in ("running_mean", "running_var"):
        buffer = module._buffers.get(name)
        if buffer is not None:
            module._buffers[name] = buffer.index_select(0, stays.to(buffer.device))
    module.num_features = len(stays)


def replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Another parameter in the place of one."""
    old: Any = module._parameters[name]
    module._parameters[name] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
