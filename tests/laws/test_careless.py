"""Law 8: whatever a user does, in whatever order, computes what plain torch computes, or is refused by name.

After a refusal or an exception the next correct step is correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.layout import split_of
from zoo.zero import Precision, ZeroOptimizer

from .careless import Side, Use, check_refusal, programs
from .careless_models import RATE, Model, Setting, data, model_of, settings_of, settings_with_experts

drawn = settings_of().flatmap(lambda s: st.tuples(st.just(s), programs(s)))


@pytest.mark.dear
@pytest.mark.hypothesis
def test_careless_programs(record_property: Callable[[str, object], None]) -> None:
    """15 programs in `make test`, 2,000 in `make test-slow`; refusing is the exception."""
    counts: Counter[str] = Counter()

    @examples(times=8, quick=5)
    @given(drawn)
    def check(given: tuple[Setting, list[Use]]) -> None:
        counts.update(run_program(*given))

    check()
    share = counts["refused"] / counts["uses"]
    record_property("programs", counts["programs"])
    record_property("refused", f"{share:.1%} of {counts['uses']} uses")
    print(f"{counts['programs']} programs, {counts['uses']} uses, refused: {share:.1%}")
    assert share < 0.3


@pytest.mark.dear
@pytest.mark.hypothesis
def test_careless_programs_with_experts() -> None:
    """The same where ranks share the experts of a layer. One who leaves the others alone in a backward is not drawn."""
    counts: Counter[str] = Counter()
    with_experts = settings_with_experts().flatmap(lambda s: st.tuples(st.just(s), programs(s)))

    @given(with_experts)
    def check(given: tuple[Setting, list[Use]]) -> None:
        counts.update(run_program(*given))

    check()
    assert counts["refused"] < 0.3 * counts["uses"]


class Twin(torch.optim.SGD):
    """Plain torch, with what ZeRO's page says: no gradient counts as zero where another parameter has one."""

    def __init__(self, model: nn.Module, clip_norm: float, low: bool, exact: nn.Module | None = None) -> None:
        self.model, self.clip_norm = model, clip_norm
        parameters = list(model.parameters())
        sources = list((exact or model).parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in sources] if low else parameters
        self.seen = [p.detach().clone() for p in parameters]
        super().__init__(self.masters, lr=RATE)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = list(self.model.parameters())
        if all(p.grad is None for p in parameters):
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if self.masters[0] is not parameters[0]:
            for p, seen, master in zip(parameters, self.seen, self.masters, strict=True):
                changed = p.detach() != seen  # what was written to counts
                master.data[changed] = p.detach()[changed].float()
        kept = [p.grad for p in parameters]
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.masters, self.clip_norm)
        super().step()
        if self.masters[0] is not parameters[0]:
            with torch.no_grad():
                for p, master in zip(parameters, self.masters, strict=True):
                    p.copy_(master)
                self.seen = [p.detach().clone() for p in parameters]
        for p, gradient in zip(parameters, kept, strict=True):
            p.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad()


def make_zero(setting: Setting, rank: int) -> Side:
    options: dict[str, Any] = {"precision": Precision(param=setting.dtype)} if setting.came_in else {}
    ep_size = max(setting.ep_size, 1)
    model = model_of(setting, ep_size, rank % ep_size).to(setting.came_in or setting.dtype)
    if ep_size > 1:
        sizes, names = (setting.world // ep_size, ep_size), ("data", "expert")
        options |= {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names), "data_axes": names}
    if setting.host:
        options["offload_optimizer"] = {"device": "cpu"}
        if setting.stage == 3:
            options["offload_param"] = {"device": "cpu"}
    optimizer = ZeroOptimizer(
        model, stage=setting.stage, optimizer=torch.optim.SGD, lr=RATE, clip_norm=setting.clip_norm,
        param_persistence_threshold=setting.threshold, reduce_bucket_size=setting.bucket_size,
        max_live_parameters=setting.keep, overlap_comm=setting.overlap,
        mics_shard_size=setting.shard_size, **options,
    )  # fmt: skip
    return Side(model, optimizer, [rank], setting.dtype)


def make_twin(setting: Setting) -> Side:
    model = model_of(setting).to(setting.dtype)
    low = setting.dtype is torch.bfloat16
    twin = Twin(model, setting.clip_norm, low, exact=Model() if setting.came_in else None)
    return Side(model, twin, list(range(setting.world)), setting.dtype)


def run_program(setting: Setting, program: list[Use]) -> Counter[str]:
    """Run it on all ranks and on the twin; returns how many uses there were, and how many of them refused."""
    counts: Counter[str] = Counter(programs=1, uses=len(program))
    finish = [
        Use("zero_grad", (False, True)), Use("drop_outputs"),
        *(u for i in (90, 91) for u in (
            Use("forward", ("end", i, (), False)), Use("backward", (("end",), False, True)), Use("step"),
            Use("zero_grad", (False, True)),
        )),
    ]  # fmt: skip

    def fn(rank: int) -> None:
        zero, twin = make_zero(setting, rank), make_twin(setting)
        for use in program:
            try:
                use.run(zero)
            except Exception as error:
                check_refusal(use, setting, error)
                counts["refused"] += rank == 0
                use_refused(use, zero, twin)
            else:
                use.run(twin)
        compare(setting, zero, twin, program)
        for use in finish:
            use.run(zero)
            use.run(twin)
        compare(setting, zero, twin, program)
        zero.optimizer.close()
        assert {p.dtype for p in zero.model.parameters()} == {setting.came_in or setting.dtype}
        names = [name for name, _ in twin.model.named_parameters()]
        masters = dict(zip(names, twin.optimizer.masters, strict=True))
        for name, value in zero.model.named_parameters():
            if not split_of(value).axes:  # this rank's experts have been compared among all
                master = masters[name]
                torch.testing.assert_close(value.to(master.dtype), master, rtol=0.1, atol=0.1)

    sim.run(setting.world, fn, seed=setting.seed)
    return counts


def use_refused(use: Use, zero: Side, twin: Side) -> None:
    # What went wrong in a backward leaves gradients that nobody may use: a user drops them.
    if use.name in ("backward", "backward_of_some", "drive", "penalty", "penalty_alone", "gradient_before_backward"):
        for side in (zero, twin):
            side.optimizer.zero_grad()
            side.losses = {name: losses for name, losses in side.losses.items() if name in zero.losses}


def compare(setting: Setting, zero: Side, twin: Side, program: list[Use]) -> None:
    """fp64 differs by the order of additions; fp32 by that too; bf16 by roundings of gradients and parameters."""
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}[setting.dtype]
    expected = dict(twin.model.named_parameters())
    for name, value in zero.optimizer.consolidated_parameters().items():
        torch.testing.assert_close(
            value, expected[name].detach(), rtol=tolerance, atol=tolerance,
            msg=lambda m, n=name: f"{n} after {'; '.join(map(str, program))}: {m}",
        )  # fmt: skip
    for mine, theirs in zip(zero.saved.get("gradients", []), _of_rank(zero, twin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def _of_rank(zero: Side, twin: Side) -> list[torch.Tensor]:
    found = twin.saved.get("gradients", [])
    return found[zero.ranks[0] :: len(twin.ranks)]


def test_data_differs_between_ranks() -> None:
    assert not torch.equal(data(0, 1, torch.float64), data(1, 1, torch.float64))
