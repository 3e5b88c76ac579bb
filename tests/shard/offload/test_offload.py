"""Tiers: wherever the state lives, the same bits come out."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws.cases import Case, cases, train_zero
from torch import nn

from zoo import sim
from zoo.checkpointing import load, save
from zoo.io import Handle, Mock, TransferError, UnavailableError
from zoo.optim import AdamW
from zoo.shard import OffloadError
from zoo.zero import DryRun, GatheredParameters, Precision, Stage3Optimizer, ZeroOptimizer, get_full_fp32_params

TIERS = ["none", "cpu", "nvme"]


def section(device: str, path: Path, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": path} if device == "nvme" else {}), **more}


@given(
    case=cases(max_world=4), stage=st.integers(1, 3), states=st.sampled_from(TIERS), parameters=st.sampled_from(TIERS),
    ratio=st.sampled_from([1.0, 0.5]), max_in_cpu=st.sampled_from([0, 50]), pipelines=st.integers(0, 3),
    sub_group=st.sampled_from([1, 40, 10**6]), low=st.booleans(), early=st.booleans(), packed=st.booleans(),
)  # fmt: skip
def test_every_tier_computes_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, case: Case, stage: int, states: str, parameters: str, ratio: float,
    max_in_cpu: int, pipelines: int, sub_group: int, low: bool, early: bool, packed: bool,
) -> None:  # fmt: skip
    if early:
        accumulation = "no_sync" if case.accumulation == "backwards" else case.accumulation
        case = replace(case, clip_norm=0.0, accumulation=accumulation)
    if low:
        case = replace(case, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("nvme")
    optimizer = section(
        states, folder, ratio=ratio, pipeline_read=bool(pipelines & 1), pipeline_write=bool(pipelines & 2)
    )
    same: dict[str, Any] = {"sub_group_size": sub_group, "zero_quantized_nontrainable_weights": packed and stage == 3}
    options: dict[str, Any] = {"offload_optimizer": optimizer, **same}
    if stage == 3:
        options["offload_param"] = section(parameters, folder, max_in_cpu=max_in_cpu)

    def offloaded(rank: int) -> Any:
        # A device that answers out of order, and with less than it was asked for.
        with Handle(backend=Mock(seed=case.seed, short=0.2), direct="never") as handle:
            return train_zero(case, stage, rank, aio=handle, update_in_backward=early, **options)

    expected = sim.run(case.world, lambda rank: train_zero(case, stage, rank, **same))
    found = sim.run(case.world, offloaded)
    for (values, history), (other, other_history) in zip(found, expected, strict=True):
        assert history == other_history
        for name, value in values.items():
            assert torch.equal(value, other[name]), name
    assert list(folder.iterdir()) == []


# What goes wrong -----------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def build(folder: Path, handle: Handle | None = None, **more: Any) -> tuple[nn.Sequential, ZeroOptimizer]:
    model = net()
    options = {
        "offload_optimizer": section("nvme", folder), "offload_param": section("nvme", folder, max_in_cpu=0),
        "param_persistence_threshold": 0, "reduce_bucket_size": 1100, "sub_group_size": 1100, "lr": 0.01, "aio": handle,
    }  # fmt: skip
    return model, Stage3Optimizer(model, optimizer=AdamW, **{**options, **more})


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_state_is_really_on_the_device(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    train(model, optimizer, range(2))
    memory = optimizer.memory()
    elements = sum(p.numel() for p in model.parameters())
    assert memory["nvme"] >= 16 * elements  # parameters, gradients, two moments
    assert memory["parameters"] == memory["gradients"] == 0
    assert memory["optimizer"] < 100  # numbers of steps
    assert optimizer.sharded.scratch.pool.stats().peak_bytes <= optimizer.updater.buffer_bytes()
    optimizer.close()


def test_nothing_grows(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    train(model, optimizer, range(3))
    optimizer.updater.settle()
    pool = optimizer.sharded.scratch.pool
    before, files = pool.stats(), len(os.listdir("/proc/self/fd"))
    train(model, optimizer, range(3, 40))
    optimizer.updater.settle()
    after = pool.stats()
    assert after.reserved_bytes == before.reserved_bytes
    assert after.in_use_bytes == before.in_use_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == files
    optimizer.close()


@pytest.mark.parametrize(
    ("path", "words"), [("nowhere", "does not exist; make it"), ("file", "is not a directory; make it")]
)
def test_a_bad_path_is_named(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=words):
        build(tmp_path / path)
    with pytest.raises(ValueError, match="nvme_path, a directory on the device"):
        Stage3Optimizer(net(), offload_param={"device": "nvme"})
    with pytest.raises(ValueError, match="offload_param needs stage 3"):
        ZeroOptimizer(net(), stage=2, offload_param={"device": "cpu"})


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"bytes free, and parameters of this rank take 32,768"),
        (errno.EROFS, "cannot be written to"),
        (errno.EFBIG, r"parameters of this rank take 32,768 bytes, more than the limit of a file's size .*ulimit -f"),
        (errno.EDQUOT, r"parameters of this rank take 32,768 bytes, more than the quota of this user allows"),
    ],
)
def test_a_full_or_read_only_device_is_named_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OffloadError, match=words):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_handle_that_cannot_use_the_folder_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that demands to go past the page cache where a file system refuses that; a closed one opens nothing."""
    with Handle() as handle:

        def refuse(*args: Any) -> None:
            raise UnavailableError("direct transfers were demanded and are refused")

        monkeypatch.setattr(handle, "open", refuse)
        with pytest.raises(OffloadError, match=r"cannot be used for parameters: direct transfers were demanded"):
            build(tmp_path, handle)
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
    with pytest.raises(ValueError, match="the handle is closed; make a new one"):
        build(tmp_path, handle)
    assert list(tmp_path.iterdir()) == []


