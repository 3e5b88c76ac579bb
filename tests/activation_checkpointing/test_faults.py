"""What users do with checkpoints in odd ways: it computes the same as without, or is one sentence, and stays clean."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.activation_checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    CudaRNGStatesTracker,
    checkpoint,
    state,
)
from zoo.activation_checkpointing.storages import Contiguous, Host, Keep, Nvme

FORMS = pytest.mark.parametrize("reentrant", [False, True], ids=["not re-entrant", "re-entrant"])


def make(reentrant: bool = False, places: int | None = 4, **more: Any) -> ActivationCheckpointing:
    config = ActivationCheckpointingConfig(use_reentrant=reentrant, **more)
    storage = Contiguous(places) if places else None
    return ActivationCheckpointing(config, storage=storage, tracker=CudaRNGStatesTracker("cpu"))


def free(checkpointing: ActivationCheckpointing) -> tuple[int, int]:
    ring = checkpointing.storage.ring  # type: ignore[union-attr]
    return ring.num_free, 4 * len(ring._arenas)


@FORMS
@pytest.mark.parametrize("places", [None, 4])
def test_arguments_and_results_of_every_kind(reentrant: bool, places: int | None) -> None:
    checkpointing = make(reentrant, places)
    x, frozen = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    ids, mask = torch.tensor([2, 0, 1]), torch.tensor([True, False, True])
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x: Any, nothing: None, tree: dict[str, Any], *, scale: float, weight: Any, empty: Any) -> Any:
        y = (x @ weight)[tree["ids"]] * scale + tree["frozen"] + empty.sum()
        return x, {"y": y, "mask": tree["mask"], "n": 3, "none": nothing}, [y * 2, tree["ids"]]

    def call(how: Callable[..., Any]) -> Any:
        tree = {"ids": ids, "frozen": frozen, "mask": mask}
        return how(function, x, None, tree, scale=2.0, weight=weight, empty=torch.empty(0, 4))

    found, expected = call(checkpointing), call(lambda f, *a, **k: f(*a, **k))
    grads = []
    for out, tree, (double, _) in (found, expected):
        x.grad = weight.grad = None
        (out.sum() + tree["y"].square().sum() + double.sum()).backward()
        grads.append((x.grad.clone(), weight.grad.clone()))  # type: ignore[attr-defined]
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    assert found[1]["n"] == 3
    assert found[1]["none"] is None
    assert torch.equal(found[1]["mask"], mask)
    assert not found[2][1].requires_grad


@FORMS
def test_without_an_argument_that_needs_a_gradient_parameters_still_get_theirs(
    reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    checkpointing = make(reentrant)
    with caplog.at_level(logging.INFO, "zoo.activation_checkpointing"):
        checkpointing(layer, x)
        checkpointing(layer, x).sum().backward()
    said = "Linear has no argument that needs a gradient: it is not re-entrant"
    assert caplog.messages == ([said] if reentrant else [])
    found = layer.weight.grad
    layer.weight.grad = None
    layer(x).sum().backward()
    assert torch.equal(found, layer.weight.grad)  # type: ignore[arg-type]


@FORMS
def test_without_gradients_it_is_a_call(reentrant: bool) -> None:
    checkpointing = make(reentrant)
    with torch.no_grad():
        for _ in range(9):  # more than there are places
            assert not checkpointing(torch.sin, torch.ones(2, requires_grad=True)).requires_grad
    for _ in range(9):
        assert not checkpointing(torch.sin, torch.ones(2)).requires_grad
    assert free(checkpointing)[0] == free(checkpointing)[1]


def test_second_derivatives() -> None:
    x = torch.linspace(0.1, 1, 4, dtype=torch.float64, requires_grad=True)

    def second(checkpoint: Callable[..., Any]) -> torch.Tensor:
        (g,) = torch.autograd.grad(checkpoint(lambda x: x.sin() * x.exp(), x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    assert torch.equal(second(make()), second(lambda f, x: f(x)))
    y = make(True)(torch.exp, x)
    with pytest.raises(NotImplementedError, match=r"second derivatives \(create_graph=True\) through a re-entrant"):
        y.sum().backward(create_graph=True)


@FORMS
def test_backward_twice(reentrant: bool) -> None:
    checkpointing = make(reentrant)
    x = torch.randn(5, requires_grad=True)
    y = checkpointing(lambda x: nn.functional.dropout(x.exp(), 0.5), x).sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward()
    assert torch.equal(first, x.grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    del y
    assert free(checkpointing) == (4, 4)


class Fails:
    """Draws numbers, and raises at the call number ``at``."""

    def __init__(self, at: int, tracker: CudaRNGStatesTracker) -> None:
        self.calls, self.at, self.tracker = 0, at, tracker

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with self.tracker.fork("a"):
            y = nn.functional.dropout(x, 0.5).exp()
        if self.calls == self.at:
            torch.rand(3)
            raise ArithmeticError("on purpose")
        return y.sin()


@FORMS
@pytest.mark.parametrize("at", [1, 2], ids=["forward", "recomputation"])
def test_an_exception_leaves_everything_clean(reentrant: bool, at: int) -> None:
    checkpointing = make(reentrant)
    checkpointing.tracker.add("a", 3)
    function = Fails(at, checkpointing.tracker)
    x = torch.randn(6, requires_grad=True)
    torch.manual_seed(0)
    state = states = None

    def go() -> None:
        nonlocal state, states
        y = checkpointing(function, x).sum()
        state, states = torch.get_rng_state(), checkpointing.tracker.get_states()
        y.backward()

    with pytest.raises(ArithmeticError):
        go()
    if at == 2:  # what the recomputation drew was not drawn
        assert torch.equal(torch.get_rng_state(), state)  # type: ignore[arg-type]
        assert torch.equal(checkpointing.tracker.get_states()["a"], states["a"])  # type: ignore[index]
    assert len(set(free(checkpointing))) == 1
    x.grad = None
    function.at = 0
    checkpointing(function, x).sum().backward()
    assert x.grad is not None
    assert checkpointing.saved_bytes == 0


@pytest.mark.parametrize("places", [None, 4])
def test_an_argument_that_is_changed_in_place(places: int | None) -> None:
    checkpointing = make(places=places) if places else ActivationCheckpointing(storage=Keep())
    x = torch.randn(4, requires_grad=True)
    h = x * 2
    expected = torch.autograd.grad((x * 2).exp().sum(), x)[0]
    y = checkpointing(lambda h: h.exp().sin().exp() * 0 + h.exp(), h).sum()
    with torch.no_grad():
        h.zero_()
    if places:  # it was copied
        y.backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    else:
        with pytest.raises(RuntimeError, match=r"argument of a checkpointed function, \(4,\) torch.float32, was chan"):
            y.backward()


def test_a_function_that_is_not_the_same_again() -> None:
    other = [True]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() if other.pop() else x.sin()

    other = [False, True]
    x = torch.randn(3, requires_grad=True)
    y = make()(function, x)
    with pytest.raises(RuntimeError, match=r"[Aa] different number of tensors|recomput"):
        y.sum().backward()


@FORMS
def test_profile_logs_forward_and_recomputation(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    checkpointing = make(reentrant, profile=True, synchronize_checkpoint_boundary=True)
    with caplog.at_level(logging.INFO, "zoo.activation_checkpointing"):
        checkpointing(nn.functional.gelu, torch.ones(2, requires_grad=True)).sum().backward()
    assert [re.sub(r"[\d.]+ ms", "N ms", text) for text in caplog.messages] == [
        "forward of checkpointed gelu: N ms", "recomputation of checkpointed gelu: N ms",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_compiler_follows_plain_checkpoints_and_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def step(checkpointing: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return checkpointing(lambda x, *, scale: layer(x).tanh() * scale, x, scale=2.0).sum()

    def gradient(step: Callable[..., torch.Tensor], checkpointing: Callable[..., Any]) -> torch.Tensor:
        step(checkpointing, x).backward()
        found, x.grad = x.grad, None
        assert found is not None
        return found

    plain = ActivationCheckpointing(tracker=CudaRNGStatesTracker("cpu"))
    expected = gradient(step, plain)
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient(whole, plain), expected)
    assert torch.equal(gradient(torch.compile(step, backend="aot_eager"), make()), expected)  # between two graphs
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"a checkpointed function under torch.compile with partition_activations"):
        whole(make(), x)
    with pytest.raises(Exception, match=r"under torch.compile where threads have configured them for themselves"):
        whole(checkpoint, x)  # this thread has, for the test
    monkeypatch.setattr(state, "_apart", 0)
    monkeypatch.setattr(state, "_process", state.State())  # another test may have configured the one that there is
    torch._dynamo.reset()
    assert torch.equal(gradient(whole, checkpoint), expected)


def test_settings_that_contradict_each_other() -> None:
    for given, words in (
        ({"nvme_path": "/x", "cpu_checkpointing": True}, "both say where saved tensors wait"),
        ({"save": ["matmul"], "use_reentrant": True}, "works without activation_checkpointing.use_reentrant only"),
    ):
        with pytest.raises(ValueError, match=words):
            ActivationCheckpointing(ActivationCheckpointingConfig(**given))


class Block(nn.Module):
    def __init__(self, storage: Any) -> None:
        super().__init__()
        self.linear, self.checkpoint = nn.Linear(4, 4), ActivationCheckpointing(storage=storage)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.checkpoint(self.linear, x)
        return out


@pytest.mark.parametrize("kind", ["none", "contiguous", "host", "host in buffers", "nvme"])
def test_models_that_checkpoint_are_copied_and_pickled(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: None, "contiguous": lambda: Contiguous(1), "host": Host,
        "host in buffers": lambda: Host(num_checkpoints=1), "nvme": lambda: Nvme(tmp_path, staging_bytes=1 << 20),
    }  # fmt: skip
    block, x = Block(kinds[kind]()), torch.randn(2, 4, requires_grad=True)
    waiting = block(x)  # its place is taken
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert twin.checkpoint.saved_bytes == 0
        assert type(twin.checkpoint.storage) is type(block.checkpoint.storage)
        y = twin(x)
        assert torch.equal(y, waiting)
        y.sum().backward()
    waiting.sum().backward()
    if kind == "nvme":
        assert twin.checkpoint.storage.staging_bytes == 1 << 20
