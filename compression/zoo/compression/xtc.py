"""XTC: a student with fewer layers and weights of 1 or 2 bits, made in one call.

Wu et al. 2022, "Extreme Compression for Pre-trained Transformers Made Simple and Efficient": layers of a trained
teacher, then binary or ternary weights with inputs of 8 bits, and one stage of distillation from the same teacher.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zoo.compression.compressing import init_compression, redundancy_clean
from zoo.compression.config import ROOT
from zoo.compression.distillation import hidden_loss, logits_loss
from zoo.compression.layer_reduction import layers_of, note_begun

Task = Callable[..., Tensor]


class Student(nn.Module):
    """A model that is trained to give what its teacher gives.

    In training mode ``student(...)`` is the loss of a batch,

        L = T²·KL(teacher, student) of logits + h·Σ_(i,j) mean (s_i - t_j)² of layers [+ a·task],

    all terms from the first step on (one stage); in evaluation mode it is what the model returns. Where there is an
    ``attention_mask`` (B, T), tokens that are 0 in it do not count.

    Attributes:
        module: the model that learns; its parameters are those of this module.
        teacher: in evaluation mode, without gradients; no submodule: it is neither trained, sharded nor saved.
        config: the section ``compression_training``, for an engine, with the rest of a configuration.
    """

    def __init__(
        self, module: nn.Module, teacher: nn.Module, *, layers: str, pairs: Mapping[int, int],
        config: Mapping[str, Any], temperature: float = 1.0, hidden: float = 1.0, task: Task | None = None,
        task_weight: float = 1.0, num_inputs: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.config = module, dict(config)
        self.__dict__["teacher"] = teacher.eval()
        self._layers, self._pairs = layers, dict(pairs)
        self._temperature, self._hidden, self._task, self._task_weight = temperature, hidden, task, task_weight
        self._num_inputs = num_inputs
        note_begun(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss in training mode, else what the model returns."""
        inputs = args[: self._num_inputs]
        if not self.training:
            return self.module(*inputs, **kwargs)
        with _outputs_of(layers_of(self.module, self._layers)) as ours:
            output = self.module(*inputs, **kwargs)
        teacher: nn.Module = self.__dict__["teacher"]
        seen, named = _as_teacher_takes(teacher, (inputs, kwargs))
        with torch.no_grad(), _outputs_of(layers_of(teacher, self._layers)) as theirs:
            told = teacher(*seen, **named)
        found, wanted = _logits_in(output), _logits_in(told).to(_logits_in(output).device)
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        loss = logits_loss(found, wanted, temperature=self._temperature, mask=_if_it_fits(mask, found))
        if self._hidden and self._pairs:
            theirs = [h.to(found.device) for h in theirs]
            loss = loss + self._hidden * hidden_loss(ours, theirs, self._pairs, mask=_if_it_fits(mask, ours[0]))
        if self._task is not None:
            loss = loss + self._task_weight * self._task(output, *args[len(inputs) :])
        return loss

    def clean(self) -> nn.Module:
        """The model alone, with its weights rounded for good (:func:`zoo.compression.redundancy_clean`). Inputs are
        still rounded. After ``engine.destroy()``, where there is an engine."""
        return redundancy_clean(self.module, self.config)


