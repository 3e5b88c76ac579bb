"""``Init``: a model that is partitioned while it is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zoo import io
from zoo.comm import Communicator
from zoo.config import read_section
from zoo.config.reading import read_source
from zoo.shard.agreement import check_group
from zoo.shard.config import ZeroConfig
from zoo.shard.init import patching
from zoo.shard.init.materialise import Materialiser
from zoo.shard.init.session import InitReport, Session
from zoo.shard.init.sharing import ParamSwapper, Sharing, Swapped, active
from zoo.shard.offload.config import OffloadParamConfig
from zoo.shard.offload.scratch import NvmeFile, Scratch, handle_of
from zoo.shard.offload.tiers import Tier
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.placements import by_stage, on_tiers

_log = logging.getLogger("zoo.zero")
_TIERS = {"none": Tier.DEVICE, "device": Tier.DEVICE, "cuda": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


class Init:
    """Partitions the parameters of each module as soon as it is built, so that a model is never whole anywhere.

    ::

        with zoo.zero.Init(dtype=torch.bfloat16):
            model = MyLargeModel()
        optimizer = Stage3Optimizer(model, lr=3e-4)

    When the ``__init__`` of a module ends, each parameter that it holds itself is cut into N parts of n elements,
    ceil(numel / N) rounded up to 64; rank r keeps elements [r n, (r + 1) n) and the rest is freed. So a rank holds at
    most one module's own parameters and 1/N of all others. The values of rank 0 count everywhere, as in
    ``ZeroOptimizer``.

    What a parent does to a child's parameters after that (``nn.init``, ``apply``, ``.data.zero_()``, ``copy_``) takes
    effect on every rank: the parameter is made whole for it, and its parts are stored again. :meth:`report` lists it.
    Ties stay ties. What cannot be followed is an error that names the parameter.

    Args:
        module: partition this module, built already (also on the meta device), at once.
        data_parallel_group: the ranks that share the model; None for the default group.
        mem_efficient_linear: accepted, without effect: backward keeps no copy of a gathered weight. Under autocast it
            does; :func:`zoo.zero.memory_efficient_linear` is for that.
        remote_device: where parts live: None or "device" with the parameter, "cpu", "nvme" (needs ``offload_param``
            with nvme_path in the configuration).
        pin_memory: page-lock parts in host memory (with a CUDA device).
        config_dict_or_path, config: a ds_config, its path, or a :class:`~zoo.zero.ZeroConfig`. It gives what is not
            given here: remote_device and pin_memory (offload_param), dtype (bf16, fp16), override_module_apply. Only
            these sections of it are read, and what is "auto" in them has its default: nothing that is made here depends
            on sizes, and whoever makes the optimizer reads the document again.
        enabled: False makes this do nothing, and no other argument is looked at.
        dtype: floating-point parameters are kept in it. A module's own initialisation runs in the dtype it is built in.
        mpu: an object with ``get_data_parallel_group()``, instead of data_parallel_group.
        zero_param_parallel_group: hpZ: the group of L ranks, a part of the data-parallel group (those of a node), over
            which values are split instead, 1/L on each rank, and repeated in every such group. Whatever is gathered is
            gathered within it; nothing but the broadcast of new values leaves it. Groups of one rank or of all are the
            same as none. Until an optimizer takes the model; its own option is zero_hpz_partition_size.
        zero_quantized_weights: what is gathered to be read (:class:`~zoo.zero.GatheredParameters`) travels as int8 with
            a scale for each 256 elements and is rounded by at most max|w|/254 of them. Parts stay exact: an
            initialiser, a ``modifier_rank``, and the optimizer that takes the model get what is kept. The optimizer's
            own option has the same name. Needs zoo-kernels.
        zero_quantized_nontrainable_weights: what does not require a gradient, when its module has been built or at the
            end of the context, is kept as int8 with scales, 1 + 4/256 bytes an element, and gathered so. Needs
            zoo-kernels.
        sequence_data_parallel_group: takes the place of data_parallel_group where sequences are split too.
        param_swapper: keeps the parts instead of files under nvme_path: an object with swap_out, swap_in and drop
            (:class:`~zoo.shard.init.ParamSwapper`). remote_device is "nvme" then, and no path is needed. What ``aio``
            takes is taken here too.
        materialise: called with each module that holds parameters or buffers on the meta device, to initialise them;
            by default their ``reset_parameters()`` is.
        device: where parameters built on the meta device are made; default: the CUDA device with an nccl group, else
            the CPU.
        aio: how to reach NVMe, see ``ZeroOptimizer``.

    A subclass may override :meth:`get_dp_process_group` and :meth:`get_partition_rank`.

    On the meta device (``with torch.device("meta"), Init(): ...``) each module is materialised when it is built.
    Nested contexts: the inner one partitions what is built in it.

    Raises:
        ValueError: arguments that are none, or contradict each other; a module on the meta device that cannot be
            initialised.
        CollectiveMismatchError: ranks build different models, or run different initialisers.
        PartitionedAccessError: an initialiser that cannot be followed.
        NotImplementedError: a dtype that cannot be quantised, where that is asked for.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool | None = None,
        config_dict_or_path: Mapping[str, Any] | ZeroConfig | str | Path | None = None,
        config: Mapping[str, Any] | ZeroConfig | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        *,
        materialise: Callable[[nn.Module], object] | None = None,
        device: torch.device | str | None = None,
        aio: io.AioConfig | io.Handle | None = None,
    ) -> None:
        self._session: Session | None = None
        self._comm: Communicator | None = None
        self._group = _group(data_parallel_group, mpu, sequence_data_parallel_group) if enabled else None
        if not enabled:
            return
        if module is not None and not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise ValueError(f"Init got module={module!r:.80} ({kind}); it takes an nn.Module, or None.")
        dtype = _dtype(dtype)
        zero, configured = _read_config(config_dict_or_path, config)
        swapper, aio = _swapper(param_swapper, aio)
        tier = _tier(remote_device, zero.offload_param, swapper)
        comm = self._communicator()
        pinned = zero.offload_param.pin_memory if pin_memory is None else pin_memory
        scratch = None if tier is Tier.DEVICE else _scratch(aio, pinned=pinned)
        store: NvmeFile | Swapped | None = None
        if scratch is not None and tier is Tier.NVME:
            store = (
                Swapped(swapper)
                if swapper is not None
                else scratch.nvme_file(zero.offload_param.nvme_path, "parameters being made", [])
            )
        check_group(zero_param_parallel_group, name="zero_param_parallel_group")
        axes = axes_of(comm, self.get_partition_rank(), zero_param_parallel_group)
        sharing = Sharing(
            axes=axes,
            placements=on_tiers(by_stage(3, axes), tier, Tier.DEVICE),
            scratch=scratch,
            store=store,
            quantised_reads=zero_quantized_weights,
            quantised_frozen=zero_quantized_nontrainable_weights,
        )
        self._session = Session(
            sharing,
            dtype if dtype is not None else configured,
            Materialiser(_device(device, comm), _function(materialise)),
            override_apply=zero.override_module_apply,
        )
        if module is not None:
            with self:
                self._session.partition(module)
                self._session.give_names([module])

    def get_dp_process_group(self) -> Any:
        """The group of all ranks that share the model; None for the default group.

        A subclass may return another one, in any form that data_parallel_group takes. Asked for once, at construction.
        """
        return self._group

    def get_partition_rank(self) -> int:
        """Which part this rank keeps: k for the elements [k n, (k + 1) n).

        By default its rank in :meth:`get_dp_process_group`. A subclass may number them otherwise: the numbers of all
        ranks must be 0 to N - 1, each once. With zero_param_parallel_group the ranks of each group keep theirs in the
        order of these numbers. Asked for once, by ``Init.__init__``: what the subclass needs for it has to be there
        before ``super().__init__``.
        """
        return self._communicator().rank

    def _communicator(self) -> Communicator:
        if self._comm is None:
            group = self.get_dp_process_group()
            check_group(group, name="data_parallel_group")
            self._comm = group if isinstance(group, Communicator) else Communicator(group)
        return self._comm

    def __enter__(self) -> Init:
        if self._session is not None:
            patching.install()
            active().append(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        if session is None:
            return
        try:
            if kind is None:
                session.finish()
            else:
                session.abandon()
        finally:
            active().remove(session)
            patching.uninstall()
        if kind is None:
            _log.info("%s", session.report())

    def report(self) -> InitReport:
        """What was partitioned, and which initialisers ran on what was partitioned already."""
        if self._session is None:
            return InitReport(0, 0, 0, ())
        return self._session.report()


def _group(data_parallel_group: Any, mpu: Any, sequence_data_parallel_group: Any) -> Any:
    if sequence_data_parallel_group is not None:
        return sequence_data_parallel_group
    if mpu is None:
        return data_parallel_group
    if data_parallel_group is not None:
        raise ValueError("Init got both data_parallel_group and mpu; give one of them.")
    if not callable(getattr(mpu, "get_data_parallel_group", None)):
        raise ValueError(f"Init got mpu={mpu!r}, which has no method get_data_parallel_group().")
    return mpu.get_data_parallel_group()


def _swapper(
    given: Any, aio: io.AioConfig | io.Handle | None
) -> tuple[ParamSwapper | None, io.AioConfig | io.Handle | None]:
    """The swapper, and how to reach NVMe without one."""
    if given is None:
        return None, aio
    if aio is not None:
        raise ValueError("Init got both param_swapper and aio; give one of them.")
    if isinstance(given, (io.AioConfig, io.Handle)):
        return None, given
    missing = [name for name in ("swap_out", "swap_in", "drop") if not callable(getattr(given, name, None))]
    if missing:
        raise ValueError(
            f"Init got param_swapper={given!r}, which has no {', '.join(f'{name}()' for name in missing)}; it takes a "
            "zoo.shard.init.ParamSwapper, a zoo.io.Handle or a zoo.io.AioConfig."
        )
    return given, None


def _scratch(aio: io.AioConfig | io.Handle | None, *, pinned: bool) -> Scratch:
    handle, owned = handle_of(aio)
    return Scratch(handle, owned=owned, pinned=pinned)


def _tier(remote_device: Any, offload: OffloadParamConfig, swapper: ParamSwapper | None) -> Tier:
    """Where parts live."""
    device = remote_device if remote_device is not None else offload.device
    if not isinstance(device, str) or device not in _TIERS:
        raise ValueError(f'Init got remote_device={device!r}; allowed are None, "device", "cpu" and "nvme".')
    tier = _TIERS[device]
    if swapper is not None:
        if remote_device is not None and tier is not Tier.NVME:
            raise ValueError(
                f'Init got param_swapper and remote_device={remote_device!r}; a swapper is for "nvme". Leave one out.'
            )
        return Tier.NVME
    if tier is Tier.NVME and offload.nvme_path is None:
        raise ValueError(
            'Init got remote_device="nvme" and no directory: give config={"zero_optimization": {"stage": 3, '
            '"offload_param": {"device": "nvme", "nvme_path": ...}}}, or a param_swapper.'
        )
    return tier


def _device(given: torch.device | str | None, comm: Communicator) -> torch.device:
    if given is not None:
        try:
            return torch.device(given)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"Init got device={given!r}, which is no device: {error}") from error
    if "nccl" in comm.backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _function(materialise: Any) -> Callable[[nn.Module], object] | None:
    if materialise is not None and not callable(materialise):
        raise ValueError(f"Init got materialise={materialise!r}; it takes a function of a module, or None.")
    return materialise  # type: ignore[no-any-return]


