"""CUDA graphs of forwards have the bits of forwards."""

from __future__ import annotations

import pytest
import torch
from tests.inject.models import model_of, prompts

import zoo.deepspeed as deepspeed
from zoo.inference import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("injects", [False, True])
def test_a_graph_of_a_forward_has_its_bits(dtype: torch.dtype, injects: bool) -> None:
    options = {"dtype": dtype, "kernel_inject": injects}
    plain = deepspeed.init_inference(model_of("Llama"), **options)
    engine = deepspeed.init_inference(model_of("Llama"), **options, enable_cuda_graph=True)
    inputs = {name: value.cuda() for name, value in prompts("right").items()}
    for turn in range(3):
        inputs["input_ids"] = (inputs["input_ids"] + turn) % 50
        with torch.no_grad():
            expected = plain(**inputs, use_cache=False).logits
        found = engine(**inputs, use_cache=False).logits
        assert torch.equal(found, expected)


def test_a_forward_that_waits_for_the_device_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    graphs = Graphs(Waits().cuda())
    x = torch.ones(3, device="cuda")
    assert torch.equal(graphs(x), x * 3)
    assert torch.equal(graphs(x * 2), x * 12)
    assert "is not recorded as a CUDA graph" in caplog.text
