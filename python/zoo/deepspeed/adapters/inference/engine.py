"""``InferenceEngine``: a model that generates, as the ``nn.Module`` that programs of DeepSpeed know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters import asserting, told_as
from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig
from zoo.deepspeed.adapters.inference.fates import check, check_model, check_streamed, is_trained, streams
from zoo.deepspeed.adapters.inference.lengths import Lengths, check_lengths, check_memory
from zoo.deepspeed.adapters.utilities.logs import logger, warning_once
from zoo.parts.hooks import checking_hook
from zoo.tensor.agreement import all_or_none

if TYPE_CHECKING:
    from zoo.inference import Graphs, Streamed
    from zoo.inject import Injection


class _Timer:
    """A hook that changes nothing, so that a forward may be a CUDA graph: the engine times that itself."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *_: Any) -> None:
        self.call()


class InferenceEngine(nn.Module):
    """A module whose one child is ``module``, the model, changed in place: cast, cut over ranks, filled, packed into
    codes, injected, streamed; in this order, and each only where the settings say so. What the engine does not have
    itself is looked up in the model.

    Ranks that share a model go on from the random state of the first one, so that they draw the same tokens.

    The model is put into ``eval()``, unless an engine trains it. Where layers are injected, its
    forwards compute no gradients.

    Args:
        model: the same on all ranks that share it, or on the meta device with a checkpoint.
        config: the settings.

    Attributes:
        module: the model. config: ``config.config``, or the model's configuration. mp_group: the ranks with the other
            parts of it, None for a whole one. mpu: as given.
        injection: which layers have fast forwards, and why others have not; None where none has, or none was asked for.
        not_packed: linear layers that are no codes, and why. streamed: which layers are read from NVMe; None: none.

    Raises:
        ValueError: what cannot work; before anything of the model has changed, but for files that cannot be read, or
            have numbers that codes have not.
    """

    injection: Injection | None
    mp_group: Any
    config: Any

    @asserting
    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if not isinstance(config, DeepSpeedInferenceConfig):
            raise ConfigError(
                f"InferenceEngine(config=...) got a {type(config).__name__}; give it a DeepSpeedInferenceConfig, or "
                "call init_inference, which takes a dict."
            )
        check_model(model, config)
        check(config)
        check_memory(model, _degree(config), 1, config.min_out_tokens)
        self._config, self.mpu, self.mp_group = config, config.tensor_parallel.mpu, None
        self.injection, self._injected = None, False
        self._waits = False  # ranks that are done go on until all are: they have experts of others
        self.injection_dict, self.not_packed = config.injection_policy, dict[str, str]()
        self.model_profile_enabled, self._is_compiled = False, False
        self._model_times: list[float] = []
        self._begun_s, self._hooks = 0.0, list[Any]()
        self.module = model
        if not is_trained(model):
            _make(self)
            model.eval()
        if config.replace_with_kernel_inject:
            self._inject()
        self.streamed = _streamed(model, config) if streams(config) else None
        self._graphs = _graphs(model, config)
        self.training = model.training
        self.config = config.config if config.config is not None else getattr(model, "config", None)

    def _inject(self) -> None:
        """Fast layers, where there are any."""
        from zoo.inject import detach, inject  # zoo-kernels may be missing until somebody wants an engine

        detach(self.module)  # of an earlier engine
        try:
            self.injection = inject(self.module)
        except ValueError as error:
            warning_once(f"replace_with_kernel_inject: {error} The model runs as it is.")
            return
        self._injected = True
        logger.info("replace_with_kernel_inject: %s", self.injection)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if model is None:
                raise
            return getattr(model, name)

    # -- computing ----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """That of the model; without gradients where layers are injected or CUDA graphs are used."""
        if self._graphs is not None:
            return self._replayed(self._graphs, inputs, kwargs)
        with torch.no_grad() if self._injected else nullcontext():
            return self.module(*inputs, **kwargs)

    def _replayed(self, graphs: Graphs, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        timed, self.model_profile_enabled = self.model_profile_enabled, False  # hooks would wait while one records
        try:
            if not timed:
                return graphs(*inputs, **kwargs)
            self._timing_begins()
            found = graphs(*inputs, **kwargs)
            self._timing_ends()
            return found
        finally:
            self.model_profile_enabled = timed

    @property
    def generate(self) -> Callable[..., Any]:
        """That of the model, where it has one. A prompt and what is to be added are at most ``max_out_tokens``; else a
        ValueError, which is a RuntimeError too."""
        own: Any = self.module.generate  # AttributeError, where it has none
        return told_as(RuntimeError)(lambda *args, **kwargs: self._generate(own, args, kwargs))

    def _generate(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = self._config
        lengths = Lengths(config.max_out_tokens, config.min_out_tokens, "init_inference", _degree(config))
        check_lengths(self.module, lengths, args, kwargs)
        if self._waits and "synced_gpus" not in kwargs:
            kwargs["synced_gpus"] = True
        return own(*args, **kwargs)

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """``module.compile()``, once.

        Raises:
            ValueError: torch has no such backend, or no such argument.
        """
        if not self._is_compiled:
            from zoo.compile.config import check_backend, wrong_arguments

            given = {"backend": backend, **(compile_kwargs or {})}
            for wrong in wrong_arguments({key: given[key] for key in given if key != "backend"}, "compile_kwargs"):
                raise ValueError(f"engine.compile(): {wrong}.")
            check_backend(given["backend"], f"engine.compile(backend={given['backend']!r})")
            self.module.compile(**given)
            self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._is_compiled

    def destroy(self) -> None:
        """Take fast layers out again, bring streamed ones back, and stop timing. The model computes as before; parts,
        codes and dtype stay."""
        if self.streamed is not None:
            self.streamed.close()
            self.streamed = None
        self._graphs = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.model_profile_enabled = False
        if self._injected:
            from zoo.inject import detach

            detach(self.module)
            self._injected, self.injection = False, None

    # -- times --------------------------------------------------------------------------------------------------------

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time each forward of the model from now on, those of ``generate`` one by one.

        Args:
            use_cuda_events: says nothing: a device is waited for before and after.
        """
        if self.model_profile_enabled:
            return
        # Of bound methods: a copy of the engine times its own forwards.
        before, after = checking_hook(_Timer(self._before)), checking_hook(_Timer(self._after))
        self._hooks += [self.module.register_forward_pre_hook(before), self.module.register_forward_hook(after)]
        self.model_profile_enabled = True

    def _before(self, *_: Any) -> None:
        if self.model_profile_enabled:
            self._timing_begins()

    def _after(self, *_: Any) -> None:
        if self.model_profile_enabled:
            self._timing_ends()

    def _timing_begins(self) -> None:
        get_accelerator().synchronize()
        self._begun_s = time.perf_counter()

    def _timing_ends(self) -> None:
        get_accelerator().synchronize()
        self._model_times.append((time.perf_counter() - self._begun_s) * 1e3)

    @asserting
    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the latest call of this.

        Raises:
            ConfigError: :meth:`profile_model_time` was not called.
        """
        if not self.model_profile_enabled:
            raise ConfigError("model profiling is not enabled: call profile_model_time() before the forwards.")
        found, self._model_times = self._model_times, []
        return found


def _degree(config: DeepSpeedInferenceConfig) -> int:
    return config.tensor_parallel.tp_size if config.tensor_parallel.enabled else 1


def _streamed(model: nn.Module, config: DeepSpeedInferenceConfig) -> Streamed:
    """``max_in_cpu`` numbers stay in memory, and two buffers; at most all of them."""
    from zoo.inference import layer_bytes, stream

    offload: Any = config.zero.offload_param
    sizes = layer_bytes(model)
    each = 1 if config.dtype is torch.int8 else config.dtype.itemsize
    return stream(model, offload.nvme_path, budget_bytes=offload.max_in_cpu * each + 2 * max(sizes.values()))


def _graphs(model: nn.Module, config: DeepSpeedInferenceConfig) -> Graphs | None:
    """CUDA graphs of forwards, where the settings ask for them and there is CUDA."""
    if not config.enable_cuda_graph or not get_accelerator().device_name().startswith("cuda"):
        return None
    from zoo.inference import Graphs

    return Graphs(model)


def _make(engine: InferenceEngine) -> None:
    """Everything but fast layers. Collective over the ranks that share the model."""
    from zoo.deepspeed.adapters.inference import codes, ranks, weights
    from zoo.inject import detach

    model, config = engine.module, engine._config
    if config.replace_with_kernel_inject or config.dtype is torch.int8 or config.quant.weight.post_init_quant:
        detach(model)  # of an earlier engine: a head that is injected is not packed
    comm = ranks.ranks_of(config)

    def prepared() -> tuple[Any, Any, bool, Any]:
        files = weights.files_of(config)
        _check_meta(model, config, files)
        packings = codes.decided(model, config, filled=files is not None or config.set_empty_params)
        if streams(config):
            check_streamed(model, config)
        is_whole = not ranks.is_cut(model, comm)
        degree = comm.size if comm is not None else 2 if files is not None and files.in_parts else 1
        return files, packings, is_whole, ranks.plan_for(model, config, degree) if is_whole else None

    said = {"dtype": str(config.dtype), "replace_with_kernel_inject": config.replace_with_kernel_inject}
    files, packings, whole, plan = all_or_none(comm, "preparing a model for inference", prepared, lambda _: said)
    with ExitStack() as stack:
        source = all_or_none(
            comm, "opening a checkpoint",
            lambda: None if files is None else stack.enter_context(weights.opened(files, model, plan)),
        )  # fmt: skip
        if comm is not None and whole:
            ranks.cut(model, plan, comm, config.tensor_parallel.tp_grain_size)
        engine._waits = ranks.share_experts(model, config)
        _cast(model, config.dtype)
        if source is not None:
            weights.load(model, source, comm)
    device = torch.device("cpu" if config.keep_module_on_host else get_accelerator().current_device_name())
    if any(p.is_meta for p in model.parameters()):
        warning_once("init_inference(set_empty_params=True): parameters have memory, and values that nobody has set.")
        weights.give_memory(model, device)
    elif not config.keep_module_on_host:
        model.to(device)
    folder = config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path
    if folder:
        weights.write(model, folder, comm)
    engine.not_packed = all_or_none(comm, "packing weights", lambda: codes.pack(model, config, packings))
    if comm is not None:
        ranks.draw_alike(comm)
        engine.mp_group = comm.group if comm.group is not None else torch.distributed.group.WORLD


def _check_meta(model: nn.Module, config: DeepSpeedInferenceConfig, files: Any) -> None:
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty and files is None and not config.set_empty_params:
        raise ConfigError(
            f"the model has {len(empty)} parameters on the meta device, {empty[0]} among them, and no checkpoint= says "
            "where their values are. Give one, or set_empty_params=True for memory with any values."
        )
    if config.save_mp_checkpoint_path and config.checkpoint_config.save_mp_checkpoint_path not in (
        None, config.save_mp_checkpoint_path,
    ):  # fmt: skip
        raise ConfigError("save_mp_checkpoint_path and checkpoint_config.save_mp_checkpoint_path differ; keep one.")


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters, and buffers that a state_dict has. Others, such as angles of rotary positions, stay as they are."""
    if dtype is torch.int8:
        return
    if dtype is torch.float16 and get_accelerator().device_name().startswith("cpu"):
        warning_once(
            "init_inference: dtype is float16, DeepSpeed's default, which CPUs compute slowly; the model is converted "
            "to it. dtype=torch.float32 and torch.bfloat16 are faster here."
        )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            kept = name not in module._non_persistent_buffers_set
            if kept and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
