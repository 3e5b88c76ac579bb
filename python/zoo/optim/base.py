"""What the optimizers share: options, states and masters, the step, and saving."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zoo.kernels.update import Scalars, Settings, update_, update_scalars_
from zoo.optim.plan import Batch, Plan, State, States, Watch

Tensor = torch.Tensor
LOW = (torch.bfloat16, torch.float16)


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose update of an element looks at that element only: p' = δ·p - η·D(S(s, g)).

    A subclass says which states it keeps (:meth:`state_names`) and gives its options as the kernels take them
    (:meth:`settings`); see ``zoo.kernels.update``. The arguments ``foreach`` and ``fused`` of torch choose between
    torch's implementations; here there is one, so they are taken and mean nothing.

    With the option ``capturable`` of a group nothing of a step is known to the host alone: the number of steps taken is
    on the device, and so may be the learning rate (a tensor in the group), ``grad_scale`` and whether the step is to
    change anything. So nothing waits for the device, and a step may be captured in a CUDA graph, after one outside of
    it that makes the states. Where all groups are capturable, ``torch.amp.GradScaler`` hands its scale and what it
    found over by the attributes ``grad_scale`` (gradients are so many times too large) and ``found_inf`` (where it is
    not 0 the step changes nothing, and does not count). The bits are those of a step with the same numbers on the host.

    Args:
        params: as for ``torch.optim``: parameters, or groups of them with options of their own.
        defaults: options of the groups.
        master_dtype: ``torch.float32`` gives a bf16 or fp16 parameter a master copy of that dtype among its states
            (``state["master"]``), which is what is updated; the parameter gets its rounded value in the same pass.
            What is written to the parameter between two steps counts, but for a write past autograd, as by
            ``p.data.copy_()``. None: the parameter itself is updated, with rounding in every step.
        state_dtype: dtype of the other states, fp32 or bf16; None: that of the parameter, which cannot be fp16 then.

    Raises:
        ValueError: options that cannot work, gradients that are sparse; the message has the numbers.
    """

    keeps_masters = True
    """It takes 16-bit parameters with their gradients, and :meth:`step` has ``grad_scale``."""

    takes_writes = True
    """What is written to a 16-bit parameter between two steps reaches its master. False: somebody else sees to that."""

    needs_whole_tensors = False
    """Whether the update of an element looks at other elements of its tensor; see ``zoo.optim.whole``."""

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, master_dtype: torch.dtype | None = torch.float32,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:  # fmt: skip
        if master_dtype not in (None, torch.float32):
            raise ValueError(f"master_dtype={master_dtype}; it must be torch.float32, or None for no master.")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"state_dtype={state_dtype}; it must be torch.float32, torch.bfloat16, or None for the parameter's."
            )
        self.master_dtype, self.state_dtype = master_dtype, state_dtype
        self._forget()
        super().__init__(params, defaults)
        self._watch_states()

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states with an element for each of the parameter's."""
        raise NotImplementedError

    def settings(self, group: dict[str, Any], lr: float) -> Settings:
        """The rule and the options of this group; ``lr``: its learning rate, a NaN where only the device knows it."""
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks: whether a step looks at the attributes ``grad_scale`` and ``found_inf``."""
        return all(group.get("capturable") for group in self.param_groups)

    def initial(self, group: dict[str, Any], name: str) -> float:
        """The value that a new state is filled with."""
        return 0.0

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | Tensor = 1.0) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again, as in torch; its result is returned.
            grad_scale: gradients count ``grad_scale`` times: 1/loss_scale, or a clipping factor, at no cost. A tensor
                of one element is waited for, unless the group is ``capturable``. (The attribute of this name, which is
                GradScaler's, divides.)

        Raises:
            ValueError: the attribute ``found_inf`` or ``grad_scale`` is set, and a group is not ``capturable``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._watch_states()
        for index, group in enumerate(self.param_groups):
            params = group["params"]
            if not params:
                continue
            self._check_given(group)
            key = (index, id(params[0]), len(params))
            batches = self._plan(key, group, params).batches
            for done, batch in enumerate(batches):
                if not self._step_batch(group, batch, grad_scale):
                    # A gradient is gone, or is another one than those that the plan was made for.
                    del self._plans[key]
                    left = [p for later in batches[done:] for p in later.params]
                    for again in self._make_plan(group, left).batches:
                        self._step_batch(group, again, grad_scale, strict=True)
                    break
        return loss

    def _check_given(self, group: dict[str, Any]) -> None:
        for name in ("found_inf", "grad_scale"):
            if getattr(self, name, None) is not None and not group.get("capturable"):
                raise ValueError(
                    f"the attribute {name} is set, and a parameter group is not capturable: it counts its steps on the "
                    f"host. Construct {type(self).__name__} with capturable=True, or leave the attribute out."
                )

    def _step_batch(
        self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor, *, strict: bool = False
    ) -> bool:
        """Whether it could be done as planned; otherwise nothing was changed."""
        if self.takes_writes:
            batch.take_writes()
        try:
            if not self._update(group, batch, -grad_scale if group.get("maximize") else grad_scale):
                return False
        except ValueError:
            if strict:
                raise
            return False
        batch.count()
        if self.takes_writes and not self.needs_whole_tensors:
            batch.note_writes()
        return True

    def _update(self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor) -> bool:
        prepared = batch.prepare()
        if prepared is not None:
            settings = self.settings(group, float(group["lr"]))
            numbers = settings.values(float(grad_scale))
            return prepared.update(int(settings.rule), int(settings.flags), numbers, batch.step + 1)
        if any(p.grad is None for p in batch.params):
            return False
        with self._scalars(group, batch, grad_scale) as (settings, scalars):
            params, grads, states, masters = flattened(batch)
            update_(settings.rule, settings.flags, params, grads, states, masters, scalars=scalars)
        return True

    @contextlib.contextmanager
    def _scalars(
        self, group: dict[str, Any], batch: Batch, grad_scale: float | Tensor
    ) -> Iterator[tuple[Settings, Scalars | Tensor]]:
        """Those of the next step; one that is counted on the device counts from here on, unless the block fails."""
        lr, device = group["lr"], batch.packed.device
        if not batch.on_device:
            settings = self.settings(group, float(lr))
            yield settings, settings.at(batch.step + 1, grad_scale=float(grad_scale))
            return
        there = lr if isinstance(lr, Tensor) and lr.device == device else None
        settings = self.settings(group, float(lr) if there is None else math.nan)
        given = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        loss_scale, found_inf = (t if t is None else t.to(device, non_blocking=True) for t in given.values())
        factor, number = (grad_scale, 1.0) if isinstance(grad_scale, Tensor) else (None, grad_scale)
        scalars = update_scalars_(
            settings, batch.packed, lr=there, grad_scale=number, device_grad_scale=factor, loss_scale=loss_scale,
            found_inf=found_inf,
        )  # fmt: skip
        try:
            yield settings, scalars
        except ValueError:
            batch.packed -= (1.0 - scalars[-1]).float()
            raise

    # Plans -----------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._watch = Watch()

    def _watch_states(self) -> None:
        states = self.state
        if not isinstance(states, States) or states.watch is not self._watch:
            self._forget()
            self.state = States(self._watch, states)

    def _plan(self, key: tuple[int, int, int], group: dict[str, Any], params: list[Tensor]) -> Plan:
        # ZeRO swaps the list of a group within a step, piece by piece: a plan is kept for each list.
        plan = self._plans.get(key)
        if plan is None or not plan.fits(params, on_device=bool(group.get("capturable"))):
            plan = self._plans[key] = self._make_plan(group, params)
        return plan

    def _make_plan(self, group: dict[str, Any], params: list[Tensor]) -> Plan:
        names = self.state_names(group)
        batches: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            if p.grad is None:
                continue
            check_layout(p)
            self._make_states(group, p, names)
            plain = p.is_contiguous() and p.grad.is_contiguous()
            key = (p.dtype, p.grad.dtype, p.device, int(self.state[p]["step"]), plain, self._kind(p))
            batches.setdefault(key, []).append(p)
        made, on_device = [], bool(group.get("capturable"))
        for (dtype, _, device, step, plain, _), members in batches.items():
            dicts = [self.state[p] for p in members]
            names_here = self._names_of(members[0], names)
            batch = Batch(members, dicts, names_here, step, device if on_device else None)
            batch.may_prepare = not on_device and plain and device.type == "cpu" and dtype is not torch.float64
            made.append(batch)
        return Plan(list(params), [p for p in params if p.grad is None], made, on_device=on_device)

    def _kind(self, p: Tensor) -> Any:
        """Parameters of one kind, with as many steps, can be updated by one call."""
        return None

    def _names_of(self, p: Tensor, names: tuple[str, ...]) -> tuple[str, ...]:
        """``names`` of states, and "master" where ``p`` has one."""
        return names + ("master",) * (p.dtype in LOW and self.master_dtype is not None)

    def _make_states(self, group: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> None:
        state = self.state.get(p, {})
        if not isinstance(state, State) or state.watch is not self._watch:
            state = State(self._watch, state)
            States.put(self.state, p, state)
        if "step" not in state:
            state.put("step", torch.tensor(0.0))
        dtype = self._dtype_of_states(p)
        for name in names:
            if name not in state:
                state.put(name, torch.full_like(p, self.initial(group, name), dtype=dtype, requires_grad=False))
        if p.dtype in LOW and self.master_dtype is not None:
            if "master" not in state:
                state.put("master", p.detach().to(self.master_dtype, copy=True))
            names = (*names, "master")
        for name in names:  # elements of equal place in memory belong together
            old = state[name]
            if old.stride() != p.stride() and old.shape == p.shape:
                state.put(name, torch.empty_like(p, dtype=old.dtype, requires_grad=False).copy_(old))

    def _dtype_of_states(self, p: Tensor) -> torch.dtype:
        if p.dtype is torch.float64 or (self.state_dtype is None and p.dtype is not torch.float16):
            return p.dtype
        if self.state_dtype is None:
            raise ValueError(
                f"state_dtype=None and an fp16 parameter of shape {tuple(p.shape)}: squares of gradients below 2e-4 "
                "are 0 in fp16. Keep states in torch.float32 (fp32_optimizer_states in a configuration), or use bf16."
            )
        return self.state_dtype

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        add_group(self, param_group)

    # State -----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but states keep the dtype that they were saved in, and become copies.

        torch casts states to the dtype of their parameter, which would round the masters and moments of bf16 ones.
        """
        super().load_state_dict(state_dict)
        saved_ids = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        for key, p in zip(saved_ids, self._all_params(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    device = value.device if name == "step" else p.device
                    self.state[p][name] = value.detach().to(device, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """As in torch: plain dictionaries of the live tensors."""
        found = super().state_dict()
        return {**found, "state": {key: dict(state) for key, state in found["state"].items()}}

    def _all_params(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_dtype": self.master_dtype, "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._watch_states()


def check_layout(p: Tensor) -> None:
    """Raise ValueError for a parameter or a gradient that no dense update can take."""
    if not in_memory_order(p).is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}, with gaps or overlaps in memory; make it "
            "a tensor of its own (.contiguous())."
        )
    if p.grad is not None and p.grad.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has a {p.grad.layout} gradient; use dense gradients "
            "(torch.nn.Embedding(sparse=False)) or torch.optim.SparseAdam."
        )


def flattened(batch: Batch) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Parameters, gradients, states and masters as one-dimensional views in the order of the parameter's memory.

    Elements of equal index belong together then, also for layouts such as channels_last. Whatever lies otherwise than
    its parameter is copied into a contiguous tensor: fine for gradients; states are made like their parameters.
    """
    params = [flat(p, p) for p in batch.params]
    grads = [flat(p.grad, p) for p in batch.params if p.grad is not None]
    states = [[flat(s, p) for s, p in zip(x, batch.params, strict=True)] for x in batch.states()]
    return params, grads, states, [flat(m, p) for m, p in zip(batch.masters(), batch.params, strict=False)]


def flat(t: Tensor, like: Tensor) -> Tensor:
    """``t`` in one dimension, in the order of the memory of ``like``; a view where both lie alike and densely."""
    t = t.detach()
    if t.stride() == like.stride() or (t.is_contiguous() and like.is_contiguous()):
        return in_memory_order(t).view(-1)
    moved = torch.empty_like(like, dtype=t.dtype, requires_grad=False)
    return in_memory_order(moved.copy_(t)).view(-1)


def in_memory_order(t: Tensor) -> Tensor:
    """``t`` with its dims permuted so that strides fall: contiguous if it is dense in some order."""
    strides, sizes = t.stride(), t.size()
    return t.permute(sorted(range(t.dim()), key=lambda d: (-strides[d], -sizes[d])))


def add_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """``torch.optim.Optimizer.add_param_group``, called by every constructor.

    torch wraps it so that no compiler traces it, and imports ``torch._dynamo`` for that: more time than all else that a
    process does before its first step. Where it has not been imported nothing is traced, and the wrapper is left out.
    """
    method: Any = torch.optim.Optimizer.add_param_group
    if "torch._dynamo" not in sys.modules and method.__globals__ is vars(torch._compile):  # what others wrap stays
        method = method.__wrapped__
    method(optimizer, group)
