"""What a schedule may not do with a window, each with its sentence; and what the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shard.runtime.micro_batches import Case, Model, data
from torch import nn

from zoo import sim
from zoo.shard import Window
from zoo.zero import ShardedModel, ZeroConfig, ZeroOptimizer

# Misuse --------------------------------------------------------------------------------------------------------------


def one(stage: int = 3, **options: Any) -> tuple[Model, ZeroOptimizer, torch.Tensor]:
    model = Model(Case())
    given = {"lr": 0.1, "optimizer": torch.optim.SGD, "param_persistence_threshold": 0, "reduce_bucket_size": 1}
    return model, ZeroOptimizer(model, stage=stage, **{**given, **options}), data(0, 0)


def run_forward(window: Window, model: Model, key: Any, x: torch.Tensor) -> torch.Tensor:
    with window.forward(key):
        out: torch.Tensor = model(x, 0).square().mean()
    return out


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_refused(stage: int) -> None:
    model, optimizer, x = one(stage)
    sharded = optimizer.sharded
    with sharded.window() as window:
        with pytest.raises(ValueError, match="backward of micro-batch 7, which was never run; open are: none"):
            window.backward(7).__enter__()
        first = run_forward(window, model, "a", x)
        with pytest.raises(ValueError, match=r"micro-batch 'a' has run its forward.*a micro-batch of its own"):
            run_forward(window, model, "a", x)
        with pytest.raises(RuntimeError, match="another window of the same model"):
            sharded.window().__enter__()
        with pytest.raises(RuntimeError, match=r"step with 1 open micro-batch\(es\): micro-batch 'a'.*window\.end"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"reached micro-batch 'a', which a schedule drives"):
            first.backward(retain_graph=True)
        with pytest.raises(ValueError, match=r"backward_weights of micro-batch 'a'.*Run backward_inputs\(\) first"):
            window.backward_weights("a").__enter__()
        with window.backward("a"):
            with pytest.raises(RuntimeError, match="forward of micro-batch 'b' inside of the backward of micro-batch"):
                run_forward(window, model, "b", x)
            with pytest.raises(RuntimeError, match=r"reduce\(\) inside of the backward of micro-batch 'a'"):
                sharded.reduce()
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) inside of the backward"):
                optimizer.zero_grad()
            first.backward(retain_graph=True)
        with pytest.raises(ValueError, match="backward of micro-batch 'a', which has ended"):
            window.backward("a").__enter__()
        with pytest.raises(ValueError, match="micro-batch 'a' has ended already"):
            window.end("a")
        with pytest.raises(RuntimeError, match=r"reached micro-batch 'a'.*It has ended"):
            first.backward()
        run_forward(window, model, "c", x)
        window.end("c")
        with pytest.raises(ValueError, match="micro-batch 'c' has ended already"):
            window.end("c")
        with window.forward("d"):
            with pytest.raises(RuntimeError, match="backward of micro-batch 'd' inside of the forward of micro-batch"):
                window.backward("d").__enter__()
            with torch.no_grad():
                model(x, 0)  # nothing comes back, and nothing is open
    with pytest.raises(RuntimeError, match="outside of its window"):
        run_forward(window, model, "e", x)
    optimizer.step()
    plain = Model(Case())
    plain(x, 0).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, value in optimizer.consolidated_parameters().items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


def test_a_window_that_ends_with_open_micro_batches_says_so() -> None:
    model, optimizer, x = one()
    window = optimizer.sharded.window()
    with pytest.raises(RuntimeError, match=r"1 micro-batch\(es\) that were run and not brought back: 3"), window:
        run_forward(window, model, 3, x)
    assert not any(b.leases for b in optimizer.buckets)
    model(x, 0).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_of_two_micro_batches_is_refused(stage: int) -> None:
    model, optimizer, x = one(stage)
    with optimizer.sharded.window() as window:
        first, second = run_forward(window, model, 0, x), run_forward(window, model, 1, x)
        refused = pytest.raises(RuntimeError, match="backward of micro-batch 1 has reached micro-batch 0")
        with refused, window.backward(1):
            (first + second).backward()
        with pytest.raises(RuntimeError, match="ended with an exception"), window.backward(0):
            pass
        optimizer.zero_grad()
        third = run_forward(window, model, 2, x)
        with window.backward(2):
            third.backward()
        window.end(0)
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_ordinary_backward_for_inputs_only_is_refused(stage: int) -> None:
    model, optimizer, x = one(stage)
    with optimizer.sharded.window() as window:
        loss = run_forward(window, model, 0, x)
        with pytest.raises(RuntimeError, match=r"backward\(\) inside of backward_inputs"), window.backward_inputs(0):
            loss.backward()
        assert window.open == []
        loss = run_forward(window, model, 1, x)
        with window.backward(1):
            loss.backward()
    optimizer.step()


def test_a_micro_batch_from_before_an_update_is_refused() -> None:
    model, optimizer, x = one()
    with optimizer.sharded.window() as window:
        loss = run_forward(window, model, 0, x)
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(RuntimeError, match="older than the latest update"), window.backward(0):
            loss.backward()
        window.end(0)


def test_updates_in_backward_come_with_the_last_micro_batch() -> None:
    model, optimizer, x = one(update_in_backward=True)
    with optimizer.sharded.window() as window:
        losses = [run_forward(window, model, k, x) for k in range(2)]
        with pytest.raises(ValueError, match=r"reduce=True with update_in_backward=True is a step, and 1 other"):
            window.backward(0, reduce=True).__enter__()
        for key in range(2):
            with window.backward(key, reduce=key == 1):
                losses[key].backward()
    optimizer.step()
    plain = Model(Case())
    (2 * plain(x, 0).square().mean()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, value in optimizer.consolidated_parameters().items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


def test_accumulate_refuses_what_is_no_gradient() -> None:
    model, optimizer, _ = one(2)
    sharded = optimizer.sharded
    weight = model.first.weight
    with pytest.raises(ValueError, match="no parameter of this model"):
        sharded.accumulate(nn.Parameter(torch.zeros(2)), torch.zeros(2))
    with pytest.raises(ValueError, match=r"gradient of shape \(2,\).*'first\.weight', which has shape \(6, 4\)"):
        sharded.accumulate(weight, torch.zeros(2))
    with pytest.raises(ValueError, match=r"torch\.float64"):
        sharded.accumulate(weight, torch.zeros(6, 4, dtype=torch.float64))
    before = weight.detach().clone()
    sharded.accumulate(weight, torch.ones(6, 4))
    sharded.accumulate(weight, torch.ones(6, 4))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.2)


def test_a_frozen_parameter_takes_no_gradient() -> None:
    model = Model(Case())
    model.first.requires_grad_(False)
    sharded = ShardedModel(model, config=ZeroConfig(stage=1), trains=True)
    with pytest.raises(ValueError, match=r"'first\.weight', which is frozen"):
        sharded.accumulate(model.first.weight, torch.zeros(6, 4))


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/zero/windows.md").read_text(encoding="utf-8")
    (code,) = [block.split("```")[0] for block in page.split("```python\n") if "window.forward(0)" in block]

    def fn(rank: int) -> None:
        model, optimizer, _ = one()
        names = {"x0": data(rank, 0), "x1": data(rank, 1), "optimizer": optimizer, "model": lambda x: model(x, rank)}
        exec(code, names)
        plain = Model(Case())
        for r in range(2):
            sum(plain(data(r, micro), r).mean() / 2 for micro in range(2)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for name, value in optimizer.consolidated_parameters().items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())

    sim.run(2, fn)
