"""One contender: a token of a model whose layers are on disk, and the most memory that it took."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import answer

TOKENS = 8


class Peak:
    """The largest PSS of this process while it is open, in bytes."""

    def __init__(self) -> None:
        self.bytes, self._stop = pss(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, pss())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def pss() -> int:
    """Of this process, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(spec: dict[str, Any], rank: int) -> dict[str, float]:
    """See benchmarks.inference.streaming."""
    import torch
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with init_empty_weights():
        model: Any = LlamaForCausalLM(LlamaConfig(**spec["shape"], tie_word_embeddings=False))
    model.eval()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    outside = sum(p.nbytes for p in model.parameters()) - layers

    def weights(name: str) -> torch.Tensor:
        shape = shapes[name]
        return torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)

    ids = torch.arange(3, 11)[None]
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        before = pss()
        with Peak() as peak:
            found = _zoo(model, weights, folder, int(layers / spec["ratio"]) if spec["contender"] == "zoo" else 0)
            if spec["contender"] == "accelerate":
                _offload(model, weights, folder)
            model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
            read = found.bytes_read if found else 0
            begun = time.perf_counter()
            model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **options)
            token = (time.perf_counter() - begun) / TOKENS
        if not found:
            return {"token_s": token, "streamed": float(layers), "speed": layers / token, "peak": peak.bytes - before}
        streamed = (found.bytes_read - read) / TOKENS
        bare = _bare(folder)
        return {
            "token_s": token, "streamed": streamed, "speed": streamed / token, "of_bare": streamed / token / bare,
            "peak": peak.bytes - before, "of_told": (peak.bytes - before) / (found.num_bytes + outside),
        }  # fmt: skip


def _zoo(model: Any, weights: Any, folder: str, budget: int) -> Any:
    if not budget:
        return None
    from zoo.inference import stream
    from zoo.inject import inject

    inject(model)
    return stream(model, folder, budget_bytes=budget, weights=weights)


def _offload(model: Any, weights: Any, folder: str) -> None:
    """Each layer's weights are read before its forward and dropped after it."""
    from accelerate import disk_offload
    from accelerate.utils import set_module_tensor_to_device

    for name, _ in list(model.named_parameters()):
        set_module_tensor_to_device(model, name, "cpu", value=weights(name))
    for index, layer in enumerate(model.model.layers):
        disk_offload(layer, Path(folder) / str(index), execution_device="cpu")


def _bare(folder: str) -> float:
    """Bytes a second of reading the files of the layers, two at a time, with checksums, and nothing else."""
    import torch

    from zoo.io import Handle

    files = sorted(path for path in Path(folder).rglob("*.bin"))
    size = max(path.stat().st_size for path in files)
    with Handle(block_size=1 << 20, queue_depth=8, num_threads=1) as handle:
        buffers = [handle.empty((size,), dtype=torch.uint8) for _ in range(2)]
        begun, futures = time.perf_counter(), []
        for turn in range(3):
            for index, path in enumerate(files):
                if len(futures) == 2:
                    futures.pop(0).wait()
                futures.append(
                    handle.async_pread(buffers[(turn * len(files) + index) % 2][: path.stat().st_size], path)
                )
        for future in futures:
            future.wait()
        return 3 * sum(path.stat().st_size for path in files) / (time.perf_counter() - begun)


if __name__ == "__main__":
    answer(measure)
