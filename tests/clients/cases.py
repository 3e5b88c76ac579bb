"""The programs of ``examples/clients`` on two gloo processes: on zoo, and on real DeepSpeed where that is installed.

    ZOO_PEER=.peer python -m tests.clients.cases     record what DeepSpeed computes, in peers.json

``make peer`` makes the environment. Cases that are recorded already are left as they are, unless the recording is of
other versions or of a processor with other instruction sets: then it begins anew.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import shipped

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).with_name("peers.json")
PACKAGES = ("deepspeed", "torch", "transformers", "accelerate", "peft", "trl", "lightning", "datasets", "bitsandbytes")
_SHARED = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

SHIPPED = [("trl/sft", 3), ("trl/dpo", 3), ("trl/dpo", 1), ("trl/kto", 2), ("trl/reward", 0), ("trl/grpo", 3)]
MODELS = ("gpt2", "llama", "qwen3_moe")
Case = tuple[str, ...]


def _case(program: str, model: str, stage: int, offload: str = "none") -> Case:
    words = (program, "--model", model, "--stage", str(stage))
    return words if offload == "none" else (*words, "--offload", offload)


TRAINER = [_case("trainer.py", model, stage) for model in MODELS for stage in range(4)]
OFFLOAD = [_case("trainer.py", model, stage, "cpu") for model in MODELS for stage in (1, 2, 3)]
OTHERS = [
    *[_case("accelerate_loop.py", *which) for which in (("gpt2", 0), ("llama", 2), ("llama", 3), ("qwen3_moe", 3))],
    *[_case("plain.py", *which) for which in (("gpt2", 0), ("gpt2", 2), ("gpt2", 3), ("llama", 1), ("llama", 3))],
    _case("plain.py", "qwen3_moe", 3),
    *[_case("own_model.py", "gpt2", stage) for stage in range(4)],
    *[_case("lora.py", *which) for which in (("gpt2", 3), ("llama", 0), ("llama", 2), ("llama", 3), ("qwen3_moe", 3))],
    *[_case("qlora.py", "llama", stage) for stage in (2, 3)],
    *[_case("sft.py", *which) for which in (("gpt2", 2), ("llama", 3))],
    *[(*_case(program, "gpt2", 0), "--clipping", "0") for program in ("moe.py", "pipeline.py")],
    *[_case("moe.py", "gpt2", stage) for stage in (1, 2)],
    _case("pipeline.py", "gpt2", 1),
    *[_case("fabric.py", "llama", stage) for stage in (2, 3)],
    *[_case("long_sequences.py", "llama", stage) for stage in (0, 3)],
]  # fmt: skip
OTHERS_OFFLOAD = [_case("accelerate_loop.py", "llama", 2, "cpu"), _case("plain.py", "gpt2", 3, "cpu")]
CASES = [*TRAINER, *OTHERS, *OFFLOAD, *OTHERS_OFFLOAD, *(_case(name, "llama", stage) for name, stage in SHIPPED)]
LEFT_OUT: dict[Case, str] = {
    _case("moe.py", "gpt2", 0): "DeepSpeed's stage 0 clips by the mean of the norms that each rank finds with its own "
    "experts; its stages 1 and 2, and zoo, by the norm of the whole gradient. Losses differ by 2.4e-6; compared "
    "without clipping.",
    _case(
        "pipeline.py", "gpt2", 0
    ): "DeepSpeed's stage 0 leaves the later pipeline stages out of the norm that it clips "
    "by; its stage 1, and zoo, clip by the norm of the whole gradient. Losses differ by 1.9e-4; compared without "
    "clipping.",
    _case(
        "long_sequences.py", "llama", 1
    ): "DeepSpeed's stages 1 and 2 divide gradients by the number of sequences, not "
    "of ranks: their norm is that of its stage 3, and of zoo, times the ranks that share one. Losses are the same, "
    "because the clipped gradient is.",
}
"""Cases that cannot be compared, and why."""

EXPORTS = ("trainer.py", "accelerate_loop.py", "plain.py", "lora.py")
"""Programs with ``--export``, whose folder ``from_pretrained`` reads."""
STUDIED = [
    *[_case("trainer.py", *which) for which in (("gpt2", 0), ("llama", 2), ("llama", 3), ("qwen3_moe", 3))],
    _case("trainer.py", "llama", 3, "cpu"),
    *[_case("accelerate_loop.py", "llama", stage) for stage in (2, 3)],
    *[_case("plain.py", "gpt2", stage) for stage in (2, 3)],
    *[_case("lora.py", "llama", stage) for stage in (2, 3)],
    _case("own_model.py", "gpt2", 3), _case("sft.py", "gpt2", 2), _case("moe.py", "gpt2", 2),
    _case("pipeline.py", "gpt2", 1), _case("qlora.py", "llama", 2),
]  # fmt: skip
"""Cases that are also stopped and resumed, and whose exported weights are read, where they export."""
HALF = 3
"""Steps after which a studied case is stopped; all make six."""
TIMEOUT_S = 400.0


def peer_here() -> Path | None:
    """The environment with real DeepSpeed that ZOO_PEER names."""
    return Path(os.environ["ZOO_PEER"]).absolute() if os.environ.get("ZOO_PEER") else None


def tolerance(case: Case, *, same_processor: bool = True) -> float:
    """Relative, of losses. DeepSpeed's CPU Adam differs from its own other runs by 2e-6, and kernels for other
    instruction sets add in another order.
    """
    return 1e-6 if same_processor and "--offload" not in case else 5e-6


def difference(own: list[float], other: list[float]) -> float:
    """The largest relative one; infinite between lists of several lengths and where a number is none."""
    if len(own) != len(other) or not own or not all(map(math.isfinite, (*own, *other))):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(own, other, strict=True))


def run(case: Case, *extra: str, folder: Path, peer: Path | None = None) -> dict[str, Any]:
    """Losses and gradient norms of a program: on zoo under the name deepspeed, or in the peer's environment."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    environment = {**os.environ, **_SHARED}
    if shipped.is_shipped(case):
        words = [*shipped.words(case, folder, peer), *extra]
    else:
        program = ROOT / "examples/clients" / case[0]
        words = [str(program), *case[1:], "--folder", str(folder), "--out", str(out), *extra]
    environment.pop("ACCELERATE_USE_DEEPSPEED", None)
    if peer is None:
        command = [sys.executable, "-m", "zoo.cli", "run", "--as-deepspeed", "--ranks", "2", *words]
    else:
        path = f"{peer / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment |= {"PATH": path, "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
        environment.pop("PYTHONPATH", None)
        driven = [str(Path(__file__).with_name("driven.py"))] if shipped.is_shipped(case) else []
        command = [str(peer / "bin/torchrun"), "--standalone", "--nproc-per-node=2", *driven, *words]
    if shipped.is_shipped(case):
        environment["PYTHONPATH"] = str(folder)  # where its rewards are
    status, said = _finished(command, environment, folder)
    if status != 0 and peer is not None:  # it compiles its extensions in the first run, on both ranks at once
        status, said = _finished(command, environment, folder)
    if status != 0:
        raise AssertionError(f"{' '.join([*case, *extra])} ended with {status}:\n{said[-6000:]}")
    found: dict[str, Any] = shipped.read(case, folder) if shipped.is_shipped(case) else json.loads(out.read_text())
    return found


