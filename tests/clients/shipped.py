"""Programs that a library ships, as its users start them: TRL's scripts, unmodified, from wherever it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Case = tuple[str, ...]
STEPS = 6
_RL = ("--reward_funcs", "rewards.variety", "--num_generations", "2", "--max_completion_length", "8")
# Program → its data set, its options beside those of all, and what its log calls the figure that is compared.
PROGRAMS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "trl/sft": ("answers", (), "loss"),
    "trl/dpo": ("pairs", (), "loss"),
    "trl/kto": ("judged", (), "loss"),
    "trl/reward": ("pairs", (), "loss"),
    # Its losses are zero but for rounding, and the penalty.
    "trl/grpo": ("questions", (*_RL, "--beta", "0.1"), "entropy"),
}
_COMMON = (
    "--model_name_or_path", "llama", "--learning_rate", "1e-2", "--weight_decay", "0.01", "--warmup_steps", "2",
    "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", str(STEPS),
    "--max_grad_norm", "0.5", "--logging_steps", "1", "--logging_nan_inf_filter", "False", "--save_steps", str(STEPS),
    "--save_only_model", "True", "--report_to", "none", "--bf16", "False", "--gradient_checkpointing", "False",
    "--disable_tqdm", "True", "--seed", "7", "--deepspeed", "ds_config.json", "--output_dir", "out",
)  # fmt: skip


def is_shipped(case: Case) -> bool:
    """Whether a library has the program, not this repository."""
    return case[0] in PROGRAMS


def words(case: Case, folder: Path, peer: Path | None) -> list[str]:
    """The program and its arguments, to be run in ``folder``, which gets what it reads."""
    data_set, options, _ = PROGRAMS[case[0]]
    # Answers come from the layers of zoo.inject then; DeepSpeed's own hybrid engine needs its kernels for GPUs.
    hybrid = ["hybrid"] if data_set == "questions" and peer is None else []
    writer, stage = str(Path(__file__).with_name("hub.py")), case[case.index("--stage") + 1]
    subprocess.run([sys.executable, writer, str(folder), stage, *hybrid], check=True, capture_output=True, timeout=200)
    program = _trl(peer) / "scripts" / f"{case[0].removeprefix('trl/')}.py"
    by_hand = [] if peer is None else ["--accelerator_config", '{"use_configured_state": true}']
    return [str(program), *_COMMON, "--dataset_name", data_set, *options, *by_hand]


def _trl(peer: Path | None) -> Path:
    if peer is not None:
        return next((peer / "lib").glob("python3*/site-packages/trl"))
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("trl is not installed (the extra clients).")
    return Path(spec.submodule_search_locations[0])


def read(case: Case, folder: Path) -> dict[str, Any]:
    """``losses`` and ``grad_norms`` of its steps, from the state that its Trainer writes."""
    log = json.loads((folder / f"out/checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    figure = PROGRAMS[case[0]][2]
    steps = [entry for entry in log if "loss" in entry]
    return {
        "losses": [entry[figure] for entry in steps],
        "grad_norms": [entry["grad_norm"] for entry in steps if entry.get("grad_norm") is not None],
    }
