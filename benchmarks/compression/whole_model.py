"""``python -m benchmarks.compression.whole_model``: SmolLM2-135M on packed weights, beside bf16 and torchao.

Contenders take turns within a round; a ratio is of one round. The head, which is tied to the embedding, stays bf16 in
all of them. Nothing is cached between forwards: one token is a forward of one token.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Spread, machine, table, write_page
from torch import nn

from zoo.compression.packed import pack_model
from zoo.compression.post_training import Recipe, Uniform, quantise

PAGE = Path(__file__).with_name("WHOLE_MODEL.md")
TOKENS = (1, 16, 256)
BF16 = "torch bf16"


def packed(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Rounded to nearest and packed."""
    return pack_model(model, quantise(model, recipe))


def of_torchao(model: nn.Module, config: Any) -> nn.Module:
    """Quantised by torchao, all linear layers but the tied head."""
    from torchao.quantization import quantize_

    from zoo.compression.post_training.recipe import chosen

    names = set(chosen(model, ()).values())
    quantize_(model, config, filter_fn=lambda m, name: name in names)
    return model


def contenders() -> dict[str, nn.Module]:
    """By name; what is not installed is left out."""
    from zoo.examples.smollm2.task import SmolLM2Task

    model = SmolLM2Task(SmolLM2Task.Config(context=256), seed=0).model().eval().bfloat16()
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        BF16: lambda m: m,
        "zoo int8": lambda m: packed(m, Recipe(grid=Uniform(bits=8), group_size=0)),
        "zoo int4": lambda m: packed(m, Recipe(grid=Uniform(bits=4, symmetric=False), group_size=64)),
    }
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig

        ways["torchao int8"] = lambda m: of_torchao(m, Int8WeightOnlyConfig(set_inductor_config=False))
        four = PrototypeInt4WeightOnlyConfig(group_size=64, set_inductor_config=False)
        ways["torchao int4"] = lambda m: of_torchao(m, four)
    except ImportError:
        pass
    return {name: way(copy.deepcopy(model)) for name, way in ways.items()}


def megabytes(model: nn.Module) -> float:
    """Of the tensors that the model holds, each once; those inside of torchao's too."""
    seen: dict[int, int] = {}
    for value in [*model.parameters(), *model.buffers()]:
        inner = [t for t in vars(value).values() if isinstance(t, torch.Tensor)]
        for t in inner or [value]:
            seen[id(t)] = t.nbytes
    return sum(seen.values()) / 2**20


def seconds(model: nn.Module, tokens: torch.Tensor, turn: float) -> float:
    """Of a forward; with one thread of its processor, which other programs lengthen less; else of the clock."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began, calls = clock(), 0
    while calls == 0 or clock() - began < turn:
        model(tokens)
        calls += 1
    return (clock() - began) / calls


def measure(models: dict[str, nn.Module], tokens: torch.Tensor, rounds: int, turn: float) -> dict[str, list[float]]:
    """Seconds, by name and round."""
    for model in models.values():
        model(tokens)
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            found[name].append(seconds(model, tokens, turn))
    return found


def main() -> None:
    """Measure, print, and with ``--write-results`` write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.3, help="seconds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write-results", action="store_true")
    options = parser.parse_args()
    models, load, parts = contenders(), os.getloadavg()[0], []
    names = [name for name in models if name != BF16]
    with torch.no_grad():
        for threads in options.threads:
            torch.set_num_threads(threads)
            rows = []
            for count in TOKENS:
                tokens = torch.arange(1000, 1000 + count)[None]
                found = measure(models, tokens, options.rounds, options.turn)
                ratios = [
                    Spread(tuple(b / a for a, b in zip(found[name], found[BF16], strict=True))).text() for name in names
                ]
                rows.append([str(count), Spread(tuple(found[BF16])).text(1, 1e3), *ratios])
            parts.append(f"## {threads} thread{'s' if threads > 1 else ''}\n")
            parts.append(table(["tokens", "torch bf16, ms", *names], rows) + "\n")
    sizes = table(["weights", "MiB in memory"], [[name, f"{megabytes(m):.1f}"] for name, m in models.items()])
    facts = ", ".join(f"{k} {v}" for k, v in machine(["torch", "torchao"]).items())
    about = (
        "Ratios are the time of bf16 over the contender's in the same round (above 1: faster than bf16): median, "
        "smallest and largest. A forward without a cache; the tied head, 28 of 135 million weights, is bf16 in all of "
        "them. int8: a scale a row; int4: groups of 64 with minima. One thread: processor time; two: the clock."
    )
    written = f"Written by `python -m benchmarks.compression.whole_model --write-results`: {facts}"
    text = "\n".join([
        "# SmolLM2-135M on packed weights, on the CPU", "", f"{written}, load of the machine before {load:.1f}.", "",
        about, "", *parts, "## Size\n", sizes, "",
    ])  # fmt: skip
    print(text)
    if options.write_results:
        write_page(PAGE, text)


if __name__ == "__main__":
    main()