def _finished(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit status and what it said on stderr; after TIMEOUT_S it is ended with all that it started."""
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said = process.communicate(timeout=TIMEOUT_S)[1]
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL, f"it hung.\n{process.communicate()[1]}"


def results(case: Case, peer: Path | None = None) -> dict[str, Any]:
    """All that is asked of a case."""
    return study(case, peer) if case in STUDIED else losses(case, peer)


def losses(case: Case, peer: Path | None = None) -> dict[str, Any]:
    """Of a run without a stop."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(case, folder=Path(folder), peer=peer)
    return {key: found[key] for key in ("losses", "grad_norms")}


def study(case: Case, peer: Path | None = None) -> dict[str, Any]:
    """The losses of a run without a stop; those of one that is stopped and resumed; what exported weights say.

    Returns:
        ``losses`` and ``grad_norms``; ``resumed``: the losses of the two halves; ``exported``: for each export the
        largest difference between its logits and those of the trained model, absolute.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, export = Path(name), Path(name) / "export"
        exports = case[0] in EXPORTS
        (folder / "whole").mkdir()
        whole = run(case, *(["--export", str(export)] if exports else []), folder=folder / "whole", peer=peer)
        found = {key: whole[key] for key in ("losses", "grad_norms")}
        if exports:
            found["exported"] = {
                where: _logits_differ(case, export / where, folder / "whole" / "base0", whole["logits"])
                for where in (".", "consolidated")
                if (export / where).exists()
            }
        halves = folder / "halves"
        halves.mkdir()
        first = run(case, "--stop", str(HALF), "--save", str(HALF), folder=halves, peer=peer)
        second = run(case, "--resume", folder=halves, peer=peer)
        found["resumed"] = first["losses"] + second["losses"]
    return found


def _logits_differ(case: Case, export: Path, base: Path, logits: list[float]) -> float:
    """Reads the export as anybody would, in a process without DeepSpeed or zoo."""
    command = [sys.executable, str(Path(__file__).with_name("reading.py")), str(export)]
    command += [str(base)] if case[0] == "lora.py" else []
    done = subprocess.run(command, env={**os.environ, **_SHARED}, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise AssertionError(f"{' '.join(case)}: {export} cannot be read:\n{done.stderr[-4000:]}")
    own = json.loads(done.stdout.splitlines()[-1])
    if len(own) != len(logits):
        raise AssertionError(f"{' '.join(case)}: {len(own)} logits of the export, {len(logits)} of the model")
    return max(abs(a - b) for a, b in zip(own, logits, strict=True))


_HEAD = """
import importlib.metadata, json, sys, torch
versions = {name: importlib.metadata.version(name) for name in sys.argv[1:]}
print(json.dumps({"versions": versions, "instructions": torch.backends.cpu.get_cpu_capability()}))
"""


def head(peer: Path | None = None) -> dict[str, Any]:
    """``versions`` of the packages in an environment, and the ``instructions`` that torch uses there."""
    python = sys.executable if peer is None else str(peer / "bin/python")
    packages = [name for name in PACKAGES if peer is not None or name != "deepspeed"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = subprocess.check_output([python, "-c", _HEAD, *packages], text=True, env=environment)
    found: dict[str, Any] = json.loads(said)
    return found


def recorded() -> dict[str, Any]:
    """``versions``, ``instructions`` and ``cases`` of peers.json."""
    found: dict[str, Any] = json.loads(PEERS.read_text()) if PEERS.exists() else {"cases": {}}
    return found


def record(peer: Path) -> None:
    """Write what the peer computes for every case that is not recorded."""
    here, found = head(peer), recorded()
    kept = found["cases"] if {key: found.get(key) for key in here} == here else {}
    names = [" ".join(case) for case in CASES]
    for case, name in zip(CASES, names, strict=True):
        if name in kept:
            continue
        try:
            kept[name] = results(case, peer)
        except AssertionError as error:
            print(error, flush=True)
            continue
        cases = {name: kept[name] for name in names if name in kept}
        PEERS.write_text(json.dumps({**here, "cases": cases}, indent=1) + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    record(Path(os.environ["ZOO_PEER"]).absolute())
