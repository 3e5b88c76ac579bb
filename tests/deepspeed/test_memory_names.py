"""Host memory, hooks on backward, and what checkpointed layers keep: what programs rely on."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo.deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from zoo.deepspeed.runtime.utils import count_used_parameters_in_backward, register_output_backward_hooks
from zoo.deepspeed.utils import pin_memory, pin_memory_tracker

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.activation_checkpointing.storages import Held


def test_hooks_on_outputs_see_each_backward_begin_and_each_gradient() -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    x, seen = torch.randn(2, 3), []
    out = {"a": a(x), "more": [b(x), torch.ones(2), (None, "text")]}

    def each(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(gradient.shape))
        return gradient * 2

    hooks = register_output_backward_hooks(out, lambda: seen.append("begin"), each)
    (out["a"].sum() + out["more"][0].sum()).backward(retain_graph=True)
    assert seen == ["begin", (2, 3), (2, 3)]
    assert torch.equal(a.bias.grad, torch.full((3,), 4.0)), "what the function returns takes the gradient's place"
    out["a"].sum().backward(retain_graph=True)
    assert seen[3:] == ["begin", (2, 3)]
    hooks.remove_hooks()
    out["a"].sum().backward()
    assert len(seen) == 5
    register_output_backward_hooks([torch.ones(2), "nothing that needs a gradient"], pytest.fail)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_a_backward_reaches_are_counted_at_every_stage(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)), nn.Linear(4, 4)
            self.used[1].bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def count(rank: int) -> list[int]:
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=Net(), config=config)
        seen: list[int] = []
        out = engine(torch.randn(2, 5))
        register_output_backward_hooks(
            out, lambda: seen.append(count_used_parameters_in_backward(list(engine.parameters())))
        )
        engine.backward(out.square().mean())
        engine.step()
        return seen

    assert sim.run(2, count) == [[3], [3]]
    with pytest.raises(RuntimeError, match="asks the backward that is running, and none is"):
        count_used_parameters_in_backward([])


def test_the_engine_says_the_level_of_the_log_that_its_configuration_asks_for() -> None:
    def level(rank: int, **more: Any) -> Any:
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, **more}
        return deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0].log_level()

    before = logging.getLogger("DeepSpeed").level
    try:
        assert sim.run(1, level) == [None]
        assert sim.run(1, lambda rank: level(rank, log_level="info")) == ["info"]
    finally:
        logging.getLogger("DeepSpeed").setLevel(before)


def test_pinned_tensors_are_of_one_pool_that_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.deepspeed.adapters.zero import pinned

    monkeypatch.setattr(pinned, "_active", [])
    assert pin_memory.get_active_native_pinned_memory() is None
    memory = pin_memory.get_native_pinned_memory()
    assert pin_memory.get_active_native_pinned_memory() is memory
    x = torch.arange(6.0).view(2, 3)
    same, flat, other = memory.pin(x), memory.pin(x, match_shape=False), memory.pin(x.t(), make_copy=False)
    assert torch.equal(same, x)
    assert torch.equal(flat, x.reshape(-1))
    assert other.shape == (3, 2)
    assert torch.equal(memory.pin(x.t()), x.t())
    made = memory.pin_empty(x.half(), (4, 5))
    assert (made.shape, made.dtype, made.data_ptr() % 4096) == ((4, 5), torch.half, 0)
    for mine in (same, flat, other, made, made[1:]):
        assert memory.is_pinned(mine)
    for mine in (same, flat, other, made):
        assert memory.unpin(mine)
        assert not memory.is_pinned(mine)
    assert not memory.is_pinned(x)
    assert not memory.unpin(x)


def test_the_account_of_pinned_memory_goes_into_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from zoo.deepspeed.adapters.zero import pinned

    monkeypatch.setattr(pinned, "_counted", [0, 0])
    monkeypatch.setattr(deepspeed.logger, "propagate", True)
    pin_memory_tracker.track_pinned_memory(3 << 29)
    pin_memory_tracker.track_pinned_memory(3 << 29)
    with caplog.at_level(logging.INFO, logger=deepspeed.logger.name):
        pin_memory_tracker.pinned_memory_summary("after step 1")
    assert "after step 1: page-locked memory: 3.000 GiB in 2 tensors" in caplog.text


class GradientCheckpointingLayer(nn.Module):
    """As in transformers: a layer that checkpoints its own forward."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.work, x, use_reentrant=False)