def _dtype(given: Any) -> torch.dtype | None:
    if given is not None and not isinstance(given, torch.dtype):
        raise ValueError(f"Init got dtype={given!r:.80}; it takes a torch.dtype, such as torch.bfloat16, or None.")
    dtype: torch.dtype | None = given
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Init got dtype={dtype}; it must be a floating-point one.")
    return dtype


def _read_config(*given: Mapping[str, Any] | ZeroConfig | str | Path | None) -> tuple[ZeroConfig, torch.dtype | None]:
    found = [g for g in given if g is not None]
    if len(found) > 1:
        raise ValueError("Init got both config_dict_or_path and config; they are two names of one argument.")
    if not found:
        return ZeroConfig(), None
    source = found[0]
    if isinstance(source, ZeroConfig):
        return source, None
    document, where = read_source(source)
    zero = read_section("zero_optimization", document, where=where)
    dtype = None
    for name, meant in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if read_section(name, document, where=where).enabled:
            dtype = meant
    return zero, dtype


def axes_of(comm: Communicator, place: int, group: Any) -> Axes:
    """Which ranks split a value, and which chunk each of them keeps. Collective over ``comm``.

    Args:
        place: the number that this rank gives itself among all ranks.
        group: the ranks that split it, a part of ``comm``; None for all. Its ranks keep chunks in the order of their
            numbers.

    Raises:
        ValueError: on all ranks, unless numbers are 0 to N - 1, each once, and groups cut ``comm`` into equal parts.
    """
    places = _places_of(comm, place)
    shard = _secondary_of(comm, group) or comm
    numbers = [places[comm.ranks.index(rank)] for rank in shard.ranks]
    order = tuple(sorted(numbers).index(number) for number in numbers)
    alone = comm.partition([[rank] for rank in range(comm.size)], name="alone")  # Init reduces nothing
    return Axes(
        world=comm, shard=shard, replicas=alone, local=alone, across=shard,
        places=order if order != tuple(range(shard.size)) else None,
    )  # fmt: skip


