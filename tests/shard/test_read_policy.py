"""Who gets what when a program reads what is not on this rank: the model's one policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.shard import PartitionedAccessError, ReadPolicy
from zoo.zero import Stage1Optimizer, Stage2Optimizer, Stage3Optimizer


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_names_are_for_whom_the_policy_names() -> None:
    def of_rank(rank: int) -> None:
        model = small()
        sharded = Stage3Optimizer(model, lr=0.01, param_persistence_threshold=0).sharded
        for policy in (ReadPolicy(), ReadPolicy(names_for=("another.",))):
            sharded.reads = policy
            with pytest.raises(PartitionedAccessError, match="only a shard of it"):
                model.state_dict()
        for names_for in (("another.", __name__), None):
            sharded.reads = ReadPolicy(names_for=names_for)
            found = model.state_dict()
            assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
            assert all(tensor.is_meta for tensor in found.values())
            assert found["1.weight"].shape == (2, 4)

    sim.run(2, of_rank)


@pytest.mark.parametrize("kind", [Stage1Optimizer, Stage2Optimizer, Stage3Optimizer])
def test_partitioned_gradients_are_none_where_the_policy_says_so(kind: type[Stage2Optimizer]) -> None:
    def of_rank(rank: int) -> None:
        model = small()
        optimizer = kind(model, lr=0.01)
        optimizer.backward(model(torch.full((2, 4), rank + 1.0)).sum())
        weight = model[0].weight
        assert weight.grad is not None
        with pytest.raises(PartitionedAccessError):
            weight.grad.sum()
        optimizer.sharded.reads = ReadPolicy(gradients=False)
        assert weight.grad is None

    sim.run(2, of_rank)
