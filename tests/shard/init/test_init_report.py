"""What an Init tells of the initialisers that ran, and what it leaves after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import Init, PartitionedAccessError


class Writes(nn.Module):
    """Writes to its layer in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.data.zero_()
            self.layer.bias.data = torch.ones(4)
            torch.mul(self.layer.weight, 2.0)
            self.layer.bias.add_(1.0)


def test_attributes_and_functions_have_the_names_of_the_program() -> None:
    def fn(rank: int) -> Any:
        init = Init()
        with init:
            model = Writes()
        report = init.report()
        del model
        return report

    for report in sim.run(2, fn):
        names = {(t.parameter, t.function) for t in report.touches}
        assert names == {
            ("layer.weight", ".data"), ("layer.bias", ".data ="), ("layer.weight", "mul"), ("layer.bias", "add_"),
        }  # fmt: skip
        assert ("layer.bias", ".data =", True) in {(t.parameter, t.function, t.wrote) for t in report.touches}


@pytest.mark.parametrize("at_end", [False, True])
def test_after_an_error_nothing_stays_whole(at_end: bool) -> None:
    """Whether the user's code raised, or the end of Init found a view of a value that is still held."""

    def fn(rank: int) -> None:
        layers, seen = [], []

        def build() -> None:
            layers.append(nn.Linear(64, 64))
            seen.append(layers[0].weight.data)
            assert seen[0].untyped_storage().nbytes() == 64 * 64 * 4
            if not at_end:
                raise KeyError("the model's own error")

        with pytest.raises(PartitionedAccessError if at_end else KeyError), Init():
            build()
        assert seen[0].untyped_storage().nbytes() == 0

    sim.run(2, fn)
