"""What a plan comes to: bytes of ranks and what they send, as a split model does; and the command that prints it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor import hub
from tests.tensor.models import Decoder, Shape, plan_of
from tests.tensor.test_loss import llama
from tests.tensor.test_splitting import shapes, tokens
from typer.testing import CliRunner

from zoo import sim
from zoo.cli import app
from zoo.comm import Communicator
from zoo.layout import split_of
from zoo.tensor import plan_of as plan_of_model
from zoo.tensor import split, summary


@given(shape=shapes(), degree=st.integers(1, 4))
@example(shape=Shape(heads=9, kv=3), degree=2)
def test_it_is_what_a_split_model_has_and_sends(shape: Shape, degree: int) -> None:
    degree = min(degree, shape.heads)
    with torch.device("meta"):
        empty = Decoder(shape)
    found = summary(empty, plan_of(shape), degree)
    ids = tokens(shape)

    def fn(rank: int) -> None:
        comm, model = Communicator(), Decoder(shape)
        split(model, plan_of(shape), comm)
        assert found.rank_bytes[rank] == sum(p.numel() * p.itemsize for p in model.parameters())
        assert found.whole_bytes == sum(p.numel() * p.itemsize for p in Decoder(shape).parameters())
        comm.log.reset()
        forward, backward = found.sent_bytes(ids.numel(), 8)
        loss = model(ids).square().sum()
        padded = degree * -(-shape.vocab // degree)  # gathered parts have one size
        if degree > 1:
            sent = sum(ops.message_bytes for ops in comm.log.ops.values())
            assert sent == forward + (padded - shape.vocab) * ids.numel() * 8
            comm.log.reset()
            loss.backward()
            assert sum(ops.message_bytes for ops in comm.log.ops.values()) == backward
            assert found.partial_bytes == sum(p.numel() * 8 for p in model.parameters() if split_of(p).partial)

    sim.run(degree, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_of_experts_it_counts_what_they_return(name: str) -> None:
    """Their hidden features may be more than those of the model."""
    model = hub.model_of(name, intermediate_size=120, **({"moe_intermediate_size": 100} if name != "gpt_oss" else {}))
    ids = torch.randint(53, (1, 4), generator=torch.Generator().manual_seed(0))
    found = summary(model, plan_of_model(model), 2)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def fn(rank: int) -> None:
        comm = Communicator()
        split(copies[rank], plan_of_model(model), comm)
        comm.log.reset()
        copies[rank](ids)
        forward, _ = found.sent_bytes(ids.numel(), 8)
        padded = 2 * -(-53 // 2) - 53
        assert sum(ops.message_bytes for ops in comm.log.ops.values()) == forward + padded * ids.numel() * 8

    sim.run(2, fn, seed=0)


@pytest.mark.dear
def test_the_command_prints_plan_bytes_and_messages(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["tensor", "plan", str(tmp_path), "--tp", "2", "--tokens", "10"])
    assert result.exit_code == 0, result.output
    said = result.output
    assert "model.layers.*.self_attn.q_proj: rows 'head dim', cut 'head'" in said
    assert "proved at degree 2" in said
    assert "a forward of 10 tokens: 3 sums of tokens x 16 and tokens x 11 gathered" in said
    assert "its backward: 3 sums of tokens x 16" in said
    asked = CliRunner().invoke(app, ["tensor", "plan", str(tmp_path / "config.json"), "--inference", "--no-prove"])
    assert asked.exit_code == 0, asked.output
    assert "backward" not in asked.output
    proved = CliRunner().invoke(app, ["tensor", "plan", str(tmp_path), "--inference"])
    assert proved.exit_code == 0, proved.output
    assert "proved at degree 2: outputs differ by" in proved.output
    wrong = CliRunner().invoke(app, ["tensor", "plan", str(tmp_path), "--tp", "5"])
    assert wrong.exit_code == 2
    assert CliRunner().invoke(app, ["tensor", "plan", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("text", ["3", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_file_that_is_no_configuration_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(app, ["tensor", "plan", str(tmp_path)])
    assert result.exit_code == 2
    assert "is no configuration of a model" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_does_not_fit_is_told() -> None:
    with torch.device("meta"):
        empty = Decoder(Shape(heads=4))
    with pytest.raises(ValueError, match="degree is at most 4"):
        summary(empty, plan_of(Shape(heads=4)), 5)
