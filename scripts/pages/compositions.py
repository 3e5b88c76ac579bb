"""Which features are tested together, from the sources of the tests: ``python -m scripts.pages.compositions``.

A test counts for two features if both occur in its function, or in what the function uses of its own file. Tests that
share helpers of other files are not followed there, so that the table rather says too little.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

FEATURES = {
    "ZeRO": r"Stage[0-3]Optimizer|ZeroOptimizer|zero_optimization|ShardedModel|\bstage=",
    "offloading": r"offload_(optimizer|param)|nvme_path|remote_device",
    "tensor": r"zoo\.tensor|autotp_size|tensor_parallel|mesh_dim_names=\([^)]*\"tensor\"",
    "pipeline": r"PipelineModule|zoo\.pipe|num_stages=|LayerSpec",
    "experts": r"zoo\.moe|ep_size|\bMoE\(|MixtureOfExperts|GroupedExperts",
    "sequence": r"SequenceParallelAttention|\"sequence\"|sequence_parallel",
    "recomputation": r"activation_checkpoint|checkpoint_activations|torch\.utils\.checkpoint",
    "compression": r"compression_training|zoo\.compression|init_compression",
    "1-bit": r"Onebit(Adam|Lamb)|ZeroOneAdam|onebit",
    "int8 messages": r"zero_quantized_(weights|gradients)|quantized_gradients_feedback",
    "local steps": r"DiLoCo|LocalSGD",
    "compile": r"torch\.compile|zoo\.compile|deepcompile",
    "checkpoints": r"save_checkpoint|load_checkpoint|state_slices",
    "LoRA": r"\bLora|get_peft_model|\blora\b|\bpeft\b",
    "16 bit": r"bf16|fp16|bfloat16|float16|Precision\(",
}
"""Feature → how a source names it."""
NAMES_ONLY = ("cli", "config", "deepspeed", "house")
"""Folders whose tests name many features and run few."""


def tested(root: Path) -> dict[tuple[str, str], list[str]]:
    """Two features, in the order of FEATURES → the tests that use both, as file::function."""
    found: dict[tuple[str, str], list[str]] = {pair: [] for pair in combinations(FEATURES, 2)}
    for path in sorted((root / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if path.relative_to(root).parts[1] in NAMES_ONLY or len(_there(source)) < 2:
            continue
        name = str(path.relative_to(root))
        for function, text in functions(source):
            for pair in combinations(_there(text), 2):
                found[pair].append(f"{name}::{function}")
    return found


def _there(text: str) -> list[str]:
    return [feature for feature, pattern in FEATURES.items() if re.search(pattern, text)]


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Each test of a file with its text, and the text of what it uses of the top level of its file, and so on."""
    tree = ast.parse(source)
    own: dict[str, str] = {}
    used: dict[str, set[str]] = {}
    for node in tree.body:
        text = ast.unparse(node)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for name in _defined(node):
            own[name], used[name] = text, names
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            reached, waiting = {node.name}, [node.name]
            while waiting:
                for name in used[waiting.pop()] & own.keys() - reached:
                    reached.add(name)
                    waiting.append(name)
            yield node.name, "\n".join(own[name] for name in sorted(reached))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def table(root: Path) -> str:
    """Markdown: a matrix of counts, and for each pair one of its tests."""
    found = tested(root)
    names = list(FEATURES)
    lines = ["| | " + " | ".join(names[1:]) + " |", "|---" * len(names) + "|"]
    for row, name in enumerate(names[:-1]):
        cells = [str(len(found[name, other]) or "-") if column > row else "" for column, other in enumerate(names)][1:]
        lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
    lines += ["", "| together | one of the tests |", "|---|---|"]
    for (one, other), tests in found.items():
        if tests:
            file, _, function = min(tests, key=lambda test: (not test.startswith("tests/laws"), test)).partition("::")
            lines.append(f"| {one}, {other} | `{file}`: {function.removeprefix('test_').replace('_', ' ')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Path(__file__).resolve().parents[2]))