def test_a_cap_that_is_too_small_is_an_error_with_the_need(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        OffloadError, match=r"buffers of an update take 86,016 more, bounce buffers 2,097,152. Raise the cap"
    ):
        build(tmp_path, offload_host_bytes=(2 << 20) + 16384)
    caplog.clear()
    model, optimizer = build(tmp_path, offload_host_bytes=(2 << 20) + 21 * 4096)
    assert "offload_host_bytes leaves 0 bytes beside the 2,183,168" in caplog.text
    train(model, optimizer, range(2))
    caplog.clear()
    build(tmp_path, offload_host_bytes=(2 << 20) + 27 * 4096)
    assert caplog.text == ""


@pytest.mark.matrix
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("after", range(0, 24, 3))
@pytest.mark.parametrize("early", [False, True])
def test_a_device_that_fails_loses_nothing_that_was_saved(
    tmp_path: Path, direction: Any, after: int, early: bool
) -> None:
    """After any failure: an OffloadError, refusal to go on with half a step, and the checkpoint continues exactly."""
    model, healthy = build(tmp_path, update_in_backward=early)
    train(model, healthy, range(2))
    saved = healthy.state_dict()
    expected = train(model, healthy, range(2, 5))

    model, optimizer = build(tmp_path, update_in_backward=early)
    optimizer.load_state_dict(saved)
    failing = Failing(optimizer.sharded.scratch.handle, direction, after)
    for nvme_file in optimizer.sharded.scratch._nvme_files:
        nvme_file._handle = failing
    with pytest.raises(OffloadError, match=r"continue from the last checkpoint|go through the backward again"):
        train(model, optimizer, range(2, 5))
    failing.left = 10**9
    if optimizer.updater.broken is not None:
        with pytest.raises(OffloadError, match="incomplete since a step failed"):
            optimizer.step()
        with pytest.raises(OffloadError, match="incomplete since a step failed"):
            optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert train(model, optimizer, range(2, 5)) == expected


class Failing:
    """A handle whose transfers of one direction fail once, after ``left`` others."""

    def __init__(self, handle: Handle, direction: str, left: int) -> None:
        self._handle, self._direction, self.left = handle, direction, left

    def async_pread(self, *args: Any, urgent: bool) -> Any:
        return self._one("read", partial(self._handle.async_pread, urgent=urgent), args)

    def async_pwrite(self, *args: Any, urgent: bool) -> Any:
        return self._one("write", partial(self._handle.async_pwrite, urgent=urgent), args)

    def _one(self, direction: str, function: Any, args: tuple[Any, ...]) -> Any:
        if direction == self._direction:
            self.left -= 1
            if self.left == -1:
                return Failed()
        return function(*args)


class Failed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise TransferError("the device gave up: Input/output error (os error 5)", errno.EIO, "x", 0, 1)


def test_a_checkpoint_reads_what_it_writes_when_it_writes_it(tmp_path: Path) -> None:
    """Saving holds one tensor at a time, and the checkpoint continues without offloading too."""
    (tmp_path / "nvme").mkdir()
    model, optimizer = build(tmp_path / "nvme")
    train(model, optimizer, range(2))
    pool = optimizer.sharded.scratch.pool
    save(tmp_path / "saved", "one", optimizer.state_slices(), optimizer.state_scalars())
    assert pool.stats().in_use_bytes == 0
    expected = train(model, optimizer, range(2, 4))
    found = load(tmp_path / "saved")
    for options in ({}, {"offload_optimizer": section("none", tmp_path), "offload_param": section("none", tmp_path)}):
        model, again = build(tmp_path / "nvme", **options)
        again.load_state(found.read, found.scalars)
        assert train(model, again, range(2, 4)) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("parameters", ["none", "cpu", "nvme"])
