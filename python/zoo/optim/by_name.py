"""What the name of an optimizer means in a configuration: the documented arguments and defaults, in terms of classes.

A ds_config document is read by several systems, so ``{"type": "Adam"}`` means there what is documented for it:
decoupled decay unless ``adam_w_mode`` is false, and no decay unless ``weight_decay`` is given. The classes of
``zoo.optim`` have torch's arguments and defaults instead. Each class here has a ``Config`` with what may be written,
and :meth:`~ByName.stands_for`, which translates it; nothing of it is left when the optimizer runs.

Arguments and defaults are those of the API pages (DeepSpeed's ``FusedAdam``, ``DeepSpeedCPUAdam`` and ``FusedLamb``; of
``DeepSpeedCPUAdagrad`` and ``FusedLion`` those of release 0.19.8), and beside them what torch's class of that name
takes in a document. Names without a class here (SGD, Muon, RMSprop, …) have the arguments of their class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from zoo import optim
from zoo.config import ComponentChoice, Section

_log = logging.getLogger("zoo.optim")

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]
Coefficient = Annotated[float, Field(ge=0)] | None


class StandsFor(NamedTuple):
    """A class, the arguments that it gets beside the parameters, and the norm that gradients are clipped to before each
    step, 0 for none."""

    factory: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    clip_norm: float = 0.0


class ByName:
    """Base: an optimizer as a configuration names it.

    ``registry.build("optimizer", name, config, params=...)`` makes a plain torch optimizer of it. The ZeRO optimizers
    ask :meth:`stands_for`, and build the class on their own tensors.
    """

    Config: ClassVar[type[Any]]

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """What this config comes to."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Any, *, params: Any) -> torch.optim.Optimizer:
        """The optimizer itself, on ``params``."""
        found = cls.stands_for(config)
        optimizer = found.factory(params, **found.options)
        if found.clip_norm:
            optimizer.register_step_pre_hook(_Clip(found.clip_norm))
        return optimizer


