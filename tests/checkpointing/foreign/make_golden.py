"""Writes the golden checkpoints in ``golden/`` with the real DeepSpeed (0.19.8), two gloo ranks for each.

    python -m tests.checkpointing.foreign.make_golden [names]

from the repository's root, in an environment with the packages ``deepspeed`` and ``safetensors``. Each folder holds the
checkpoint ``<name>/step``, and beside it ``losses.json``: by rank, those of the steps after it; and
``expected.safetensors``: every state as DeepSpeed itself says it, under ``role|name``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.checkpointing.foreign.golden_model import (
    AFTER,
    BEFORE,
    DECAY,
    LR,
    PARTS,
    RANKS,
    ROWS,
    Cut,
    Experts,
    Net,
    batches,
    environment,
    groups,
    loss_of,
    shared_ends,
)

HERE = Path(__file__).parent / "golden"
ROLES = {"fp32": "parameter", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
UNCONVERTED = (
    "stage0", "stage0_fp16", "stage2_round_robin", "pipeline", "pipeline_tied", "pipeline_stage0",
    "pipeline_tied_stage0", "experts", "experts_stage0", "tensor_stage0",
)  # fmt: skip
"""Nothing to convert, experts and stages under the same names, and an order of parameters that DeepSpeed 0.19.8 writes
wrongly into ``param_slice_mappings``, which its conversion follows: for these the live model says what is expected."""
KEPT = ("stage2", "stage3")
"""Their universal checkpoints are golden files too."""
CASES: dict[str, dict[str, Any]] = {
    "stage0": {"zero_optimization": {"stage": 0}},
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2}},
    "stage2_round_robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 40}},
    "stage1_bf16": {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage2_fp16": {
        "zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 6},
    },
    "stage3_bf16": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}, "bf16": {"enabled": True},
    },
    "stage0_fp16": {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True, "initial_scale_power": 6}},
    "pipeline": {"zero_optimization": {"stage": 1}},
    "pipeline_tied": {"zero_optimization": {"stage": 1}},
    "pipeline_stage0": {"zero_optimization": {"stage": 0}},
    "pipeline_tied_stage0": {"zero_optimization": {"stage": 0}},
    "experts": {"zero_optimization": {"stage": 2}},
    "experts_stage0": {"zero_optimization": {"stage": 0}},
    "tensor_stage0": {"zero_optimization": {"stage": 0}, "tensor_parallel": PARTS},
    "tensor_stage1": {"zero_optimization": {"stage": 1}, "tensor_parallel": PARTS},
    "tensor_stage3": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "tensor_parallel": PARTS,
    },
}  # fmt: skip


def options(name: str) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS if name.startswith("pipeline") else RANKS * ROWS,
        "train_micro_batch_size_per_gpu": ROWS,
        **({"gradient_clipping": 0.0} if name in ("pipeline_stage0", "pipeline_tied_stage0") else {}),
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 1000,
        **CASES[name],
    }  # fmt: skip


def main(name: str, rank: int, port: str) -> None:
    os.environ |= environment(rank, port)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    import deepspeed

    deepspeed.init_distributed()
    # DeepSpeed lets no processor compute in fp16, which torch does on every one.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda _: True
    model, given = _model(name, deepspeed)
    optimizer = torch.optim.AdamW(given, lr=LR)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=options(name), dist_init_required=False,
    )[0]  # fmt: skip
    folder = HERE / name
    dtype = torch.bfloat16 if "bf16" in CASES[name] else torch.float16 if "fp16" in CASES[name] else torch.float32
    if name.startswith("pipeline"):
        data = iter(batches(0))
        losses = [float(engine.train_batch(data)) for _ in range(BEFORE)]
        engine.save_checkpoint(str(folder), tag="step", client_state={"note": [1, (2, "three")]})
        expected = _parameters(engine, rank) if name in UNCONVERTED and "fp16" not in name else {}
        losses = [float(engine.train_batch(data)) for _ in range(AFTER)]
    else:
        losses = []
        for number, batch in enumerate(batches(0 if name.startswith("tensor") else rank, dtype)):
            if number == BEFORE:
                engine.save_checkpoint(str(folder), tag="step", client_state={"note": [1, (2, "three")]})
                expected = _parameters(engine, rank) if name in UNCONVERTED and "fp16" not in name else {}
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        losses = losses[BEFORE:]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (losses, expected))
    if rank == 0:
        from safetensors.torch import save_file

        (folder / "losses.json").write_text(json.dumps([mine for mine, _ in everyone]) + "\n")
        found = {k: v for _, part in everyone for k, v in part.items()}
        if name not in UNCONVERTED:
            found = _converted(folder, name)
        save_file(found, str(folder / "expected.safetensors"))
        for script in folder.glob("*.py"):
            script.unlink()
    dist.barrier()


def _model(name: str, deepspeed: Any) -> tuple[Any, Any]:
    import torch
    from torch import nn

    if name in ("pipeline", "pipeline_stage0"):
        torch.manual_seed(0)
        layers = [
            deepspeed.pipe.LayerSpec(nn.Linear, 5, 7), torch.tanh, deepspeed.pipe.LayerSpec(nn.Linear, 7, 7),
            deepspeed.pipe.LayerSpec(nn.Linear, 7, 3), torch.tanh, deepspeed.pipe.LayerSpec(nn.Linear, 3, 1),
        ]  # fmt: skip
        model = deepspeed.pipe.PipelineModule(
            layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", base_seed=7
        )
        return model, model.parameters()
    if name.startswith("pipeline_tied"):
        model = shared_ends(deepspeed.pipe, nn.MSELoss())
        return model, model.parameters()
    if name.startswith("experts"):
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        model = Experts(MoE)
        group = {"params": list(model.parameters()), "name": "all", "weight_decay": DECAY}
        return model, split_params_into_different_moe_groups_for_optimizer(group)
    if name.startswith("tensor"):
        model = Cut()
        return model, [p for p in model.parameters() if p.requires_grad]
    model = Net()
    return model, groups(model)


def _parameters(engine: Any, rank: int) -> dict[str, Any]:
    """The parameters of an fp32 model, which are its masters, with experts under their global numbers; without ZeRO the
    states of torch's optimizer too."""
    if engine.autotp_size() > 1:
        whole = engine._consolidated_16bit_state_dict() or {}
        return {f"parameter|{key}": whole[key].clone() for key, _ in engine.module.named_parameters() if key in whole}
    found = {}
    for key, parameter in engine.module.named_parameters():
        if "deepspeed_experts." in key:
            before, _, after = key.partition("deepspeed_experts.")
            number, _, rest = after.partition(".")
            key = f"{before}deepspeed_experts.{int(number) + 2 * rank}.{rest}"
        found[f"parameter|{key}"] = parameter.detach().clone()
        if engine.zero_optimization_stage() == 0 and parameter.requires_grad:
            state = engine.optimizer.state[parameter]
            found |= {f"{role}|{key}": state[role].clone() for role in ("exp_avg", "exp_avg_sq")}
    return found


def _converted(folder: Path, name: str) -> dict[str, Any]:
    """Every fp32 state by "role|name", from DeepSpeed's own conversion to a universal checkpoint."""
    import torch

    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    if name.startswith("tensor"):
        command.append("--no_strict")  # it has patterns for frozen parameters, and no files of them
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [*command, "--input_folder", str(folder / "step"), "--output_folder", str(folder / "universal")],
        check=True, env=environment,
    )  # fmt: skip
    found = {}
    for file in (folder / "universal" / "zero").glob("*/*.pt"):
        if file.stem in ROLES and (file.parent / "exp_avg.pt").exists():
            value = torch.load(file, weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            found[f"{ROLES[file.stem]}|{file.parent.name}"] = value.reshape(-1).clone()
    if name not in KEPT:
        shutil.rmtree(folder / "universal")
    (folder / "latest_universal").unlink()
    return found


def spawn(name: str) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.checkpointing.foreign.make_golden", name]
    ranks = [subprocess.Popen([*command, str(rank), port]) for rank in range(RANKS)]
    for rank in ranks:
        if rank.wait():
            raise SystemExit(f"{name} failed")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        for chosen in sys.argv[1:] or CASES:
            spawn(chosen)
