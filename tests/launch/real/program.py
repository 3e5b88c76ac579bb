"""A job for real launchers: ``program.py engine`` trains by zoo.engine, ``program.py facade`` by ``import deepspeed``.

Whatever starts it, on however many ranks: four steps over batches of four samples, and rank 0 prints the losses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

STEPS, BATCH = 4, 4


def losses(kind: str) -> list[Any]:
    """World size, and the mean loss of each step over all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    config = {
        "train_batch_size": BATCH, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "steps_per_print": 1000,
        "gradient_clipping": 1.0,
    }  # fmt: skip
    engine: Any
    if kind == "facade":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    else:
        from zoo.engine import initialize

        engine, *_ = initialize(config, model)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    found: list[Any] = [world]
    for batch in x.split(BATCH):
        mine = batch[rank::world]
        loss = (engine(mine) - mine.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        found.append(float(total) / world)
    return found


def tell(found: list[Any]) -> None:
    """What the test reads."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)


def by_ray(kind: str, how: str) -> None:
    """The same under Ray: TorchTrainer, or actors that set the variables of a launcher themselves."""
    import ray

    for left in (2, 1, 0):
        try:
            ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
            break
        except Exception as error:  # it gives its own processes 30 s to come up, which a loaded machine may not keep
            ray.shutdown()
            if left == 0 or "timed out during startup" not in str(error):
                raise
    try:
        tell(_trainer(kind) if how == "trainer" else _actors(kind))
    finally:
        ray.shutdown()


def _trainer(kind: str) -> list[Any]:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    file = os.path.join(os.getcwd(), "found.json")  # without a checkpoint a trainer keeps no metrics

    def train() -> None:
        found = losses(kind)
        if dist.get_rank() == 0:
            with open(file, "w") as told:
                json.dump(found, told)

    trainer = TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=os.path.join(os.getcwd(), "results")),
    )  # fmt: skip
    trainer.fit()
    with open(file) as told:
        return list(json.load(told))


def _actors(kind: str) -> list[Any]:
    import socket

    import ray

    class Rank:
        def __init__(self, rank: int, world: int, port: int) -> None:
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"

        def train(self) -> list[Any]:
            return losses(kind)

    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = int(tried.getsockname()[1])
    remote = ray.remote(num_cpus=1)(Rank)
    actors = [remote.remote(rank, 2, port) for rank in range(2)]
    return list(ray.get([actor.train.remote() for actor in actors], timeout=200)[0])


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if len(words) > 1:
        by_ray(*words[:2])
    else:
        tell(losses(words[0]))
