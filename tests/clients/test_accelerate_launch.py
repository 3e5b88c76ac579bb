"""``accelerate launch`` with each kind of YAML that is published starts, and trains as plain torch does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.launched import BATCHES, MICRO_BATCH, RATE, data, net

from zoo.deepspeed import installed_folder

PROGRAM = Path(__file__).with_name("launched.py")
TIMEOUT_S = 300
PLAIN = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}
WHOLE = {**PLAIN, "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3}
KINDS: dict[str, tuple[dict[str, Any], str, int]] = {
    "zero1": ({**PLAIN, "gradient_accumulation_steps": 1, "zero_stage": 1}, "bf16", 1),
    "zero2": (
        {**PLAIN, "offload_optimizer_device": "none", "offload_param_device": "none", "zero_stage": 2}, "bf16", 1,
    ),
    "zero2 in fp32": (
        {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": False, "zero_stage": 2},
        "no", 2,
    ),
    "zero3": ({**WHOLE, "offload_optimizer_device": "none", "offload_param_device": "none"}, "bf16", 1),
    "offload": (
        {
            **WHOLE, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "offload_optimizer_device": "cpu",
            "offload_param_device": "cpu",
        },
        "no", 2,
    ),
    "fp16": ({**PLAIN, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "zero_stage": 2}, "fp16", 1),
    "a ds_config": ({"deepspeed_config_file": "ds.json", "zero3_init_flag": True}, "", 1),
}  # fmt: skip
"""Kind → (its deepspeed_config, mixed_precision, accumulation)."""
DS_CONFIG = {
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0, "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


BACKENDS: dict[str, dict[str, Any]] = {
    "none named": {},
    "AO": {"backend": "AO", "pad_inner_dim": True},
    "AO without FSDP2": {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True},
    "TE": {
        "amax_compute_algo": "max", "amax_history_len": 1024, "backend": "TE", "fp8_format": "HYBRID", "interval": 1,
        "margin": 0, "use_autocast_during_eval": False,
    },
    "MSAMP": {"backend": "MSAMP", "opt_level": "O2"},
}  # fmt: skip
"""Kind → the YAML's fp8_config."""


def yaml(fields: dict[str, Any], precision: str, fp8: dict[str, Any] | None = None) -> str:
    """As ``accelerate config`` writes it; the number of processes is that of the command."""
    inner = "\n".join(f"  {key}: {str(value).lower()}" for key, value in sorted(fields.items()))
    return (
        f"compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n{inner}\n"
        + (f"fp8_config: {json.dumps(fp8)}\n" if fp8 else "")
        + "distributed_type: DEEPSPEED\ndowncast_bf16: 'no'\nmachine_rank: 0\nmain_training_function: main\n"
        + (f"mixed_precision: '{precision}'\n" if precision else "")  # a ds_config says it
        + "num_machines: 1\nnum_processes: 8\nrdzv_backend: static\n"
        "same_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )


def launched(
    folder: Path, fields: dict[str, Any], precision: str, ranks: int, fp8: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``accelerate launch`` said, where deepspeed is zoo."""
    (folder / "config.yaml").write_text(yaml(fields, precision, fp8))
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.yaml", "--num_processes",
        str(ranks), "--main_process_port", "0", str(PROGRAM),
    ]  # fmt: skip
    paths = [str(installed_folder()), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def plain(ranks: int, accumulation: int) -> tuple[list[float], float]:
    """Losses, and the sum of the weights, of plain torch in one process on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for number, (inputs, targets) in enumerate(zip(*(x.split(MICRO_BATCH * ranks) for x in data()), strict=True), 1):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, sum(p.detach().double().sum().item() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_yaml_starts_and_trains(kind: str, ranks: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the extra clients)")
    fields, precision, _ = KINDS[kind]
    ended = launched(tmp_path, fields, precision, ranks)
    assert ended.returncode == 0, ended.stderr[-4000:]
    agree(json.loads(next(x for x in ended.stdout.splitlines() if x.startswith("FOUND "))[6:]), kind, ranks)


def agree(found: dict[str, Any], kind: str, ranks: int) -> None:
    """What a job of so many ranks found is what plain torch does."""
    fields, precision, accumulation = KINDS[kind]
    losses, weights = plain(ranks, accumulation)
    assert (found["engine"], found["processes"]) == ("DeepSpeedEngine", ranks)
    assert found["stage"] == fields.get("zero_stage", 3)
    assert len(losses) == BATCHES // ranks
    if precision == "fp16":  # steps that overflow at the first scales are skipped
        assert found["losses"][0] == pytest.approx(losses[0], rel=0.01)
        assert found["weights"] != pytest.approx(plain(ranks, BATCHES + 1)[1], abs=1e-3), "no step moved anything"
        return
    exact = precision in ("no", "")
    within = 1e-5 if exact else 0.03
    assert found["losses"] == pytest.approx(losses, rel=within)
    assert found["weights"] == pytest.approx(weights, abs=1e-4 if exact else 0.2)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


# Real DeepSpeed 0.19.8 beside Accelerate 1.15.0 and torchao 0.18.0 has the same losses in one process, to the last bit.
# Its two processes on a CPU end at batch sizes that do not fit one another, in every precision.
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_fp8_of_torchao_trains(stage: int, ranks: int, tmp_path: Path) -> None:
    need("accelerate")
    need("torchao")
    fields = {**(WHOLE if stage == 3 else PLAIN), "zero_stage": stage}
    ended = launched(tmp_path, fields, "fp8", ranks, BACKENDS["AO without FSDP2"])
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(next(x for x in ended.stdout.splitlines() if x.startswith("FOUND "))[6:])
    assert found["layers"] == ["Linear", "Tanh", "Float8Linear", "Tanh", "Linear"]
    assert (found["stage"], found["processes"]) == (stage, ranks)
    losses, weights = plain(ranks, 1)
    assert found["losses"] == pytest.approx(losses, rel=0.1, abs=0.1)  # 3 bits of mantissa in one layer of three
    assert found["weights"] == pytest.approx(weights, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_is_refused_where_it_cannot_be(backend: str, tmp_path: Path) -> None:
    """By Accelerate for a backend that is missing, as with DeepSpeed; for weights in FSDP2's wrapper by us.

    DeepSpeed 0.19.8 ends there with "RuntimeError: _apply(): Couldn't swap Float8Linear.weight".
    """
    need("accelerate")
    torchao, engine = (importlib.util.find_spec(name) is not None for name in ("torchao", "transformer_engine"))
    if (backend == "AO without FSDP2" and torchao) or (backend in ("TE", "none named") and engine):
        pytest.skip("it is there")
    if backend == "MSAMP" and importlib.util.find_spec("msamp") is not None:
        pytest.skip("it is there")
    ended = launched(tmp_path, {**PLAIN, "zero_stage": 2}, "fp8", 1, BACKENDS[backend])
    assert ended.returncode != 0
    wrapped = "'2.weight' is a WeightWithDynamicFloat8CastTensor"
    if torchao:
        says = {"TE": "TransformerEngine is not available", "MSAMP": "No module named"}.get(backend, wrapped)
    else:
        says = "FP8 is not available on this machine"
    assert says in ended.stderr, ended.stderr[-4000:]
    if says is wrapped:
        assert "enable_fsdp_float8_all_gather: false" in ended.stderr