class _Clip:
    """Before a step: g ← g · min(c / (‖g‖ + 1e-6), 1) with the norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if clip is not None:  # of what has taken the optimizer over and holds the gradients: only it knows their norm
            clip(self.max_norm)
            return
        scale = abs(float(kwargs.get("grad_scale", 1.0)))  # gradients count so many times in this step
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if scale:
            torch.nn.utils.clip_grad_norm_(params, self.max_norm / scale)


def _no_clipping(value: float, name: str) -> None:
    if value:
        raise ValueError(
            f"max_grad_norm = {value:g} is no option of {name}; write gradient_clipping = {value:g} at the root of the "
            "configuration, which clips the same norm."
        )


def _freed(set_grad_none: bool) -> None:
    if not set_grad_none:
        _log.info(
            "set_grad_none = false changes nothing: gradients are freed after a step, and one that is missing counts "
            "as zero wherever ranks share it."
        )


def _states(config: Any) -> torch.dtype | None:
    return torch.float32 if config.fp32_optimizer_states else None


class _AdamOptions(Section):
    lr: Number = 1e-3
    """Learning rate η."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """β1 and β2, decay of the averages of gradients and of their squares."""
    eps: Number = 1e-8
    """ε, added to the root of the average of squares."""
    weight_decay: Number = 0.0
    """λ: shrinks parameters by the factor 1 - η·λ; see adam_w_mode."""
    bias_correction: bool = True
    """Divide the averages by 1 - β^t."""
    adam_w_mode: bool = Field(default=True, alias="adamw_mode")
    """Decoupled decay (AdamW); if false, λ times the parameter is added to the gradient (Adam)."""
    amsgrad: bool = False
    """Refused, but for torch_adam."""
    fp32_optimizer_states: bool = True
    """Averages in fp32 whatever the parameters have; if false, in the type of the parameters (not fp16)."""
    torch_adam: bool = False
    """Use torch's implementation."""
    maximize: bool = False
    """Step along the gradient, not against it."""
    set_grad_none: bool = True
    """Taken, and without effect: gradients are always freed after a step."""
    foreach: bool | None = None
    """torch's choice of implementation; means nothing without torch_adam."""
    fused: bool | None = None
    """torch's choice of implementation; means nothing without torch_adam."""
    max_grad_norm: Number = 0.0
    """Refused above 0: gradient_clipping is the option."""

    _name: ClassVar[str] = "Adam"

    @model_validator(mode="before")
    @classmethod
    def _one_mode(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and len({given[k] for k in ("adam_w_mode", "adamw_mode") if k in given}) > 1:
            raise ValueError(
                "adam_w_mode and adamw_mode are one option in two spellings, and differ here; leave one out."
            )
        return given

    @model_validator(mode="after")
    def _possible(self) -> _AdamOptions:
        if self.amsgrad and not self.torch_adam:
            raise ValueError(
                f"amsgrad = true: documented as not supported by {self._name}. Leave it out, or set torch_adam = true "
                "for torch's implementation, which has it."
            )
        if self.torch_adam and not (self.bias_correction and self.fp32_optimizer_states):
            off = "bias_correction" if not self.bias_correction else "fp32_optimizer_states"
            raise ValueError(f"{off} = false with torch_adam = true: torch's {self._name} has no such option.")
        _no_clipping(self.max_grad_norm, self._name)
        return self


class Adam(ByName):
    """Stands for :class:`zoo.optim.AdamW`, and for :class:`zoo.optim.Adam` with ``adam_w_mode`` false.

    With ``torch_adam`` for torch's classes of these names, and then too ``weight_decay`` is 0 unless given.
    """

    class Config(_AdamOptions):
        """Adam with decoupled weight decay, or with L2 regularisation if adam_w_mode is false."""

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        _freed(config.set_grad_none)
        options = {key: getattr(config, key) for key in ("lr", "betas", "eps", "weight_decay", "maximize")}
        if config.torch_adam:
            torchs = torch.optim.AdamW if config.adam_w_mode else torch.optim.Adam
            more = {key: getattr(config, key) for key in ("amsgrad", "foreach", "fused")}
            return StandsFor(torchs, {**options, **more})
        factory = optim.AdamW if config.adam_w_mode else optim.Adam
        return StandsFor(
            factory, {**options, "bias_correction": config.bias_correction, "state_dtype": _states(config)}
        )


class AdamW(Adam):
    """As :class:`Adam` here, and always with decoupled decay: ``adam_w_mode`` false changes nothing, and the log says
    so. As in DeepSpeed, where the type decides."""

    class Config(_AdamOptions):
        """Adam with decoupled weight decay."""

        _name: ClassVar[str] = "AdamW"

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        if not config.adam_w_mode:
            _log.warning('adam_w_mode = false changes nothing with the type "AdamW"; the type "Adam" obeys it.')
        return super().stands_for(config.model_copy(update={"adam_w_mode": True}))


class Lamb(ByName):
    """Stands for :class:`zoo.optim.Lamb`, whose own ε is 1e-6.

    ``max_grad_norm`` clips the norm of all gradients before a step; beside gradient_clipping the smaller one counts.
    """

    class Config(Section):
        """LAMB: Adam whose step is scaled for each tensor."""

        lr: Number = 1e-3
        """Learning rate η."""
        betas: tuple[Beta, Beta] = (0.9, 0.999)
        """β1 and β2, decay of the averages of gradients and of their squares."""
        eps: Number = 1e-8
        """ε, added to the root of the average of squares."""
        weight_decay: Number = 0.0
        """λ: times the parameter is added to the direction."""
        bias_correction: bool = True
        """Divide the averages by 1 - β^t."""
        eps_inside_sqrt: bool = False
        """Add ε before the root is taken."""
        max_grad_norm: Number = 0.0
        """Clip the norm of all gradients to this; 0 for no clipping."""
        max_coeff: Coefficient = 10.0
        """Largest factor of a tensor's step; null for none."""
        min_coeff: Coefficient = 0.01
        """Smallest factor of a tensor's step; null for none."""
        maximize: bool = False
        """Step along the gradient, not against it."""
        set_grad_none: bool = True
        """Taken, and without effect: gradients are always freed after a step."""
        amsgrad: bool = False
        """Refused."""

        @model_validator(mode="after")
        def _possible(self) -> Lamb.Config:
            if self.amsgrad:
                raise ValueError("amsgrad = true: documented as not supported by Lamb. Leave it out.")
            if self.min_coeff is not None and self.max_coeff is not None and self.min_coeff > self.max_coeff:
                raise ValueError(f"min_coeff = {self.min_coeff:g} is above max_coeff = {self.max_coeff:g}.")
            return self

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        _freed(config.set_grad_none)
        keys = (
            "lr", "betas", "eps", "weight_decay", "bias_correction", "eps_inside_sqrt", "min_coeff", "max_coeff",
            "maximize",
        )  # fmt: skip
        return StandsFor(optim.Lamb, {key: getattr(config, key) for key in keys}, config.max_grad_norm)


class Lion(ByName):
    """Stands for :class:`zoo.optim.Lion`, whose own defaults are the paper's: η = 1e-4 and β2 = 0.99."""

    class Config(Section):
        """Lion: steps along the sign of a momentum."""

        lr: Number = 1e-3
        """Learning rate η."""
        betas: tuple[Beta, Beta] = (0.9, 0.999)
        """β1 of the direction and β2 of the average of gradients."""
        weight_decay: Number = 0.0
        """λ: shrinks parameters by the factor 1 - η·λ."""
        maximize: bool = False
        """Step along the gradient, not against it."""
        set_grad_none: bool = True
        """Taken, and without effect: gradients are always freed after a step."""
        fp32_optimizer_states: bool = True
        """Averages in fp32 whatever the parameters have; if false, in the type of the parameters (not fp16)."""
        max_grad_norm: Number = 0.0
        """Refused above 0: gradient_clipping is the option."""

        @model_validator(mode="after")
        def _possible(self) -> Lion.Config:
            _no_clipping(self.max_grad_norm, "Lion")
            return self

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        _freed(config.set_grad_none)
        options = {key: getattr(config, key) for key in ("lr", "betas", "weight_decay", "maximize")}
        return StandsFor(optim.Lion, {**options, "state_dtype": _states(config)})


class Adagrad(ByName):
    """Stands for :class:`zoo.optim.Adagrad`; decay is added to the gradient."""

    class Config(Section):
        """Adagrad."""

        lr: Number = 1e-2
        """Learning rate η."""
        eps: Number = 1e-10
        """ε, added to the root of the sum of squares."""
        weight_decay: Number = 0.0
        """λ: times the parameter is added to the gradient."""
        lr_decay: Number = 0.0
        """η is divided by 1 + (t - 1) · lr_decay."""
        initial_accumulator_value: Number = 0.0
        """What the sum of squares begins with."""
        maximize: bool = False
        """Step along the gradient, not against it."""
        set_grad_none: bool = True
        """Taken, and without effect: gradients are always freed after a step."""
        amsgrad: bool = False
        """Refused."""
        fp32_optimizer_states: bool = True
        """The sum in fp32 whatever the parameters have; if false, in the type of the parameters (not fp16)."""
        max_grad_norm: Number = 0.0
        """Refused above 0: gradient_clipping is the option."""

        @model_validator(mode="after")
        def _possible(self) -> Adagrad.Config:
            if self.amsgrad:
                raise ValueError("amsgrad = true: Adagrad's sum of squares never falls. Leave it out.")
            _no_clipping(self.max_grad_norm, "Adagrad")
            return self

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        _freed(config.set_grad_none)
        keys = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")
        return StandsFor(optim.Adagrad, {**{key: getattr(config, key) for key in keys}, "state_dtype": _states(config)})


class Compressor(ComponentChoice):
    """What compresses messages between ranks: a codec that travels in two steps, onebit, blockwise or fp8."""

    kind: ClassVar[str] = "compressor"


class _Compressed(Section):
    lr: Number = 1e-3
    """Learning rate η."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """β1 and β2, decay of the averages of gradients and of their squares."""
    eps: Number = 1e-8
    """ε, added to the root of the average of squares."""
    eps_inside_sqrt: bool = False
    """Add ε before the root is taken."""
    weight_decay: Number = 0.0
    """λ: shrinks parameters by the factor 1 - η·λ."""
    bias_correction: bool = True
    """Divide the averages by 1 - β^t."""
    max_grad_norm: Number = 0.0
    """Clip the norm of all gradients to this; 0 for no clipping."""
    amsgrad: bool = False
    """Refused."""
    cuda_aware: bool = False
    """Taken, and without effect: messages go through torch.distributed, whatever it stands on."""
    comm_backend_name: str = "nccl"
    """Taken, and without effect: the backend is that of the process group."""
    compressor: Compressor | None = None
    """What ranks tell each other is compressed by it; null for signs with a scale for each 2,048 elements."""

    _name: ClassVar[str]

    @model_validator(mode="after")
    def _possible(self) -> _Compressed:
        if self.amsgrad:
            raise ValueError(f"amsgrad = true: documented as not supported by {self._name}. Leave it out.")
        return self


_SHARED = ("lr", "betas", "eps", "eps_inside_sqrt", "weight_decay", "bias_correction")


def _compressed(factory: Callable[..., torch.optim.Optimizer], config: Any, *names: str) -> StandsFor:
    if config.cuda_aware or config.comm_backend_name != "nccl":
        _log.info(
            "cuda_aware and comm_backend_name change nothing: messages go through the process group, whatever it "
            "stands on."
        )
    given = {name: getattr(config, name) for name in (*_SHARED, *names)}
    if config.compressor is not None:
        given["compressor"] = {"type": config.compressor.type, "params": dict(config.compressor.params)}
    return StandsFor(factory, given, config.max_grad_norm)


class OneBitAdam(ByName):
    """Stands for :class:`zoo.optim.OnebitAdam`."""

    class Config(_Compressed):
        """1-bit Adam: after a warm-up the variance is frozen, and momentum travels as signs."""

        freeze_step: Annotated[int, Field(ge=1)] | Literal["auto"] = 100_000
        """Steps of the warm-up, or "auto": until the variance is stable."""

        _name: ClassVar[str] = "OneBitAdam"

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        return _compressed(optim.OnebitAdam, config, "freeze_step")


class ZeroOneAdam(ByName):
    """Stands for :class:`zoo.optim.ZeroOneAdam`."""

    class Config(_Compressed):
        """0/1 Adam: ranks agree on variance and momentum only in some steps, and by signs."""

        var_freeze_step: Annotated[int, Field(ge=1)] = 100_000
        """The last step that may update the variance."""
        var_update_scaler: Annotated[int, Field(ge=1)] = 16
        """κ: after so many updates of the variance their distance doubles."""
        local_step_scaler: Annotated[int, Field(ge=1)] = 32_678
        """After so many steps the distance between steps that agree on a momentum doubles."""
        local_step_clipper: Annotated[int, Field(ge=1)] = 16
        """H, the largest such distance; 1 for no steps by oneself."""

        _name: ClassVar[str] = "ZeroOneAdam"

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        return _compressed(optim.ZeroOneAdam, config, *names)


class OneBitLamb(ByName):
    """Stands for :class:`zoo.optim.OnebitLamb`."""

    class Config(_Compressed):
        """1-bit LAMB: after a warm-up variance and trust ratios are frozen, and momentum travels as signs."""

        freeze_step: Annotated[int, Field(ge=1)] | Literal["auto"] = 100_000
        """Steps of the warm-up, at least 1/(1 - coeff_beta); or "auto": until the variance is stable."""
        max_coeff: Coefficient = 10.0
        """Largest trust ratio of a tensor; null for none."""
        min_coeff: Coefficient = 0.01
        """Smallest trust ratio of a tensor; null for none."""
        coeff_beta: Beta = 0.9
        """β3, decay of the average of trust ratios."""
        factor_max: Annotated[float, Field(gt=0)] = 4.0
        """Largest factor on the frozen trust ratio."""
        factor_min: Annotated[float, Field(gt=0)] = 0.5
        """Smallest factor on the frozen trust ratio."""
        factor_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.1
        """How much the factor may change in a step, as a share of it."""

        _name: ClassVar[str] = "OneBitLamb"

        @model_validator(mode="after")
        def _in_order(self) -> OneBitLamb.Config:
            if self.min_coeff is not None and self.max_coeff is not None and self.min_coeff > self.max_coeff:
                raise ValueError(f"min_coeff = {self.min_coeff:g} is above max_coeff = {self.max_coeff:g}.")
            if self.factor_min > self.factor_max:
                raise ValueError(f"factor_min = {self.factor_min:g} is above factor_max = {self.factor_max:g}.")
            least = 1 / (1 - self.coeff_beta)
            if self.freeze_step != "auto" and least > self.freeze_step + 1e-9:
                raise ValueError(
                    f"freeze_step = {self.freeze_step} with coeff_beta = {self.coeff_beta:g}: the average of trust "
                    f"ratios begins at zero, and takes 1/(1 - coeff_beta) = {least:g} steps."
                )
            return self

    @classmethod
    def stands_for(cls, config: Any) -> StandsFor:
        """As the class says."""
        names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
        return _compressed(optim.OnebitLamb, config, "freeze_step", *names)