def test_what_is_saved_before_the_first_step_is_what_there_is(
    tmp_path: Path, width: int, optimizer: Any, parameters: str
) -> None:
    """There is no master on NVMe yet."""

    def one() -> tuple[nn.Linear, ZeroOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(width, 1, bias=False).bfloat16()
        return model, Stage3Optimizer(
            model, optimizer=optimizer, lr=0.01, param_persistence_threshold=0,
            offload_optimizer=section("nvme", tmp_path), offload_param=section(parameters, tmp_path, max_in_cpu=0),
        )  # fmt: skip

    def step(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
        model(torch.ones(2, width).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    model, first = one()
    original = first.consolidated_parameters()["weight"]
    saved = first.state_dict()
    whole = torch.cat([t for key, t in saved["slices"].items() if key.startswith("parameter|")])
    assert torch.equal(whole.to(torch.bfloat16), original.flatten())
    expected = [step(model, first), step(model, first)]
    for number in range(2):  # once after steps, once before any
        model, again = (model, first) if number == 0 else one()
        again.load_state_dict(saved)
        assert torch.equal(again.consolidated_parameters()["weight"], original)
        once = again.state_dict()
        assert torch.equal(torch.cat([t.to(torch.bfloat16) for t in once["slices"].values()]), original.flatten())
        for wanted in expected:
            assert torch.equal(step(model, again)["weight"], wanted["weight"])


@pytest.mark.matrix
@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("parameters", TIERS)
@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
def test_masters_are_saved_in_fp32_wherever_they_are(
    tmp_path: Path, states: str, parameters: str, optimizer: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 8, bias=False).bfloat16()
    opt = Stage3Optimizer(
        model, optimizer=optimizer, lr=1e-4, param_persistence_threshold=0, offload_optimizer=section(states, tmp_path),
        offload_param=section(parameters, tmp_path, **({"max_in_cpu": 0} if parameters == "nvme" else {})),
    )  # fmt: skip
    model(torch.ones(2, 32).bfloat16()).float().square().mean().backward()
    opt.step()
    (value,) = (s.tensor for s in opt.state_slices() if s.role == "parameter")
    assert value.dtype is torch.float32
    assert not torch.equal(value, value.bfloat16().float())
    assert torch.equal(value.bfloat16(), opt.consolidated_parameters()["weight"].flatten())


def test_a_gradient_that_is_emptied_goes_back_to_its_file(tmp_path: Path) -> None:
    """``parameter.grad = None`` of one of several parameters: the others count, this one as zero."""

    def fn(rank: int, folder: Path | None) -> dict[str, torch.Tensor]:
        model = net()
        where = {"offload_optimizer": section("nvme", folder)} if folder is not None else {}
        optimizer = Stage3Optimizer(model, optimizer=AdamW, lr=0.01, **where)
        model(torch.ones(4, 32)).square().mean().backward()
        in_memory = optimizer.memory()["gradients"]
        model[1].weight.grad = None
        assert optimizer.memory()["gradients"] == in_memory
        assert (in_memory == 0) == (folder is not None)
        optimizer.step()
        return optimizer.consolidated_parameters()

    expected = sim.run(2, lambda rank: fn(rank, None))[0]
    assert torch.equal(expected["1.weight"], net()[1].weight * (1 - 0.01 * 0.01))
    for found in sim.run(2, lambda rank: fn(rank, tmp_path)):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_for_gpus_has_the_states_on_the_host(stage: int, dtype: torch.dtype) -> None:
    """Made from a model without memory: the host keeps two moments and the values that are updated, in fp32."""
    with torch.device("meta"):
        model = net().to(dtype)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.AdamW, lr=0.01, offload_optimizer={"device": "cpu"},
        group=DryRun(4, device_type="cuda"),
    )  # fmt: skip
    elements = sum(b.layout.size for b in optimizer.buckets) // 4
    counter, gradients = 4, elements * dtype.itemsize if stage > 1 else 0
    assert optimizer.forecast().tiers["host"] == 3 * 4 * elements + counter + gradients


@pytest.mark.matrix
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_close_goes_on_where_a_device_failed(tmp_path: Path, param_dtype: torch.dtype | None, world: int) -> None:
    def fn(rank: int, after: int) -> None:
        model, optimizer = build(tmp_path, precision=Precision(param=param_dtype))
        train(model, optimizer, range(1))
        expected = {n: p.clone() for n, p in get_full_fp32_params(model.parameters()) if p is not None}
        failing = Failing(optimizer.sharded.scratch.handle, "read", after if rank == 0 else 10**9)  # type: ignore[union-attr]
        for nvme_file in optimizer.sharded.scratch._nvme_files:  # type: ignore[union-attr]
            nvme_file._handle = failing  # type: ignore[assignment]
        if rank == 0:
            with pytest.raises(OffloadError, match="the device gave up"):
                optimizer.close()
            with pytest.raises(ValueError, match="closed"):
                optimizer.step()
        optimizer.close()
        optimizer.close()
        for name, value in model.named_parameters():
            assert type(value) is nn.Parameter
            assert torch.equal(value, expected[name]), name
        model(torch.ones(1, 32))

    for after in range(3):
        sim.run(world, partial(fn, after=after))


def test_gathered_holds_nothing_where_a_device_failed(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    scratch: Any = optimizer.sharded.scratch
    for hold in (optimizer.gathered(), GatheredParameters(list(model.parameters()))):
        failing = Failing(scratch.handle, "read", 1)
        for nvme_file in scratch._nvme_files:
            nvme_file._handle = failing
        with pytest.raises(OffloadError, match="the device gave up"), hold:
            pass
        assert not any(b.active or (b.partitioned and b.parameters.live) for b in optimizer.buckets)
    train(model, optimizer, range(1))
