"""Sequences that ranks share: the values and gradients of the whole, and of one rank with all of them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo.deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from zoo.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from zoo.deepspeed.sequence.layer import DistributedAttention, apply_rotary_pos_emb

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """(B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def tensors(heads: int, groups: int, length: int = 8) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    return [torch.randn(2, h, length, 4, generator=dice, dtype=torch.float64) for h in (heads, groups, groups)]


def of_whole(given: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    whole = [t.clone().requires_grad_() for t in given]
    out = attend(*whole)
    out.square().sum().backward()
    return out.detach(), [t.grad for t in whole if t.grad is not None]


@pytest.mark.parametrize(("ranks", "heads", "groups"), [(2, 4, 4), (2, 4, 2), (4, 4, 2), (4, 8, 1)])
def test_ulysses_is_the_attention_of_the_whole_sequence(ranks: int, heads: int, groups: int) -> None:
    """Keys and values with fewer heads than ranks too; gradients are those of the whole, each rank's tokens."""
    given = tensors(heads, groups)
    expected, grads = of_whole(given)

    class Layer(nn.Module):
        num_key_value_groups = heads // groups

    def core(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        assert mask is None
        assert kwargs["position_ids"].tolist() == [list(range(8))] * 2
        assert module.num_key_value_groups == q.shape[1] // k.shape[1]
        return attend(q, k, v).transpose(1, 2), "weights"

    def job(rank: int) -> None:
        sequence_ranks.initialize_sequence_parallel(ranks)
        assert sequence_ranks.get_sequence_parallel_rank() == sequence_ranks.get_sequence_data_parallel_rank() == rank
        with pytest.raises(AssertionError, match="called before"):
            sequence_ranks.initialize_sequence_parallel(ranks)
        group = sequence_ranks.get_sequence_parallel_group()
        attention = UlyssesSPAttentionHF(core, 2, heads, 4, groups, 1, group, seq_length_is_variable=True)
        here = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
        own = [t[:, :, here].clone().requires_grad_() for t in given]
        positions = torch.arange(8).repeat(2, 1)[:, here]
        layer = Layer()
        out, weights = attention(layer, *own, None, position_ids=positions)
        assert (weights, layer.num_key_value_groups) == ("weights", heads // groups)
        torch.testing.assert_close(out, expected.transpose(1, 2)[:, here].flatten(2))
        out.square().sum().backward()
        for part, grad in zip(own, grads, strict=True):
            torch.testing.assert_close(part.grad, grad[:, :, here])
        with pytest.raises(AssertionError, match="need position_ids"):
            attention(layer, *own, None)
        fixed = UlyssesSPAttentionHF(core, 2, heads, 4, groups, 1, group, False, 5, 5 * ranks, disable_in_eval=True)
        with pytest.raises(ValueError, match="was made for 5"):
            fixed(layer, *own, None, position_ids=positions)
        whole = torch.arange(8).repeat(2, 1)
        alone, _ = fixed(layer.eval(), *given, None, position_ids=whole)
        torch.testing.assert_close(alone, expected.transpose(1, 2))

    sim.run(ranks, job)


@pytest.mark.parametrize(("seq", "head"), [(0, 2), (1, 2)])
def test_distributed_attention(seq: int, head: int) -> None:
    """(S, B, H, D) and (B, S, H, D)."""
    given = tensors(4, 4)
    expected, grads = of_whole(given)
    order = (2, 0, 1, 3) if seq == 0 else (0, 2, 1, 3)
    back = (1, 2, 0, 3) if seq == 0 else (0, 2, 1, 3)

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return attend(*(t.permute(back) for t in (q, k, v)), causal=causal).permute(order)

    def job(rank: int) -> None:
        import torch.distributed as dist

        attention = DistributedAttention(local, dist.group.WORLD, head, seq)
        here = slice(4 * rank, 4 * rank + 4)
        own = [t[:, :, here].permute(order).clone().requires_grad_() for t in given]
        out = attention(*own, causal=True)
        torch.testing.assert_close(out, expected[:, :, here].permute(order))
        out.square().sum().backward()
        for part, grad in zip(own, grads, strict=True):
            torch.testing.assert_close(part.grad, grad[:, :, here].permute(order))
        angles = torch.arange(8, dtype=torch.float64).view(8, 1, 1, 1).expand(8, 1, 1, 2)
        turned = [apply_rotary_pos_emb(t.permute(2, 0, 1, 3), angles.cos(), angles.sin()) for t in given[:2]]
        whole = [*(t.permute(1, 2, 0, 3) for t in turned), given[2]]
        out = attention(*own, 0, (angles.cos(), angles.sin()), causal=True)
        torch.testing.assert_close(out, attend(*whole)[:, :, here].permute(order))
        with pytest.raises(NotImplementedError, match="sp_stream"):
            DistributedAttention(local, dist.group.WORLD, sp_stream=3)

    sim.run(2, job)


def test_batches_of_shared_sequences() -> None:
    """Lengths differ over ranks and batches; each rank sees its tokens of every rank's batch, and the next epoch."""

    def batch(rank: int, number: int) -> dict[str, Any]:
        length = 4 + 2 * rank + 2 * number
        ids = torch.arange(2 * length).view(2, length) + 100 * rank + 1000 * number
        positions = torch.arange(length).repeat(2, 1)
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "name": f"{rank}.{number}"}

    def job(rank: int) -> None:
        group = torch.distributed.group.WORLD
        loader = [batch(rank, 0), batch(rank, 1)]
        adapter = UlyssesSPDataLoaderAdapter(loader, rank, group, 2, "cpu")
        assert len(adapter) == 4
        for _ in range(2):
            seen = list(adapter)
            assert [one["name"] for one in seen] == ["0.0", "1.0", "0.1", "1.1"]
            for k, one in enumerate(seen):
                whole = batch(k % 2, k // 2)["input_ids"]
                half = whole.shape[1] // 2
                here = slice(half * rank, half * (rank + 1))
                assert torch.equal(one["input_ids"], whole[:, here])
                after = torch.cat([whole[:, 1:], torch.full((2, 1), -100)], dim=1)
                assert torch.equal(one["shift_labels"], after[:, here])
                assert one["position_ids"][0].tolist() == list(range(half * rank, half * (rank + 1)))
                assert "labels" not in one
        odd = {name: t[:, :3] for name, t in batch(0, 0).items() if name != "name"}
        for wrong, said in (
            ([{"input_ids": odd["input_ids"]}], "has no position_ids"),
            ([odd], "pad to a multiple"),
            ([{**batch(0, 0), "more": torch.ones(2, 9)}], "more has the shape"),
        ):
            with pytest.raises(ValueError, match=said):
                next(UlyssesSPDataLoaderAdapter(wrong, rank, group, 2, "cpu"))

    sim.run(2, job)


def test_batches_of_ranks_are_the_same_by_name_and_end_together(caplog: pytest.LogCaptureFixture) -> None:
    def plain(rank: int) -> dict[str, Any]:
        ids = 10 * rank + torch.arange(4).view(1, 4)
        return {"input_ids": ids, "position_ids": torch.arange(4).view(1, 4), "labels": ids + 100}

    def fails() -> Any:
        raise OSError("no disk")
        yield

    def job(rank: int) -> None:
        group = torch.distributed.group.WORLD
        turned = dict(reversed(plain(rank).items())) if rank else plain(rank)
        adapter = UlyssesSPDataLoaderAdapter([turned] * (1 + rank), rank, group, 2, "cpu")
        for _ in range(2):  # rank 1's second batch has no partner
            seen = list(adapter)
            assert [one["input_ids"].tolist() for one in seen] == [[[k + 2 * rank, k + 2 * rank + 1]] for k in (0, 10)]
            assert [one["shift_labels"][0, 0].item() for one in seen] == [101 + 2 * rank, 111 + 2 * rank]
        for name in ("input_ids", "position_ids", "labels"):  # told to the rank that has them
            lacks = {key: value for key, value in plain(rank).items() if rank == 0 or key != name}
            with pytest.raises(ValueError, match=f"rank 1 got a batch .* has no {name}"):
                next(UlyssesSPDataLoaderAdapter([lacks], rank, group, 2, "cpu"))
        with pytest.raises(ValueError, match=r"rank 0 got a batch that is a tuple; .* rank 1 got a batch that"):
            next(UlyssesSPDataLoaderAdapter([(torch.ones(1, 4),)], rank, group, 2, "cpu"))
        with pytest.raises(OSError if rank else ValueError, match="no disk"):
            next(UlyssesSPDataLoaderAdapter(fails() if rank else [plain(rank)], rank, group, 2, "cpu"))
        other = {**plain(rank), "labels": plain(rank)["labels"].int()} if rank else plain(rank)
        with pytest.raises(ValueError, match=r"differ in what they have: rank 0 has .*'labels': 'int64 \(B, S\)'"):
            next(UlyssesSPDataLoaderAdapter([other], rank, group, 2, "cpu"))

    sim.run(2, job)
    assert "ranks [1] have batches that nobody gets" in caplog.text


def test_a_module_with_shared_attention_is_copied() -> None:
    def job(rank: int) -> None:
        made = DistributedAttention(nn.Identity(), torch.distributed.group.WORLD)  # type: ignore[arg-type]
        other = copy.deepcopy(nn.ModuleList([made]))[0]
        assert other.spg is made.spg
        assert other.local_attn is not made.local_attn

    sim.run(2, job)


def test_wrong_numbers_of_ranks_and_heads() -> None:
    def job(rank: int) -> None:
        with pytest.raises(AssertionError, match="call initialize_sequence_parallel"):
            sequence_ranks.get_sequence_parallel_group()
        with pytest.raises(ValueError, match="2 or more"):
            sequence_ranks.initialize_sequence_parallel(1)
        with pytest.raises(RuntimeError, match="not divisible"):
            sequence_ranks.initialize_sequence_parallel(2)
        world = torch.distributed.group.WORLD
        with pytest.raises(ValueError, match="4 heads over 3 ranks"):
            UlyssesSPAttentionHF(attend, 1, 4, 4, 4, 1, world)
        with pytest.raises(ValueError, match="one of the two divides"):
            UlyssesSPAttentionHF(attend, 1, 6, 4, 2, 1, world)

    sim.run(3, job)


class Shared(nn.Module):
    """Half of each sequence on a rank: its loss is the mean over its tokens."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.group is None:
            return attend(q, k, v).square().mean()
        attention = UlyssesSPAttentionHF(
            lambda module, q, k, v, mask, **_: (attend(q, k, v).transpose(1, 2), None), 1, 2, 4, 2, 1, self.group, True
        )
        positions = torch.arange(x.shape[1]).repeat(len(x), 1)
        return attention(self, q, k, v, None, position_ids=positions)[0].square().mean()


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_mpu_whose_ranks_share_sequences(stage: int) -> None:
    """Two replicas of two ranks: as one rank with all sequences."""
    document = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": stage},
        "sequence_parallel_size": 2,
    }  # fmt: skip
    dice = torch.Generator().manual_seed(1)
    steps = [torch.randn(2, 4, 8, generator=dice) for _ in range(3)]

    def job(rank: int) -> torch.Tensor:
        sequence_ranks.initialize_sequence_parallel(2)
        model = Shared(sequence_ranks.get_sequence_parallel_group())
        engine = deepspeed.initialize(model=model, config=document, mpu=sequence_ranks)[0]
        assert (engine.mp_world_size, engine.sequence_parallel_size) == (1, 2)  # all have the same layers
        assert engine.checkpoint_mp_rank == 0
        assert (engine.sequence_parallel_size, engine.train_batch_size(), engine.dp_world_size) == (2, 2, 4)
        assert engine.seq_parallel_group.size() == engine.get_sequence_parallel_group().size() == 2
        for x in steps:
            engine.backward(engine(x[rank // 2 : rank // 2 + 1, rank % 2 * 2 : rank % 2 * 2 + 2]))
            engine.step()
        found: torch.Tensor = engine.engine.module_state_dict()["qkv.weight"]
        return found

    alone = Shared(None)
    for x in steps:
        alone(x).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.5 * p.grad  # type: ignore[operator]
        alone.zero_grad()
    for weight in sim.run(4, job):
        torch.testing.assert_close(weight, alone.qkv.weight.detach(), rtol=1e-5, atol=1e-6)


def test_mpus_that_are_refused() -> None:
    def job(rank: int) -> None:
        from zoo.comm.groups import make_groups

        group = make_groups([[0, 2], [1, 3]], "far", None)
        mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_sequence_parallel_group=lambda: group)
        with pytest.raises(ConfigError, match="consecutive ones can"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4}, mpu=mpu)
        megatron = SimpleNamespace(
            get_sequence_parallel_world_size=lambda: 2,
            get_sequence_parallel_group=lambda: torch.distributed.group.WORLD,
            get_sequence_data_parallel_group=lambda: group,
        )
        with pytest.raises(NotImplementedError, match="others share layers"):
            deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4}, mpu=megatron)
        near = make_groups([[0, 1], [2, 3]], "near", None)
        mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_sequence_parallel_group=lambda: near)
        for more, said in (
            ({"mesh": {"axes": {"data": 4}}}, "leave the mpu out, or the section"),
            ({"seq_parallel_communication_data_type": "bf16"}, "in the type that they have"),
        ):
            with pytest.raises(ConfigError, match=said):
                deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4, **more}, mpu=mpu)

    sim.run(4, job)
