"""Optimizers that compress, where parameters have axes of their own: experts, tensor-parallel parts, pipeline stages,
tied layers. Each family of parameters is its paper's algorithm over the ranks that have it, step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.optim import papers
from tests.profiles import examples
from tests.zero.update.test_onebit import chunks_of, synchronised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.layout import declare_first, declare_split, declare_tied
from zoo.optim import DiLoCo, LocalSGD, Muon, OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.zero import ZeroOptimizer

AXES = ("pipe", "data", "expert", "tensor")
GROUP = {"type": "onebit", "params": {"group_size": 64, "factor": 1.0}}  # the scale of the papers
ADAM = {"optimizer": OnebitAdam, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "freeze_step": 3}
LAMB = {
    "optimizer": OnebitLamb, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "bias_correction": False, "freeze_step": 3,
    "coeff_beta": 0.5, "max_coeff": 3.0, "min_coeff": 0.1, "factor_min": 0.7, "factor_max": 1.5,
    "factor_threshold": 0.2,
}  # fmt: skip
ZERO_ONE = {
    "optimizer": ZeroOneAdam, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "bias_correction": False,
    "var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 2,
}  # fmt: skip
DILOCO = {
    "optimizer": DiLoCo, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "sync_every": 3, "compressor": None,
}  # fmt: skip
LOCAL = {"optimizer": LocalSGD, "lr": 0.1, "sync_every": 2, "compressor": None}
WAYS = {"Adam": ADAM, "Lamb": LAMB, "ZeroOne": ZERO_ONE, "DiLoCo": DILOCO, "LocalSGD": LOCAL}
BAD = 4
"""The step (from 0) that is skipped where one is."""


@dataclass(frozen=True)
class Case:
    """A mesh, and what a stage has; each of ``experts`` is one tensor on each expert rank."""

    pipe: int = 1
    data: int = 2
    expert: int = 1
    tensor: int = 1
    dense: tuple[tuple[int, ...], ...] = ((33, 3), (7,))
    experts: tuple[tuple[int, ...], ...] = ()
    stacked: bool = False  # experts are rows of one tensor; otherwise they have names of their own
    columns: int = 0  # of a matrix that is cut along the tensor axis
    tied: int = 0
    only_last: bool = False  # has experts and cut matrices
    clip: float = 0.0
    bad: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.pipe, self.data, self.expert, self.tensor

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    def steps(self, num: int) -> list[int]:
        """The steps that are not skipped."""
        return [t for t in range(num) if not (self.bad and t == BAD)]


SHAPES = st.sampled_from([(1,), (7,), (33, 3), (64,), (5, 5, 5)])
SIZES = [(1, 2, 2, 1), (1, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1), (2, 2, 1, 2),
         (1, 1, 2, 2), (1, 3, 2, 1), (2, 1, 1, 2), (1, 1, 1, 2)]  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pipe, data, expert, tensor = draw(st.sampled_from(SIZES))
    return Case(
        pipe=pipe, data=data, expert=expert, tensor=tensor, dense=tuple(draw(st.lists(SHAPES, min_size=1, max_size=2))),
        experts=tuple(draw(st.lists(SHAPES, min_size=1, max_size=2))) if expert > 1 else (),
        stacked=draw(st.booleans()), columns=draw(st.sampled_from([1, 5])) if tensor > 1 else 0,
        tied=draw(st.sampled_from([0, 1, 9])), only_last=draw(st.booleans()), clip=draw(st.sampled_from([0.0, 5.0])),
        bad=draw(st.booleans()),
    )  # fmt: skip


def values(*key: Any, size: int, factor: float = 1.0) -> np.ndarray:
    seed = [sum((i + 1) * b for i, b in enumerate(repr(key).encode())), len(key)]
    return (np.random.default_rng(seed).normal(size=size) * factor).astype(np.float32)


class Given(nn.Module):
    """What one rank has; its gradient is what it is told."""

    def __init__(self, case: Case, pipe: int, expert: int, tensor: int) -> None:
        super().__init__()
        full = not case.only_last or pipe == case.pipe - 1
        self.dense = self._list(("dense", pipe), case.dense)
        declare_first(self.dense, pipe * len(case.dense))
        experts = case.experts if full else ()
        self.experts = self._list(("experts", pipe, expert), experts)
        declare_first(self.experts, (pipe * case.expert + (0 if case.stacked else expert)) * len(experts))
        for p in self.experts if case.expert > 1 else ():
            shape = (case.expert * p.shape[0], *p.shape[1:])
            offsets = (expert * p.shape[0], *(0 for _ in shape[1:]))
            declare_split(p, ["expert"], **({"shape": shape, "offsets": offsets} if case.stacked else {}))
        cut = [(3, case.columns)] if case.columns and full else []
        self.cut = self._list(("cut", pipe, tensor), cut)
        declare_first(self.cut, pipe * len(cut))
        for p in self.cut:
            declare_split(p, ["tensor"], shape=(3, case.columns * case.tensor), offsets=(0, tensor * case.columns))
        self.tied = self._list(("tied",), [(case.tied,)] if case.tied else [])
        for p in self.tied:
            declare_tied(p, "table")
        self.kinds = {"dense": (pipe,), "experts": (pipe, expert), "cut": (pipe, tensor), "tied": ()}

    @staticmethod
    def _list(key: tuple[Any, ...], shapes: Any) -> nn.ParameterList:
        sizes = [math.prod(s) for s in shapes]
        flat = torch.from_numpy(values("x", *key, size=sum(sizes)))
        parts = torch.split(flat, sizes) if sizes else ()
        return nn.ParameterList(nn.Parameter(v.clone().view(s)) for v, s in zip(parts, shapes, strict=True))

    def forward(self, case: Case, step: int, place: tuple[int, ...], factors: Any = None) -> torch.Tensor:
        loss = torch.zeros(())
        for kind, key in self.kinds.items():
            ws = list(getattr(self, kind))
            if ws:
                flat = torch.cat([w.view(-1) for w in ws])
                g = gradient(case, kind, key, place, flat.numel())[step]
                loss = loss + (flat * torch.from_numpy(g)).sum() * (1.0 if factors is None else factors[kind])
        return loss


STEPS = 9


def gradient(case: Case, kind: str, key: tuple[int, ...], place: tuple[int, ...], n: int) -> np.ndarray:
    """(steps, n) of the rank at ``place``; ranks that have the same along the tensor axis have the same gradient."""
    pipe, data, expert, _ = place
    found = np.stack([values("g", kind, key, pipe, data, expert, t, size=n) for t in range(STEPS)])
    found[:, : n // 3] *= 1e-2
    if case.bad and kind == "dense" and place[:3] == (case.pipe - 1, case.data - 1, 0):
        found[BAD, -1] = np.inf
    return found


@dataclass
class Family:
    """Parameters that R ranks have, part by part: x (n,) and the ranks' own gradients (steps, R, n)."""

    keys: list[tuple[str, tuple[int, ...]]]
    x: list[np.ndarray]
    grads: list[np.ndarray]
    tensors: list[list[int]]
    """Sizes of the tensors of each part."""
    joined: bool
    """Tensors go over all parts."""

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum([len(x) for x in self.x])

    def of_tensors(self) -> list[np.ndarray]:
        """The elements of each tensor."""
        found, at = list[list[np.ndarray]](), 0
        for sizes in self.tensors:
            found.append([])
            for size in sizes:
                found[-1].append(np.arange(at, at + size))
                at += size
        if self.joined:
            return [np.concatenate(same) for same in zip(*found, strict=True)]
        return [one for part in found for one in part]

    def reduce(self) -> Any:
        """Compresses each part between the ranks that have it."""
        ranks = self.grads[0].shape[1]
        if ranks == 1:
            return lambda xs: xs[0]
        each = [papers.OnebitAllReduce(64, chunks_of(len(x), ranks)) for x in self.x]

        def reduced(xs: np.ndarray) -> np.ndarray:
            parts = np.split(xs, self.ends[:-1], axis=1)
            return np.concatenate([one(part) for one, part in zip(each, parts, strict=True)])

        return reduced


