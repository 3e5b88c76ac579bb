"""The documented functions: what ``configure`` takes, the mpu, and random states that differ between tensor ranks."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activation_checkpointing import peers
from torch import nn

from zoo import activation_checkpointing as activation
from zoo import sim
from zoo.activation_checkpointing import (
    ActivationCheckpointingConfig,
    CheckpointFunction,
    CudaRNGStatesTracker,
    checkpoint,
    configure,
    current,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)
from zoo.activation_checkpointing.storages import Contiguous, Host, Partition
from zoo.checkpointing import activation as earlier
from zoo.config import ConfigError


class Mpu:
    """Tensor ranks as Megatron-LM's has them; ``name`` is in the methods'."""

    def __init__(self, name: str, group: Any, rank: int, size: int) -> None:
        for what, value in (("group", group), ("rank", rank), ("world_size", size)):
            setattr(self, f"get_{name}_{what}", lambda value=value: value)


def test_configure_and_what_it_overrides(tmp_path: Path) -> None:
    assert not is_configured()
    document = {
        "activation_checkpointing": {
            "contiguous_memory_optimization": True, "number_checkpoints": 3, "cpu_checkpointing": False,
            "synchronize_checkpoint_boundary": True,
        },
        "train_batch_size": "auto",
    }  # fmt: skip
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(document))
    for source in (document, file, str(file)):
        configure(None, source)
        assert is_configured()
        assert isinstance(current().storage, Contiguous)
        assert current().config.number_checkpoints == 3
        assert current().config.synchronize_checkpoint_boundary
    configure(None, document, checkpoint_in_cpu=True, num_checkpoints=5, synchronize=False, profile=True)
    config = current().config
    assert (config.number_checkpoints, config.synchronize_checkpoint_boundary, config.profile) == (5, False, True)
    assert isinstance(current().storage, Host)
    configure(None, ActivationCheckpointingConfig(profile=True), profile=False)
    assert current().storage is None
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.exp, x).sum().backward()
    reset()


def test_what_configure_refuses() -> None:
    with pytest.raises(ValueError, match=r"contiguous_memory_optimization needs activation_checkpointing.number_check"):
        configure(None, contiguous_checkpointing=True)
    with pytest.raises(ConfigError, match="did you mean 'partition_activations'"):
        configure(None, {"activation_checkpointing": {"partitioned_activations": True}})
    with pytest.raises(ValueError, match="an mpu int without get_tensor_model_parallel_group"):
        configure(3)
    with pytest.raises(ValueError, match="deepspeed_config is a int; it is a path, a mapping"):
        configure(None, 3)
    assert not is_configured()


@pytest.mark.parametrize("name", ["tensor_model_parallel", "slice_parallel", "model_parallel"])
def test_the_group_of_the_mpu(name: str) -> None:
    def fn(rank: int) -> torch.Tensor:
        mpu = Mpu(name, torch.distributed.group.WORLD, rank, 2)
        if name != "model_parallel":
            mpu.get_model_parallel_group = lambda: 1 / 0  # type: ignore[attr-defined]
        configure(mpu, partition_activations=True)
        assert isinstance(current().storage, Partition)
        torch.manual_seed(4)
        x = torch.randn(4, 5, requires_grad=True)
        y = checkpoint(lambda x: x.sin().exp(), x)
        assert current().saved_bytes == x.nbytes // 2
        y.sum().backward()
        model_parallel_cuda_manual_seed(11)
        shared = torch.rand(2)
        with get_cuda_rng_tracker().fork():
            own = torch.rand(2)
        again = torch.rand(2)
        return torch.cat([x.grad.flatten(), shared, again, own])  # type: ignore[union-attr]

    first, second = sim.run(2, fn)
    assert torch.equal(first[:-2], second[:-2])
    assert not torch.equal(first[-2:], second[-2:])
    for rank, found in enumerate((first, second)):
        assert torch.equal(found[-2:], torch.rand(2, generator=torch.Generator().manual_seed(11 + 2718 + rank)))
    assert torch.equal(first[20:24], torch.rand(4, generator=torch.Generator().manual_seed(11)))
    assert not is_configured()  # what simulated ranks set is theirs


def test_settings_changed_after_configure_and_the_seed_of_tensor_ranks() -> None:
    def fn(rank: int) -> None:
        configure(Mpu("tensor_model_parallel", torch.distributed.group.WORLD, rank, 2), profile=True)
        activation.set_num_layers(4)
        activation.partition_activations_in_checkpoint(True)
        assert isinstance(current().storage, Partition)
        assert (current().config.number_checkpoints, current().config.profile) == (4, True)
        activation.partition_activations_in_checkpoint(False)
        assert current().storage is None
        with pytest.raises(ValueError, match="number_checkpoints"):
            activation.set_num_layers(0)
        with pytest.raises(ValueError, match="model_parallel_cuda_manual_seed"):
            activation.model_parallel_reconfigure_tp_seed(5)
        model_parallel_cuda_manual_seed(1)
        default = torch.get_rng_state()
        activation.model_parallel_reconfigure_tp_seed(5)
        assert torch.equal(torch.get_rng_state(), default)
        with get_cuda_rng_tracker().fork():
            drawn = torch.rand(2)
        assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(5 + 2718 + rank)))

    sim.run(2, fn)


def test_states_of_the_tracker() -> None:
    tracker = CudaRNGStatesTracker("cpu")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tracker.add("a", 1)
    tracker.add("b", 2)
    assert torch.equal(torch.get_rng_state(), before)
    saved = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
        with tracker.fork("b"):
            inner = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ArithmeticError), tracker.fork("a"):
        raise ArithmeticError
    tracker.set_states(saved)
    with tracker.fork("b"):
        assert torch.equal(torch.rand(3), inner)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    for call, words in (
        (lambda: tracker.add("a", 3), "there is a state 'a'"),
        (lambda: tracker.add("c", 2), "another state has the seed 2"),
        (lambda: tracker.fork("c").__enter__(), r"fork\('c'\): no such state; there is 'a', 'b'"),
        (lambda: setattr(tracker, "device", "meta"), "has states of cpu; reset"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    tracker.reset()
    assert tracker.get_states() == {}


def test_the_function_and_its_outputs() -> None:
    x = torch.ones(3, requires_grad=True)
    outputs: list[Any] = []
    found = CheckpointFunction.apply(lambda x: (x.exp(), "text", None), outputs, x)
    assert outputs[1:] == ["text", None]
    assert found[0] is outputs[0]
    found[0].sum().backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]
    y = non_reentrant_checkpoint(torch.exp, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.detach().exp())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.trackers: list[CudaRNGStatesTracker] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trackers.append(get_cuda_rng_tracker())
        with get_cuda_rng_tracker().fork():
            return nn.functional.dropout(self.layer(nn.functional.dropout(x, 0.5)), 0.5)


def test_the_model_parallel_state_is_replayed_too() -> None:
    torch.manual_seed(0)
    layers, x = [Dropping() for _ in range(3)], torch.randn(4, 6)
    found = []
    for how in (lambda f, x: f(x), checkpoint, lambda f, x: CheckpointFunction.apply(f, [], x)):
        model_parallel_cuda_manual_seed(5)
        leaf = x.clone().requires_grad_()
        y = leaf
        for layer in layers:
            y = how(layer, y)
        y.sum().backward()
        with get_cuda_rng_tracker().fork():
            found.append([leaf.grad, torch.get_rng_state(), torch.rand(2)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_backward_on_another_thread_draws_from_the_states_of_the_first() -> None:
    torch.manual_seed(0)
    layer, x = Dropping(), torch.randn(4, 6)
    found = []

    def forward(how: Any) -> torch.Tensor:
        model_parallel_cuda_manual_seed(5)
        leaf = x.clone().requires_grad_()
        found.append(leaf)
        return how(layer, leaf).sum()

    def on_a_thread(call: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    forward(lambda f, x: f(x)).backward()
    y = on_a_thread(lambda: forward(checkpoint))
    get_cuda_rng_tracker().reset()  # of this thread
    on_a_thread(y.backward)
    first, second, again = layer.trackers
    assert first is not second is again
    assert torch.equal(found[0].grad, found[1].grad)  # type: ignore[arg-type]


def test_every_name_is_there() -> None:
    assert all(getattr(activation, name) is not None for name in activation.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'checkpointt'"):
        _ = activation.checkpointt  # type: ignore[attr-defined]
    assert all(getattr(earlier, name) is getattr(activation, name) for name in activation.__all__)


PEERS = json.loads(peers.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(PEERS["signatures"]))
def test_arguments_are_those_of_deepspeed(name: str) -> None:
    """As DeepSpeed has them, in their order, with their defaults; peers.py says how the file came about."""
    ours, theirs = peers.signatures(activation)[name], PEERS["signatures"][name]
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] in ([], [["kwargs", int(inspect.Parameter.VAR_KEYWORD), None]])


def test_gradients_and_random_numbers_are_those_of_deepspeed() -> None:
    """With dropout by the default and by the model-parallel state of tensor rank 1."""

    def fn(rank: int) -> Any:
        configure(peers.Mpu() if rank else None)
        return peers.numbers(activation) if rank else None

    found = sim.run(2, fn)[1]
    assert len(found) == len(PEERS["numbers"])
    for ours, theirs in zip(found, PEERS["numbers"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
def test_what_is_kept_of_deepspeed_is_current() -> None:
    code = (
        "import json, logging; logging.disable(logging.CRITICAL)\n"
        "from tests.activation_checkpointing import peers\n"
        "from deepspeed.runtime.activation_checkpointing import checkpointing\n"
        "print(json.dumps(peers.signatures(checkpointing)))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout.splitlines()[-1]) == PEERS["signatures"]


def test_what_is_wrong_with_an_argument_is_one_sentence_and_changes_nothing() -> None:
    configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    before = current()
    for wrong, said in (
        (
            lambda: configure(None, num_checkpoints=0),
            r"\.number_checkpoints: given 0 .*allowed",
        ),
        (lambda: configure(None, checkpoint_in_cpu="yes"), r"given 'yes' .*allowed: bool"),  # type: ignore[arg-type]
        (lambda: activation.set_num_layers(-1), r"number_checkpoints: given -1"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()
        assert current() is before