def _places_of(comm: Communicator, place: int) -> list[int]:
    places: list[int] = comm.all_gather_object(place)
    if sorted(places) != list(range(comm.size)):
        raise ValueError(
            f"get_partition_rank() gave {', '.join(map(str, places))} on the ranks 0 to {comm.size - 1}; it must give "
            f"each number from 0 to {comm.size - 1} on one rank."
        )
    return places


def _secondary_of(comm: Communicator, group: Any) -> Communicator | None:
    # None where it would change nothing.
    given = None
    if group is not None:
        given = group if isinstance(group, Communicator) else Communicator(group)
    ranks = () if given is None else given.ranks
    outside = [rank for rank in ranks if rank not in comm.ranks]
    # First the ranks tell what they have: those without a group, or with a bad one, must not be waited for.
    sizes: list[int] = comm.all_gather_object(-1 if outside else len(ranks))
    if -1 in sizes:
        told = f"; rank {comm.rank} has the ranks {list(ranks)}" if outside else ""
        raise ValueError(
            f"zero_param_parallel_group must be a part of the data-parallel group, the ranks {list(comm.ranks)}; on "
            f"rank {sizes.index(-1)} it is not{told}."
        )
    if len(set(sizes)) > 1 or (sizes[0] and comm.size % sizes[0]):
        raise ValueError(
            f"zero_param_parallel_group has {', '.join(map(str, sizes))} ranks on the ranks 0 to {comm.size - 1} of "
            "the data-parallel group (0: none given); groups must be of one size, which divides the number of ranks."
        )
    return given if given is not None and 1 < given.size < comm.size else None