def families(case: Case) -> list[Family]:
    """All of the model. A rank's own gradient is R / N times what it has, for N losses."""
    found, replicas = [], [(d, e) for d in range(case.data) for e in range(case.expert)]

    def add(kind: str, keys: list[tuple[int, ...]], shapes: Any, ranks: Any, joined: bool, stages: Any) -> None:
        sizes = [math.prod(s) for s in shapes]
        if not sizes:
            return
        x, grads = [], []
        for key in keys:
            x.append(values("x", *((kind, *key) if kind != "tied" else ("tied",)), size=sum(sizes)))
            each = [
                gradient(case, kind, key, (pipe, d, e, 0), sum(sizes)) for pipe in stages for d, e in ranks(key)
            ]  # fmt: skip
            own = np.stack(each, axis=1) * (len(each) / len(replicas))
            grads.append(own.mean(1, keepdims=True) if len(stages) > 1 else own)
        found.append(Family([(kind, key) for key in keys], x, grads, [sizes] * len(keys), joined))

    for pipe in range(case.pipe):
        add("dense", [(pipe,)], case.dense, lambda key: replicas, False, [pipe])
        if case.only_last and pipe < case.pipe - 1:
            continue
        add(
            "experts", [(pipe, e) for e in range(case.expert)], case.experts,
            lambda key: [(d, key[1]) for d in range(case.data)], case.stacked, [pipe],
        )  # fmt: skip
        cut = [(3, case.columns)] if case.columns else []
        add("cut", [(pipe, t) for t in range(case.tensor)], cut, lambda key: replicas, True, [pipe])
    add("tied", [()], [(case.tied,)] if case.tied else [], lambda key: replicas, False, range(case.pipe))
    return found