def xtc(
    model: nn.Module, teacher: nn.Module, *, layers: str, teacher_layers: Sequence[int] | None = None, bits: int = 1,
    input_bits: int = 8, modules: Sequence[str] = (), num_groups: int = 1, quantise_from: int = 0,
    temperature: float = 1.0, hidden: float = 1.0, task: Task | None = None, task_weight: float = 1.0,
    num_inputs: int | None = None,
) -> Student:  # fmt: skip
    """Makes a model the student of a teacher, by the recipe of XTC: it begins as some of the teacher's layers, its
    weights have few bits and their inputs 8 for each token, and it is trained to give what the teacher gives.

        student = xtc(model, teacher, layers="encoder.layer")
        # a loop of one's own, with CompressionScheduler(student), or
        engine, *_ = initialize({**document, **student.config}, student)
        ...
        model = student.clean()

    With ``quantise_from`` > 0 it is distilled with exact weights for so many steps first, as in the paper's step I. The
    paper trains for long, with a learning rate that falls to 0: under-trained students are what it warns of.

    Args:
        model: of the teacher's class, with as many layers or fewer; itself changed.
        teacher: trained; put into evaluation mode, and not changed else.
        layers: name of the list of layers, in both: "bert.encoder.layer".
        teacher_layers: of which layers the student's begin as; None: every k-th and the last.
        bits: of weights: 1 binary, 2 ternary, up to 8.
        input_bits: of the inputs of the layers' modules; 32 leaves them alone.
        modules: patterns of further modules whose weights get few bits, such as "word_embeddings" (as in the paper).
        num_groups: groups of a weight, each with a scale.
        quantise_from: steps before it begins.
        temperature: T. hidden: h. task_weight: a.
        task: a loss by labels besides: (what the model returned, what is left of the batch).
        num_inputs: how many of the arguments models take; the rest are for ``task``. None: all.

    Returns:
        The student; everything outside of ``layers`` begins as the teacher's too.

    Raises:
        ValueError: lists of layers that are not there, a student with more layers, or of another width, or with layers
            of the teacher itself, bits out of range, patterns without modules; the model is as it was.
    """
    ours, theirs = len(layers_of(model, layers)), len(layers_of(teacher, layers, who="teacher"))
    kept = set(map(id, teacher.parameters()))
    if any(id(p) in kept for layer in layers_of(model, layers) for p in layer.parameters()):
        raise ValueError(
            f"the student's {layers!r} has weights of the teacher itself, which would get few bits too, so that there "
            "would be nothing to learn. Give a teacher of its own, such as copy.deepcopy(model)."
        )
    if teacher_layers is None:
        if ours > theirs:
            raise ValueError(f"the student's {layers!r} has {ours} layers, the teacher's {theirs}; make it with fewer.")
        teacher_layers = [(i + 1) * theirs // ours - 1 for i in range(ours)]
    if not 1 <= bits <= 8:
        raise ValueError(f"bits = {bits}; 1 is binary, 2 ternary, and 8 the most that the recipe is for.")
    if not temperature > 0 or hidden < 0 or task_weight < 0:
        raise ValueError(
            f"temperature = {temperature}, hidden = {hidden}, task_weight = {task_weight}; the temperature is above 0 "
            "and the weights are 0 or more."
        )
    inside = rf"^{re.escape(layers)}\."
    others, loose = _outside(model, layers)
    shared = {"enabled": True, "schedule_offset": quantise_from}
    few = {"params": {"start_bits": bits, "target_bits": bits}, "modules": [inside, *modules]}
    section: dict[str, Any] = {
        "layer_reduction": {
            "enabled": True, "module_name_prefix": layers, "teacher_layer": list(teacher_layers),
            "other_module_name": others,
        },
        "weight_quantization": {
            "shared_parameters": {**shared, "quantize_weight_in_forward": True, "quantize_groups": num_groups},
            "different_groups": {"xtc": few},
        },
    }  # fmt: skip
    if input_bits < 32:
        section["activation_quantization"] = {
            "shared_parameters": {**shared, "range_calibration": "dynamic"},
            "different_groups": {"xtc": {"params": {"bits": input_bits}, "modules": [inside]}},
        }
    config = {ROOT: section}
    copies = [(model.get_parameter(name), _like(teacher, name, model.get_parameter(name))) for name in loose]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        init_compression(model, config, teacher_model=teacher)
    except BaseException:
        model.load_state_dict(before)
        note_begun(model, False)
        raise
    with torch.no_grad():
        for into, value in copies:
            into.copy_(value)
    return Student(
        model, teacher, layers=layers, pairs=dict(enumerate(teacher_layers)), config=config, temperature=temperature,
        hidden=hidden, task=task, task_weight=task_weight, num_inputs=num_inputs,
    )  # fmt: skip


def _outside(model: nn.Module, layers: str) -> tuple[list[str], list[str]]:
    """What is not in the list of layers: names of modules, and of parameters that the modules around it hold."""
    modules, loose = [], []
    path = layers.split(".")
    for depth in range(len(path)):
        above = ".".join(path[:depth])
        module = model.get_submodule(above)
        dot = f"{above}." if above else ""
        loose += [f"{dot}{name}" for name, p in module._parameters.items() if p is not None]
        modules += [
            f"{dot}{name}" for name, child in module.named_children() if name != path[depth] and child.state_dict()
        ]
    return modules, loose


def _like(teacher: nn.Module, name: str, ours: Tensor) -> Tensor:
    theirs = dict(teacher.named_parameters()).get(name)
    if theirs is None or theirs.shape != ours.shape:
        there = "none" if theirs is None else f"one of shape {tuple(theirs.shape)}"
        raise ValueError(
            f"the student has the parameter {name!r} of shape {tuple(ours.shape)}, and the teacher {there}. A student "
            "has its teacher's width; only layers are fewer."
        )
    return theirs


@contextlib.contextmanager
def _outputs_of(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """What each of these modules returns meanwhile, in order. Hooks are put on last, after those of whoever shards the
    model, and see what leaves it."""
    found: dict[int, Tensor] = {}

    def take(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple | list) else output
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"layer {i} of the list returned a {type(value).__name__}; distillation compares hidden states: a "
                    "tensor, or the first of several."
                )
            found.setdefault(i, value)

        return hook

    handles = [layer.register_forward_hook(take(i)) for i, layer in enumerate(layers)]
    given: list[Tensor] = []
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()
    missing = [i for i in range(len(layers)) if i not in found]
    if missing:
        raise ValueError(f"the forward has not called layer {missing[0]} of the list; hidden states need all of them.")
    given += [found[i] for i in range(len(layers))]


def _logits_in(output: Any) -> Tensor:
    """The logits that a model returned: itself, ``output.logits``, ``output["logits"]``, or the first of several.

    Raises:
        ValueError: there are none.
    """
    found = output
    if isinstance(output, Mapping) and "logits" in output:
        found = output["logits"]
    elif not isinstance(output, Tensor) and getattr(output, "logits", None) is not None:
        found = output.logits
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or not found.dim():
        what = "a scalar" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"a model returned {what}, and distillation compares logits. Let the forwards of both return them: alone, "
            "as .logits, or as the first of a tuple; labels are for task=."
        )
    return found


def _as_teacher_takes(teacher: nn.Module, inputs: Any) -> Any:
    """Inputs on its device and, where they are of floating point, in its dtype; it goes to theirs first."""
    tensors: list[Tensor] = []
    tree_map(lambda v: tensors.append(v) if isinstance(v, Tensor) else None, inputs)
    first = next(teacher.parameters(), None)
    if first is None:
        return inputs
    if tensors and tensors[0].device != first.device:
        teacher.to(tensors[0].device)
    dtype = first.dtype
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)


def _if_it_fits(mask: Tensor | None, value: Tensor) -> Tensor | None:
    """A mask of tokens, where a value has some."""
    return mask if mask is not None and value.dim() > 2 and value.shape[:2] == mask.shape else None