class Elsewhere:
    """A storage that counts, and puts values where the tensors of the program are not."""

    fetches = True

    def __init__(self) -> None:
        self.living, self.log = 0, []

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        storage, values = self, flat.clone()
        storage.living += 1
        number = len([what for what, _ in storage.log if what == "put"])
        storage.log.append(("put", number))

        class Here:
            num_bytes = values.nbytes

            def fetch(self) -> None:
                storage.log.append(("fetch", number))

            def get(self) -> torch.Tensor:
                storage.log.append(("get", number))
                return values.clone()

            def __del__(self) -> None:
                storage.living -= 1

        return Here()

    def reset(self) -> None:
        self.log.clear()


class Offload(CheckpointHiddenStatesOffload):
    """As if the tensors of this machine were a GPU's."""

    def _travels(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= self.min_offload_bytes


def model_and_gradients() -> tuple[nn.Sequential, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(GradientCheckpointingLayer() for _ in range(4)), nn.Linear(8, 1))
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    return model, x, [p.grad.clone() for p in model.parameters()]


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.matrix
@pytest.mark.parametrize("keep", [0, 1, 3, 9])
def test_inputs_of_checkpointed_layers_wait_elsewhere_and_gradients_are_the_same(keep: int) -> None:
    model, x, expected = model_and_gradients()
    with Offload(min_offload_bytes=0, keep_last_count=keep) as offload:
        offload.storage = storage = Elsewhere()
        for _ in range(3):  # what waits ends with the graph of its step
            assert all(map(torch.equal, run(model, x), expected))
            gc.collect()
            assert storage.living == 0
    moved = max(4 - keep, 0)
    assert offload.stats.marked_tensors == 12
    assert offload.stats.offloaded_tensors == offload.stats.restored_tensors == 3 * moved
    assert offload.stats.offloaded_bytes == 3 * moved * x.nbytes
    first = storage.log[: 2 * moved + max(moved - (keep == 0), 0)]
    assert [n for what, n in first if what == "put"] == list(range(moved))
    assert [n for what, n in first if what == "get"] == list(range(moved))[::-1], "from the last to the first"
    for number in range(moved - 1):
        assert first.index(("fetch", number)) < first.index(("get", number + 1)), "one ahead"


def test_small_tensors_and_those_of_the_cpu_stay_and_nothing_is_left_behind() -> None:
    model, x, expected = model_and_gradients()
    with Offload(min_offload_bytes=10**6) as offload:
        assert all(map(torch.equal, run(model, x), expected))
    assert offload.stats.skipped_marked_tensors == 4
    with get_checkpoint_hidden_states_offloading_ctx_manager(min_offload_bytes=0) as offload:
        assert all(map(torch.equal, run(model, x), expected))
        with pytest.raises(RuntimeError, match="entered already, and is not re-entrant"), offload:
            pass
    assert offload.stats.skipped_marked_tensors == 4
    seen = offload.stats.saved_tensors_seen
    run(model, x)
    assert offload.stats.saved_tensors_seen == seen, "outside of it nothing is hooked"
    with offload:  # again
        run(model, x)
    offload.reset()
    assert offload.stats.saved_tensors_seen == 0
    with pytest.raises(ValueError, match="both are 0 or more"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)


def test_a_tensor_that_is_marked_by_hand_goes_too() -> None:
    w = torch.randn(16, 16, requires_grad=True)
    with Offload(min_offload_bytes=0, keep_last_count=0) as offload:
        offload.storage = Elsewhere()
        kept = torch.randn(16, 16).t()
        offload.mark(kept)
        out = (w * kept).sum()
    out.backward()
    assert torch.equal(w.grad, kept)
    assert offload.stats.restored_tensors == 1
