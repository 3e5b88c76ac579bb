"""An update that is prepared once: the reference's bits; tensors that move are followed, what cannot be is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import same_bits
from tests.kernels.oracles import tensor
from tests.profiles import examples
from torch import nn

from zoo.kernels import loading
from zoo.kernels.building import BuildError
from zoo.kernels.update import (
    ALLOWED,
    Flag,
    Rule,
    Settings,
    UpdatePlan,
    adagrad,
    adam,
    lion,
    num_states,
    sgd,
    update_plan,
)
from zoo.kernels.update.prepared import ReferencePlan

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")

ADAM = adam(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
RULES = {
    Rule.ADAM: lambda flags: adam(
        lr=0.1, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.01, amsgrad=bool(flags & Flag.AMSGRAD),
        decoupled=not flags & Flag.COUPLED,
    ),
    Rule.SGD: lambda flags: sgd(
        lr=0.1, momentum=0.9 if flags & Flag.MOMENTUM else 0.0, dampening=0.0 if flags & Flag.NESTEROV else 0.2,
        weight_decay=0.01 if flags & Flag.COUPLED else 0.0, nesterov=bool(flags & Flag.NESTEROV),
    ),
    Rule.LION: lambda flags: lion(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01),
    Rule.ADAGRAD: lambda flags: adagrad(
        lr=0.1, lr_decay=0.1, eps=1e-8, weight_decay=0.01 if flags & Flag.COUPLED else 0.0
    ),
}  # fmt: skip
KINDS = [(rule, flags) for rule in RULES for flags in ALLOWED[rule]]
MAKERS = (ReferencePlan, update_plan)


class Held:
    """Parameters with gradients, states and masters, and the plan that updates them."""

    def __init__(self, settings: Settings, sizes: list[int], low: torch.dtype, state: torch.dtype, seed: int) -> None:
        self.settings = settings
        self.params = [nn.Parameter(tensor((n,), low, seed + i)) for i, n in enumerate(sizes)]
        self.give_gradients(seed + 50)
        count = num_states(settings.rule, settings.flags)
        self.states = [[torch.zeros(n, dtype=state) for n in sizes] for _ in range(count)]
        self.masters = [p.detach().float() for p in self.params] if low is not torch.float32 else []
        self.steps = torch.zeros(len(sizes))

    def give_gradients(self, seed: int) -> None:
        for i, p in enumerate(self.params):
            p.grad = tensor((p.numel(),), p.dtype, seed + i)

    def plan(self, make: object = update_plan) -> UpdatePlan:
        made: UpdatePlan = make(self.params, self.states, self.masters, self.steps)  # type: ignore[operator]
        return made

    def all(self) -> list[torch.Tensor]:
        """What a step writes."""
        return [*(p.detach() for p in self.params), *(s for states in self.states for s in states), *self.masters]


def step(plan: UpdatePlan, settings: Settings, number: int = 1, grad_scale: float = 1.0) -> bool:
    return plan.update(int(settings.rule), int(settings.flags), settings.values(grad_scale), number)


def held(count: int = 3, low: torch.dtype = torch.float32) -> Held:
    return Held(ADAM, [4] * count, low, torch.float32, 0)


@examples(times=2)
@given(
    kind=st.sampled_from(KINDS), sizes=st.lists(st.sampled_from([0, 1, 7, 64, 1025]), min_size=1, max_size=5),
    low=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    state=st.sampled_from([torch.float32, torch.bfloat16]), grad_scale=st.sampled_from([1.0, -1.0, 0.3]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_instruction_set_gives_the_bits_of_the_reference_over_several_steps(
    kind: tuple[Rule, Flag], sizes: list[int], low: torch.dtype, state: torch.dtype, grad_scale: float, seed: int
) -> None:
    settings = RULES[kind[0]](kind[1])
    assert (settings.rule, settings.flags) == kind
    results = []
    for isa in (None, *loading.isas()):
        case = Held(settings, sizes, low, state, seed)
        plan = case.plan(ReferencePlan if isa is None else update_plan)
        with loading.use_isa(isa or loading.isas()[0]):
            for number in range(1, 4):
                case.give_gradients(100 * number + seed)
                assert step(plan, settings, number, grad_scale)
                plan.count()
        assert case.steps.tolist() == [3.0] * len(sizes)
        results.append([t.clone() for t in case.all()])
    for isa, found in zip(loading.isas(), results[1:], strict=True):
        for a, b in zip(results[0], found, strict=True):
            assert same_bits(a, b), isa


@pytest.mark.parametrize("make", MAKERS)
def test_a_parameter_without_a_gradient_leaves_everything_as_it_is(make: object) -> None:
    case = held()
    plan = case.plan(make)
    case.params[2].grad = None
    before = [t.clone() for t in case.all()]
    assert not step(plan, ADAM)
    assert all(map(torch.equal, before, case.all()))
    case.params[2].grad = torch.ones(4)
    assert step(plan, ADAM)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_tensors_that_move_are_followed(low: torch.dtype, first: bool) -> None:
    results = []
    for make in MAKERS:
        case, at = held(low=low), 0 if first else 1
        plan = case.plan(make)
        assert step(plan, ADAM)
        for t in (case.params[at], *(states[at] for states in case.states), *case.masters[at : at + 1]):
            old = t.data
            t.data = torch.cat([old, old])[4:]  # other memory, and not at its beginning
            old.fill_(7.0)
            storage = t.untyped_storage()
            kept = t.detach().clone()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            t.data.copy_(kept)
        case.give_gradients(200)
        assert step(plan, ADAM, 2)
        results.append([t.clone() for t in case.all()])
    assert all(map(torch.equal, *results))


def changed(case: Held, what: str) -> None:
    p, m = case.params[1], case.states[0][1]
    match what:
        case "emptied":
            m.untyped_storage().resize_(0)
        case "shrunk":
            m.untyped_storage().resize_(8)
        case "resized":
            m.resize_(5)
        case "another dtype":
            m.data = m.double()
        case "strided":
            p.data = torch.zeros(8)[::2]
        case "a gradient of another size":
            assert p.grad is not None
            p.grad.resize_(3)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("emptied", r"states0\[1\].*(has no memory|beyond its memory)"),
        ("shrunk", r"states0\[1\].*ends beyond its memory, at byte 16 of 8"),
        ("resized", r"states0\[1\] has shape .*5.*params\[1\] has 4"),
        ("another dtype", r"states0\[1\] is torch.float64"),
        ("strided", r"params\[1\].*strides.*contiguous"),
        ("a gradient of another size", r"grads\[1\] has shape .*3.*params\[1\] has 4"),
    ],
)
@pytest.mark.parametrize("make", MAKERS)
def test_what_cannot_be_updated_any_more_is_refused_and_nothing_is_changed(
    make: object, what: str, sentence: str
) -> None:
    case = held()
    plan = case.plan(make)
    assert step(plan, ADAM)
    changed(case, what)
    before = [case.params[0].detach().clone(), case.states[0][0].clone(), case.states[1][2].clone()]
    with pytest.raises(ValueError, match=sentence):
        step(plan, ADAM, 2)
    after = [case.params[0].detach(), case.states[0][0], case.states[1][2]]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("make", MAKERS)
def test_wrong_lists_and_rules_are_refused(make: object) -> None:
    case = held()
    with pytest.raises(ValueError, match="states1 has 2 tensors and params has 3"):
        make(case.params, [case.states[0], case.states[1][:2]], [], case.steps)  # type: ignore[operator]
    with pytest.raises(ValueError, match="params has no tensors"):
        make([], [], [], case.steps)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"steps is torch.float32 of shape .*2"):
        make(case.params, case.states, [], torch.zeros(2))  # type: ignore[operator]
    with pytest.raises(ValueError, match="states"):
        step(case.plan(make), lion(lr=0.1, beta1=0.9, beta2=0.99))


def test_things_that_are_no_tensors_and_wrong_numbers_are_refused() -> None:
    case = held()
    with pytest.raises(ValueError, match=r"params\[1\] is of type .*str.*must be a tensor"):
        update_plan([case.params[0], "p"], [[], []], [], case.steps)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="settings has 2 numbers; it takes 10"):
        case.plan().update(0, 0, [0.1, 0.2], 1)
    with pytest.raises(ValueError, match="rule 0 has no flags 16"):
        case.plan().update(0, 16, ADAM.values(), 1)


def test_a_plan_keeps_its_tensors_alive_and_lets_them_go() -> None:
    case = held()
    storage = weakref.ref(case.states[0][0].untyped_storage())
    plan = case.plan()
    state, params = case.states[1][0], case.params
    del case
    gc.collect()
    assert step(plan, ADAM)
    assert float(state.sum()) != 0
    before = params[0].detach().data_ptr()
    del plan, state
    assert params[0].data_ptr() == before
    assert storage() is None


def test_a_step_is_seen_by_autograd() -> None:
    case = held()
    plan, p = case.plan(), case.params[0]
    loss = (p * p).sum()
    step(plan, ADAM)
    step(plan, ADAM, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_the_module_of_classes_an_optimizer_says_so_and_steps_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from zoo.optim import AdamW

    results = []
    for there in (True, False):
        with monkeypatch.context() as patched, loading.use_mode("auto"):
            if not there:
                patched.setattr(loading, "_classes", None)
                patched.setattr(loading, "_why_not_classes", None)
                patched.setattr(loading, "_open_classes", refuse)
            case = held()
            optimizer = AdamW(case.params)
            for _ in range(3):
                optimizer.step()
            results.append([p.detach().clone() for p in case.params])
    assert all(map(torch.equal, *results))
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "updates and layers cannot be prepared once" in caplog.text
    with monkeypatch.context() as patched, loading.use_mode("native"):
        patched.setattr(loading, "_classes", None)
        patched.setattr(loading, "_why_not_classes", "no")
        with pytest.raises(BuildError, match="ZOO_KERNELS=native, but no"):
            loading.classes()


def refuse() -> object:
    raise BuildError("the headers of Python are missing")
