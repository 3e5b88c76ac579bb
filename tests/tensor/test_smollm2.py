"""SmolLM2-135M with its weights, 9 heads of 3 keys and values, at degrees 1 to 4: as exact as transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.smollm2 import needs_weights
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.checkpointing.foreign import load_safetensors
from zoo.comm import Communicator
from zoo.examples.smollm2 import SmolLM2Task
from zoo.tensor import in_parts, load, parameters_on_meta, plan_of, prove, split
from zoo.zero import ZeroOptimizer

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, needs_weights]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers reads it."""
    found = tmp_path_factory.mktemp("smollm2")
    task = SmolLM2Task(SmolLM2Task.Config(num_validation_windows=4), seed=0)
    weights = {name: value.detach() for name, value in task.model().named_parameters()}
    safetensors.torch.save_file(weights, found / "model.safetensors", {"format": "pt"})
    task.export(found)
    torch.save(task.validation_data()[1][0][None, :96].clone(), found / "ids.pt")
    return found


def ids_of(folder: Path) -> torch.Tensor:
    ids: torch.Tensor = torch.load(folder / "ids.pt", weights_only=True)
    return ids


def whole(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_logits_are_as_near_to_fp64_as_those_of_transformers(folder: Path, degree: int) -> None:
    ids = ids_of(folder)
    with torch.no_grad():
        exact = whole(folder, torch.float64)(ids).logits
        theirs = float((whole(folder)(ids).logits - exact).abs().max())
    config = transformers.LlamaConfig.from_pretrained(folder)

    def one(rank: int) -> float:
        with parameters_on_meta():
            model = transformers.LlamaForCausalLM(config)
        plan = plan_of(model)
        if rank == 0:
            prove(model, config, plan, degree, training=False)
        split(model, plan, Communicator(), training=False)
        load(model, load_safetensors(folder))
        with torch.no_grad():
            return float((model.eval()(ids).logits - exact).abs().max())

    for ours in sim.run(degree, one, seed=0):
        assert ours <= 2 * theirs, f"{ours} beside {theirs}"


@pytest.mark.parametrize("degree", [2, 4])
def test_losses_of_training_are_those_of_one_process(folder: Path, degree: int) -> None:
    ids = ids_of(folder)[:, :32]

    def losses(size: int) -> list[float]:
        def one(rank: int) -> list[float]:
            model = whole(folder)
            options: dict[str, Any] = {}
            if size > 1:
                mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))
                split(model, plan_of(model), mesh)
                in_parts(model)
                options = {"mesh": mesh, "data_axes": ["data"]}
            optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.AdamW, lr=1e-4, **options)
            found = []
            for step in range(3):
                batch = ids.roll(step, 1)
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
            optimizer.close()
            return found

        found: list[list[float]] = sim.run(size, one, seed=0)
        assert all(other == found[0] for other in found)
        return found[0]

    assert losses(degree) == pytest.approx(losses(1), rel=2e-5)
