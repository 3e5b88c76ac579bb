"""``parallelise``: the mixtures that transformers ships, with grouped experts and expert parallelism."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from zoo.layout import enter_mesh
from zoo.moe.dispatch import place_of_rank
from zoo.moe.experts.base import AXIS
from zoo.moe.huggingface import adapters
from zoo.moe.huggingface.experts import ParallelExperts, convert
from zoo.moe.huggingface.presets import PRESETS, ExpertsPreset, preset_of


def parallelise(
    model: nn.Module, *, ep_size: int = 1, mesh: Any = None, presets: Iterable[ExpertsPreset] = (),
    modules: Sequence[str] = ("*",), chunks: int = 1, bias_speed: float = 0.0,
) -> nn.Module:  # fmt: skip
    """Give the experts of a Hugging Face model a forward that sorts tokens by expert, multiplies group by group and
    drops none; with ``ep_size`` > 1 each rank keeps E / ep_size experts of each layer, and tokens travel to them.

    In place, before there is an optimizer. Everything but the experts' forward stays: routers, shared experts, what
    blocks return, ``output_router_logits`` and the model's own router losses, LoRA on experts. Parameters keep their
    names and layout; at ep_size 1 they are the same tensors. Of more ranks each has consecutive experts, and
    ``load_state_dict`` takes its own ones out of a state dict of the whole model;
    :func:`~zoo.moe.whole_state_dict` gives one back. On ``meta`` it works as well, and so before weights are loaded.

    Args:
        model: known are Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3 (``zoo.moe.PRESETS``), and those
            whose experts say of themselves how they are laid out, as most of transformers do from version 5 on.
        ep_size: ranks that share the experts; divides the number of experts.
        mesh: a DeviceMesh with an axis "expert" of that size. The model is told of it; without one, consecutive ranks
            share the experts, and the mesh comes with the ZeRO optimizer, ``initialize`` or ``zoo.moe.use_mesh``.
        presets: descriptions of further modules; they go before the known ones.
        modules: patterns (``fnmatch``) of paths of experts; others stay as they are.
        chunks: into how many groups a rank's experts are cut, of which one computes while the next one's tokens come.
        bias_speed: by how much the bias that balances the load moves after a step (DeepSeek-AI 2024, "DeepSeek-V3",
            section 2.1.2); 0 leaves it alone. Layers without such a bias have none to move.

    Returns:
        ``model``.

    Raises:
        ValueError: no experts were found, or they do not fit their description or ``ep_size``; nothing was changed
            then but for layers before the one that does not fit.
    """
    if ep_size < 1 or not bias_speed >= 0:
        raise ValueError(f"ep_size={ep_size} and bias_speed={bias_speed}; at least 1, and not negative.")
    rank = place_of_rank(ep_size) if mesh is None else _place(mesh, ep_size)
    found = experts_of(model, presets, modules)
    if not found:
        known = ", ".join(preset.experts for preset in _known(presets))
        raise ValueError(
            f"no experts were found in {type(model).__name__}; known are {known} and those that transformers describes "
            "from version 5 on. Give others in presets=(zoo.moe.ExpertsPreset(...),)."
        )
    around = {id(child): parent for parent in model.modules() for child in parent.children()}
    for path, module, preset in found:
        if isinstance(module, ParallelExperts):
            _check_again(path, module, ep_size, chunks)
            continue
        _check_plain(path, module)
        parent = around.get(id(module), module)
        while adapters.is_wrapper(parent):
            parent = around[id(parent)]
        convert(module, preset, parent, ep_size=ep_size, ep_rank=rank, chunks=chunks, bias_speed=bias_speed)
    adapters.adopt(model)
    if mesh is not None:
        enter_mesh(model, mesh)
    return model


def experts_of(
    model: nn.Module, presets: Iterable[ExpertsPreset] = (), modules: Sequence[str] = ("*",)
) -> list[tuple[str, nn.Module, ExpertsPreset]]:
    """Path, module and description of all that :func:`parallelise` converts or has converted."""
    if isinstance(modules, str):
        raise ValueError(f"modules={modules!r}; it is a sequence of patterns: ({modules!r},).")
    known = _known(presets)
    found = []
    for path, module in model.named_modules():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in modules):
            preset = module._preset if isinstance(module, ParallelExperts) else preset_of(module, known)
            found += [] if preset is None else [(path, module, preset)]
    return found


def _known(presets: Iterable[ExpertsPreset]) -> tuple[ExpertsPreset, ...]:
    given = tuple(presets)
    return (*given, *(preset for preset in PRESETS if preset.experts not in {p.experts for p in given}))


def _place(mesh: Any, ep_size: int) -> int:
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if sizes.get(AXIS, 1) != ep_size:
        raise ValueError(
            f"ep_size={ep_size} and a mesh of the axes {sizes}; it needs the axis {AXIS!r} of that size: "
            f"init_device_mesh(..., mesh_dim_names=('data', {AXIS!r}))."
        )
    return int(mesh.get_local_rank(AXIS)) if AXIS in sizes else 0


def _check_again(path: str, module: ParallelExperts, ep_size: int, chunks: int) -> None:
    if (module.ep_size, module.chunks) != (ep_size, chunks):
        raise ValueError(
            f"{path} is parallel already, with ep_size={module.ep_size} and chunks={module.chunks}; now "
            f"ep_size={ep_size} and chunks={chunks} are asked for. Parallelise a model once."
        )


def _check_plain(path: str, module: nn.Module) -> None:
    """Raise ValueError for parameters that somebody else has split."""
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{path}.{name} is a {type(parameter).__name__}, which is split already; parallelise comes before "
                "zoo.zero.Init, ZeRO optimizers and the tensor parallelism of transformers."
            )
