"""A transformer layer's forward and backward, and what it keeps for backward, beside its peers.

::

    python -m benchmarks.nn.layer                   # BERT's base size: 8 sequences of 128 tokens
    python -m benchmarks.nn.layer --quick           # a small one, two rounds: does it run
    python -m benchmarks.nn.layer --write-results   # also write RESULTS.md

A layer of 768 hidden and 3,072 inner numbers with 12 heads, post-norm, GELU itself, fp32, dropout of 0.1 everywhere, a
mask of padding, one thread. ms: processor time, since the machine is shared; gradients of the input and
of every parameter are computed. Contenders take turns within a round; a figure is the median over rounds; "/ peer" is
the median of the ratios to the fastest peer of the same round, and the middle half of them. units: bytes of the
distinct storages that autograd holds between forward and backward, parameters apart, as multiples of B·T·C numbers; the
input is one.

- torch: torch.nn.TransformerEncoderLayer; eager, sdpa: BertLayer of transformers with either attention.
- products: the four matrices of the layer and the two products of attention alone, with their gradients, by autograd.
- zoo: zoo.nn.TransformerLayer; zoo, X: with the option X; zoo, all: with all three options, "/ zoo" is over its own
  time without them. zoo, tanh: with the approximation of GELU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import facts, machine, remarks, table
from torch import nn

from zoo.nn import TransformerLayer, TransformerLayerConfig

Tensor = torch.Tensor
Run = Callable[[Tensor, Tensor], Tensor]
Seconds = dict[str, list[tuple[float, float]]]
RESULTS = Path(__file__).with_name("RESULTS.md")
BERT, SMALL = (8, 128, 768, 12), (2, 16, 48, 3)
"""Sequences, tokens, hidden numbers, heads."""
DROPOUT = 0.1
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
PEERS = ("torch", "eager", "sdpa")
OURS: dict[str, dict[str, Any]] = {
    "zoo": {}, **{f"zoo, {option}": {option: True} for option in OPTIONS},
    "zoo, all": dict.fromkeys(OPTIONS, True), "zoo, tanh": {"gelu": "tanh"},
}  # fmt: skip


class Products(nn.Module):
    """The products of a layer, and nothing between them."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.inter, self.output = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = (q @ k.mT @ v).transpose(1, 2).reshape(x.shape)
        out: Tensor = self.output(self.inter(self.out(context)))
        return out


def contenders(shape: tuple[int, int, int, int]) -> tuple[dict[str, Run], dict[str, nn.Module]]:
    """Name → what is timed, of the input and the mask (B, T), 0 or a large negative number; and their modules."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    _, _, size, heads = shape
    modules: dict[str, nn.Module] = {
        "torch": nn.TransformerEncoderLayer(size, heads, 4 * size, DROPOUT, "gelu", batch_first=True),
        "products": Products(size, heads),
    }
    config = {"hidden_size": size, "num_attention_heads": heads, "intermediate_size": 4 * size}
    for attention in ("eager", "sdpa"):
        modules[attention] = BertLayer(BertConfig(**config, attn_implementation=attention))
    for name, options in OURS.items():
        told = {"attn_dropout_ratio": DROPOUT, "hidden_dropout_ratio": DROPOUT, "pre_layer_norm": False, **options}
        modules[name] = TransformerLayer(TransformerLayerConfig(hidden_size=size, heads=heads, **told))

    def of(name: str, module: nn.Module) -> Run:
        if name == "torch":
            return lambda x, mask: module(x, src_key_padding_mask=mask)
        if name == "products":
            return lambda x, mask: module(x)

        def run(x: Tensor, mask: Tensor) -> Tensor:
            y = module(x, mask[:, None, None])
            out: Tensor = y[0] if isinstance(y, tuple) else y
            return out

        return run

    order = (*PEERS, "products", *OURS)
    return {name: of(name, modules[name]) for name in order}, modules


def kept_units(run: Run, module: nn.Module, x: Tensor, mask: Tensor) -> float:
    """What autograd holds after a forward, in multiples of x."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(x, mask)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    for tensor in (mask, *module.parameters()):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(held.values()) / x.nbytes


def measure(shape: tuple[int, int, int, int], rounds: int) -> tuple[Seconds, dict[str, float]]:
    """Seconds of forward, and of forward and backward, of each round; and units."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, tokens, size, _ = shape
    runs, modules = contenders(shape)
    x, grad = torch.randn(batch, tokens, size, requires_grad=True), torch.randn(batch, tokens, size)
    mask = torch.where(torch.arange(tokens) < tokens - tokens // 8, 0.0, -10000.0).expand(batch, tokens).contiguous()
    units = {name: kept_units(run, modules[name], x, mask) for name, run in runs.items()}
    seconds: Seconds = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            x.grad = None
            modules[name].zero_grad()
            began = time.process_time()
            y = run(x, mask)
            middle = time.process_time()
            y.backward(grad)
            ended = time.process_time()
            if turn >= 2:
                seconds[name].append((middle - began, ended - began))
    return seconds, units


def spread(values: Sequence[float]) -> str:
    """The median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def page(seconds: Seconds, units: dict[str, float]) -> str:
    """The table."""
    best = [min(each) for each in zip(*([both for _, both in seconds[name]] for name in PEERS), strict=True)]
    own = [both for _, both in seconds["zoo"]]
    rows = []
    for name, times in seconds.items():
        both = [both for _, both in times]
        rows.append([
            name, f"{1e3 * statistics.median(forward for forward, _ in times):.1f}",
            f"{1e3 * statistics.median(both):.1f}",
            spread([a / b for a, b in zip(both, best, strict=True)]),
            spread([a / b for a, b in zip(both, own, strict=True)]) if name.startswith("zoo, ") else "",
            "" if name == "products" else f"{units[name]:.2f}",
        ])  # fmt: skip
    return table(["layer", "forward, ms", "both, ms", "/ peer", "/ zoo", "units kept"], rows)


def main() -> None:
    """Measure, print, and write the page if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="a small layer, two rounds")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md")
    args = parser.parse_args()
    text = page(*measure(SMALL if args.quick else BERT, 2 if args.quick else args.rounds))
    print(text)
    if args.write_results:
        about = (__doc__ or "").partition("A layer of")
        head = (
            "# A transformer layer\n\nWritten by `python -m benchmarks.nn.layer --write-results`, "
            f"{args.rounds} rounds.\n\n{facts(machine(['torch', 'transformers']))}\n"
        )
        RESULTS.write_text(f"{head}\n{about[1]}{about[2].rstrip()}\n\n{text}\n\n{remarks(RESULTS)}", encoding="utf-8")


if __name__ == "__main__":
    main()
