"""Two engines that share one loss: a generator behind a critic, an encoder before a decoder. Each has its own loss
scale and number of micro-batches; what arrives at its parameters is in its own units, whoever calls backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.engine import Engine, initialize
from zoo.shard.runtime.graph_tasks import multiplied, note_multiplied

WORLD, RATE = 2, 0.25


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    return maker, critic


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def start(net: nn.Module, stage: int, scale: float | None, accumulation: int = 1) -> Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1},
    }  # fmt: skip
    if scale is not None:
        dynamic = {"initial_scale_power": int(-scale), "loss_scale_window": 2}
        config["fp16"] = {"enabled": True, "auto_cast": True, **({"loss_scale": scale} if scale > 0 else dynamic)}
    return initialize(config, net)[0]


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


def plain(steps: int, per_step: int = 1, *, gan: bool = False) -> dict[str, torch.Tensor]:
    """Plain torch in fp32 on the batches of all ranks."""
    maker, critic = nets()
    makers, critics = (torch.optim.SGD(net.parameters(), lr=RATE) for net in (maker, critic))
    share = 1 / (WORLD * per_step)
    for step in range(steps):
        batches = [batch(rank, step * per_step + k) for rank in range(WORLD) for k in range(per_step)]
        if gan:
            for x in batches:
                (critic(maker(x).detach()).square().mean() * share).backward()
            critics.step()
            critics.zero_grad()
        for x in batches:
            ((critic(maker(x)) - 1).square().mean() * share).backward()
        makers.step()
        if not gan:
            critics.step()
        makers.zero_grad()
        critics.zero_grad()
    both = {"maker": maker, "critic": critic}
    return {f"{which}.{n}": p.detach() for which, net in both.items() for n, p in net.named_parameters()}


def values(maker: Engine, critic: Engine) -> dict[str, torch.Tensor]:
    both = {"maker": maker, "critic": critic}
    return {f"{w}.{n}": p.float() for w, e in both.items() for n, p in e.optimizer.consolidated_parameters().items()}


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


SCALES = [(256.0, 256.0), (64.0, 1024.0), (1024.0, 64.0), (-8.0, -12.0), (None, None)]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("caller", ["maker", "critic"])
@pytest.mark.parametrize("scales", SCALES)
def test_one_backward_trains_both(stage: int, caller: str, scales: tuple[float | None, float | None]) -> None:
    """An encoder and a decoder. Powers of two change no bit: all scales come to the same parameters."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        maker, critic = (start(net, stage, scale) for net, scale in zip(nets(), scales, strict=True))
        for step in range(4):
            x = batch(rank, step)
            loss = (critic(maker(x if scales[0] is None else half(x))).float() - 1).square().mean()
            {"maker": maker, "critic": critic}[caller].backward(loss)
            maker.step()
            critic.step()
        assert maker.skipped_steps == critic.skipped_steps == 0
        return values(maker, critic)

    first, other = sim.run(WORLD, job)
    assert all(torch.equal(first[name], value) for name, value in other.items())
    near(first, plain(4), 1e-5 if scales[0] is None else 5e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("scales", SCALES)
def test_a_gan_trains_its_two_nets_in_turn(stage: int, scales: tuple[float | None, float | None]) -> None:
    """The generator's backward goes through the critic, whose gradients are dropped."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        maker, critic = (start(net, stage, scale) for net, scale in zip(nets(), scales, strict=True))
        for step in range(4):
            x = batch(rank, step) if scales[0] is None else half(batch(rank, step))
            critic.backward(critic(maker(x).detach()).float().square().mean())
            critic.step()
            maker.backward((critic(maker(x)).float() - 1).square().mean())
            maker.step()
            critic.zero_grad()
        return values(maker, critic)

    for found in sim.run(WORLD, job):
        near(found, plain(4, gan=True), 1e-5 if scales[0] is None else 5e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("fp16", [False, True])
def test_both_accumulate(stage: int, fp16: bool) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        scales = (64.0, 512.0) if fp16 else (None, None)
        maker, critic = (start(net, stage, scale, 2) for net, scale in zip(nets(), scales, strict=True))
        for step in range(4):
            x = half(batch(rank, step)) if fp16 else batch(rank, step)
            maker.backward((critic(maker(x)).float() - 1).square().mean())
            maker.step()
            critic.step()
        return values(maker, critic)

    for found in sim.run(WORLD, job):
        near(found, plain(2, 2), 5e-3 if fp16 else 1e-5)


def test_backwards_of_other_threads_are_apart() -> None:
    """What one thread's loss was multiplied by is nothing to a backward that runs beside it."""
    wrong: list[Any] = []
    begin = threading.Barrier(4)

    def run(number: int) -> None:
        x = torch.ones(1, requires_grad=True)

        def look(gradient: torch.Tensor) -> None:
            if multiplied("loss scale") != number:
                wrong.append((number, multiplied("loss scale")))

        begin.wait()
        try:
            for _ in range(300):
                y = x * 2
                y.register_hook(look)  # type: ignore[no-untyped-call]
                loss = (y * 1.0).sum()
                loss.register_hook(lambda g: note_multiplied("loss scale", float(number)))  # type: ignore[no-untyped-call]
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