def clipped(case: Case, found: list[Family], takes_means: Any) -> list[float]:
    """Clips the gradients by the norm of all, in place; the norms of the steps."""
    norms = []
    for t in range(STEPS):
        square = 0.0
        for family in found:
            for g in family.grads:
                of_ranks = g[t].mean(0, keepdims=True) if takes_means(t) else g[t]
                square += float((of_ranks.astype(np.float64) ** 2).sum(1).mean())
        norms.append(math.sqrt(square))
        if case.clip and math.isfinite(norms[-1]):
            for family in found:
                for g in family.grads:
                    g[t] *= min(case.clip / (norms[-1] + 1e-6), 1.0)
    return norms


def expected(case: Case, way: dict[str, Any]) -> tuple[dict[Any, np.ndarray], list[float]]:
    """(steps, R, n) parameters of each part after each step that counts; the norms of all steps."""
    found, kind, steps = families(case), way["optimizer"], case.steps(STEPS)
    freeze = way.get("freeze_step", 0)
    of_means = range(1, freeze + 1) if kind is not ZeroOneAdam else papers.steps_of_variance(3, 2)
    norms = clipped(case, found, lambda t: t in steps and steps.index(t) + 1 in of_means)
    result = {}
    for family in found:
        x, grads, reduce = np.concatenate(family.x), np.concatenate(family.grads, axis=2)[steps], family.reduce()
        adam = {"lr": way["lr"], "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
        if kind is OnebitAdam:
            after = papers.onebit_adam(x, grads, reduce, freeze_step=freeze, **adam, corrected=True)
        elif kind is OnebitLamb:
            more = {"beta3": 0.5, "phi": (0.1, 3.0), "factor": (0.7, 1.5, 0.2)}
            tensors: Any = family.of_tensors()
            after = papers.onebit_lamb(x, grads, reduce, tensors, freeze_step=freeze, **adam, **more)
        elif kind is ZeroOneAdam:
            rates = np.full(len(steps), adam.pop("lr"))
            after = papers.zero_one_adam(
                x, grads, reduce, last_variance=3, kappa=2, syncs=synchronised(3, 2, 2), lr=rates, **adam
            )
        elif kind is DiLoCo:
            inner = papers.Adamw(grads.shape[1], len(x), **adam, decay=0.1)
            after = papers.local_steps(x, grads, inner, every=3, outer_lr=0.7, momentum=0.9, nesterov=True)
        else:
            after = papers.local_steps(
                x, grads, lambda x, g, _: x - 0.1 * g, every=2, outer_lr=1.0, momentum=0.0, nesterov=False
            )
        for key, part in zip(family.keys, np.split(after, family.ends[:-1], axis=2), strict=True):
            result[key] = part
    return result, norms


def build(case: Case, order: Any = AXES, **options: Any) -> tuple[Given, ZeroOptimizer, tuple[int, ...]]:
    sizes = dict(zip(AXES, case.sizes, strict=True))
    mesh = init_device_mesh("cpu", tuple(sizes[axis] for axis in order), mesh_dim_names=order)
    place = tuple(mesh.get_local_rank(axis) for axis in AXES)
    model = Given(case, place[0], place[2], place[3])
    given = {"stage": 0, "param_persistence_threshold": 0, "clip_norm": case.clip or math.inf}
    given |= {"compressor": GROUP} if options["optimizer"] is not Muon else {}
    optimizer = ZeroOptimizer(
        model,
        mesh=mesh,
        data_axes=[axis for axis in order if axis in ("data", "expert")],
        layer_axes=("pipe",),
        **{**given, **options},
    )
    return model, optimizer, place


def advance(case: Case, model: Given, optimizer: ZeroOptimizer, place: tuple[int, ...], step: int) -> None:
    model(case, step, place).backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(model: Given, kind: str) -> np.ndarray:
    ws = list(getattr(model, kind))
    return torch.cat([w.detach().view(-1) for w in ws]).numpy().copy() if ws else np.empty(0, np.float32)


def train(case: Case, **options: Any) -> Any:
    """(kind, key) → parameters after each step that counts; norms of all; which rank of those that have it this is."""
    model, optimizer, place = build(case, **options)
    found: dict[Any, list[np.ndarray]] = {}
    norms = []
    for step in range(STEPS):
        advance(case, model, optimizer, place, step)
        norms.append(optimizer.grad_norm)
        assert optimizer.skipped == (case.bad and step == BAD)
        for kind, key in model.kinds.items() if not optimizer.skipped else ():
            found.setdefault((kind, key), []).append(flat(model, kind))
    return found, norms, place


def rank_of(case: Case, kind: str, place: tuple[int, ...]) -> int:
    """The number of a rank among those that have the parameters."""
    return place[1] if kind == "experts" else place[1] * case.expert + place[2]


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@examples(times=0.34)
@given(case=cases())
@example(case=Case(pipe=2, data=2, expert=2, experts=((33, 3), (7,)), tied=9, clip=5.0, bad=True))
@example(case=Case(pipe=1, data=2, tensor=2, columns=5, tied=9, clip=5.0))
def test_each_family_is_its_paper(way: dict[str, Any], case: Case) -> None:
    ranks = sim.run(case.world, lambda rank: train(case, **way))
    want, norms = expected(case, way)
    for found, of_rank, place in ranks:
        assert of_rank == ranks[0][1]
        np.testing.assert_allclose(of_rank, norms, rtol=1e-4)
        for (kind, key), params in found.items():
            if (kind, key) not in want:
                continue
            after = want[kind, key]
            number = min(rank_of(case, kind, place), after.shape[1] - 1)
            np.testing.assert_allclose(
                np.stack(params), after[:, number], rtol=2e-3, atol=2e-4, err_msg=f"{kind} {key} at {place}"
            )


FULL = Case(pipe=2, data=2, expert=2, experts=((33, 3), (7,)), tied=9)
CUT = Case(pipe=2, data=2, tensor=2, columns=5, tied=9)
PURE = [{"stage": stage} for stage in (1, 2, 3)]
GROUPS = [{"stage": stage, "mics_shard_size": 2} for stage in (1, 2, 3)]


ONE = replace(FULL, pipe=1, clip=5.0)
STAGES = {
    "Adam, experts": (ADAM, ONE, PURE), "Adam, stages of a pipeline": (ADAM, replace(FULL, bad=True), GROUPS[1:]),
    "Lamb, experts": (LAMB, ONE, GROUPS), "Lamb, rows of one tensor": (LAMB, replace(ONE, stacked=True), PURE),
    "Lamb, columns": (LAMB, replace(CUT, pipe=1, bad=True), GROUPS),
    "0/1 Adam, columns": (ZERO_ONE | {"local_step_clipper": 1}, replace(CUT, pipe=1), PURE),
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(("way", "case", "placements"), STAGES.values(), ids=STAGES)
def test_stages_have_the_same_bits(way: dict[str, Any], case: Case, placements: list[dict[str, Any]]) -> None:
    def fn(rank: int, placement: dict[str, Any]) -> Any:
        model, optimizer, place = build(case, **way, **placement)
        for step in range(6):
            forecast = optimizer.forecast().wire_bytes if step in (0, 3) else None
            optimizer.comm.log.reset()
            advance(case, model, optimizer, place, step)
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
            assert forecast is None or sent == forecast
        return {name: value.clone() for name, value in optimizer.whole_parameters()}

    found = [sim.run(case.world, lambda r, p=p: fn(r, p)) for p in placements]
    for of_stage in found[1:]:
        for mine, theirs in zip(of_stage, found[0], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "placement"),
    [(replace(FULL, pipe=1), GROUPS[1]), (CUT, {"stage": 0}), (replace(CUT, pipe=1, tensor=4, data=1), PURE[1])],
    ids=["experts", "cut", "tensor"],
)
def test_a_warm_up_ends_on_all_stages_at_once(case: Case, placement: dict[str, Any]) -> None:
    """Elements count once, whatever ranks have them alike; large ones are where counting otherwise would differ."""
    growth = {"dense": 0.0, "experts": 2.0, "cut": 5.0, "tied": 0.0}

    def factor(kind: str, t: int) -> float:
        return math.sqrt(1 + growth[kind] * 0.8**t)

    found, norms, want = families(case), {}, None
    v = [np.zeros(sum(map(len, f.x))) for f in found]
    for t in range(1, 17):
        for family, of_family in zip(found, v, strict=True):
            mean = factor(family.keys[0][0], t) * np.concatenate(family.grads, axis=2)[0].mean(0)
            of_family *= 0.5
            of_family += 0.5 * mean**2
        if t % 2 == 0:
            norms[t] = sum(of_family.sum() for of_family in v)
            before = norms.get(t - 2, 0.0)
            if want is None and min(before, norms[t]) >= 0.96 * max(before, norms[t]):
                want = t

    def fn(rank: int) -> Any:
        options = {"optimizer": OnebitAdam, "freeze_step": "auto", "betas": (0.9, 0.5), "lr": 1e-3}
        model, optimizer, place = build(case, **options, **placement)
        for t in range(1, 17):
            forecast = optimizer.forecast().wire_bytes if t in (1, 2) else None
            optimizer.comm.log.reset()
            model(case, 0, place, {kind: factor(kind, t) for kind in growth}).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
            assert forecast is None or sent == forecast
        return optimizer.param_groups[0]["freeze_step"]

    assert want is not None
    assert sim.run(case.world, fn) == [want] * case.world


def test_what_one_stage_refuses_all_of_them_refuse() -> None:
    """None of them waits for one that has raised."""
    experts = Case(pipe=2, data=2, expert=2, experts=((7,),), only_last=True)
    cut = Case(pipe=2, data=1, tensor=2, columns=5, only_last=True)
    other = ("pipe", "expert", "data", "tensor")  # the ranks of an expert are one shard group, dense ones have two
    groups = {"order": other, "stage": 1, "mics_shard_size": 2}
    wrong: list[tuple[Case, dict[str, Any], type[Exception], str]] = [
        (experts, {**ZERO_ONE, **groups}, NotImplementedError, "local steps"),
        (experts, {**ADAM, **groups, "loss_scale": 2.0}, ValueError, "a loss scale"),
        (cut, {"optimizer": Muon, "use_muon": False}, NotImplementedError, r"needs whole tensors, and 'cut\.0' is a"),
    ]  # fmt: skip

    def fn(rank: int, case: Case, options: dict[str, Any], kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            build(case, **options)

    for case, options, kind, words in wrong:
        sim.run(case.world, lambda r, c=case, o=options, k=kind, w=words: fn(r, c, o, k, w))


def test_a_table_of_the_first_stage_is_refused_on_all() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        model = nn.Embedding(9, 4) if mesh.get_local_rank("pipe") == 0 else nn.Linear(4, 4)
        with pytest.raises(NotImplementedError, match="sparse_gradients with an optimizer that compresses"):
            ZeroOptimizer(
                model, mesh=mesh, data_axes=("data",), layer_axes=("pipe",), stage=0, sparse_gradients=True,
                optimizer=OnebitAdam, freeze_step=2,
            )  # fmt: skip

    sim.run(4, fn)


@pytest.mark.parametrize("other", [{"freeze_step": "auto"}, {"freeze_step": 5}, {"betas": (0.8, 0.99)}], ids=str)
def test_stages_that_would_meet_in_other_steps_are_refused(other: dict[str, Any]) -> None:
    case = Case(pipe=2, data=1, tied=9)

    def fn(rank: int) -> None:
        options = {**ADAM, "freeze_step": "auto" if "betas" in other else 3, **(other if rank else {})}
        with pytest.raises(ValueError, match=r"in other steps: OnebitAdam with .*, OnebitAdam with"):
            build(case, **options)

    sim.run(case.world, fn)


def test_states_are_offloaded_where_nothing_is_compressed() -> None:
    """One data-parallel rank: what several stages have too is a mean of gradients, as ever."""
    case = Case(pipe=2, data=1, tied=9, clip=5.0)

    def fn(rank: int, **options: Any) -> Any:
        found, _, _ = train(case, **ADAM, stage=2, **options)
        return found

    plain = sim.run(2, fn)
    away = sim.run(2, lambda rank: fn(rank, offload_optimizer={"device": "cpu"}))
    for one, other in zip(plain, away, strict=True):
        assert all(np.array_equal(a, b) for key in one for a, b in zip(one[key], other[key], strict=True))
