"""The time of a training step of a transformer, in parts that add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from zoo.cost.collectives import seconds
from zoo.cost.hardware import Hardware
from zoo.cost.products import pass_s, product_s
from zoo.cost.software import LEAN, Software
from zoo.cost.transformer import Fused, Pass, Product, Recompute, Transformer, backward_of, forward_of_layer, whole

__all__ = ["Layout", "StepTime", "step_time", "time_lines"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job lies over ranks. The tensor axis is the innermost, then data, then the pipeline.

    Attributes:
        tensor, data, pipeline: sizes of the axes. chunks: of layers on each stage (interleaved 1F1B).
        micro_batch: sequences of one. global_batch: sequences of a step.
        stage: of ZeRO. recompute: what backward computes again. sequence_parallel: norms are split over ``tensor`` too.
        rings: adapters of a node that a group of ``data`` uses; its share of all by default.
    """

    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    chunks: int = 1
    stage: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    rings: int | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "tensor", "data", "pipeline", "chunks"):
            whole(f"a layout got {name}", getattr(self, name), least=1)
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"a layout got recompute={self.recompute!r}; allowed are {', '.join(get_args(Recompute))}."
            )  # fmt: skip
        if self.rings is not None and self.rings < 1:
            raise ValueError(f"a layout got rings={self.rings!r}; it is a whole number above 0, or None.")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"a layout got stage={self.stage!r}; allowed are 0, 1, 2 and 3.")
        if self.global_batch % (self.data * self.micro_batch):
            raise ValueError(
                f"a batch of {self.global_batch} is no whole number of micro-batches of {self.micro_batch} on "
                f"{self.data} ranks: it is to be a multiple of {self.data * self.micro_batch}."
            )

    @property
    def ranks(self) -> int:
        """All."""
        return self.tensor * self.data * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Of one step on one rank."""
        return self.global_batch // (self.data * self.micro_batch)

    def check(self, model: Transformer) -> None:
        """Raise ValueError where a model cannot lie so."""
        if model.layers % (self.pipeline * self.chunks):
            raise ValueError(
                f"{model.layers} layers on {self.pipeline} stages of {self.chunks} chunk(s): they are to be a multiple "
                f"of {self.pipeline * self.chunks}."
            )
        if model.heads % self.tensor or model.inner % self.tensor:
            raise ValueError(f"{model.heads} heads, inner width {model.inner}: tensor={self.tensor} divides not both.")


_TEXTS = {
    "products_s": "products of matrices", "passes_s": "passes over memory", "again_s": "computed again",
    "host_s": "waiting for the host", "tensor_s": "sums of the tensor axis", "gather_s": "exposed gathers, reductions",
    "bubble_s": "waiting for other stages", "messages_s": "messages between stages", "reduce_s": "exposed gradients",
    "update_s": "optimizer", "offload_s": "exposed copies and files",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on the rank that takes the longest; the parts add up to ``step_s``.

    Attributes:
        products_s, passes_s: of its own layers, the embedding and the head. again_s: what is computed again.
        host_s: the device waits for the host. tensor_s: sums of the tensor axis. gather_s: parameters of stage 3 and
            gradients of each micro-batch, as far as no computation hides them. bubble_s: it waits for other stages.
        messages_s: between stages. reduce_s: gradients over the data axis. update_s: the optimizer, and what a step
            costs whatever its size.
        offload_s: copies between device and host, and files on NVMe, as far as nothing hides them.
        flops: of forward and backward, of all ranks, attention as if nothing were masked ("dense").
            again_flops: of what is computed again, the scores in the backward of fused attention too.
            causal_flops: ``flops`` without what a causal mask hides.
        not_counted: what the job does that has no time here, in words.
    """

    products_s: float
    passes_s: float
    again_s: float
    host_s: float
    tensor_s: float
    gather_s: float
    bubble_s: float
    messages_s: float
    reduce_s: float
    update_s: float
    flops: float
    again_flops: float
    causal_flops: float
    tokens: int
    ranks: int
    peak_flops_per_s: float
    offload_s: float = 0.0
    not_counted: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """The sum of the parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        names = [f.name for f in fields(self) if f.name.endswith("_s") and f.name != "peak_flops_per_s"]
        return {name: float(getattr(self, name)) for name in names}

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do at their peak."""
        return self.flops / (self.step_s * self.ranks * self.peak_flops_per_s)

    @property
    def causal_mfu(self) -> float:
        """Without the FLOPs that a causal mask hides."""
        return self.causal_flops / (self.step_s * self.ranks * self.peak_flops_per_s)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return (self.flops + self.again_flops) / (self.step_s * self.ranks * self.peak_flops_per_s)

    def lines(self) -> list[str]:
        """As text: see :func:`time_lines`."""
        return time_lines(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Everything."""
        return {
            "step_s": self.step_s, **{f.name: getattr(self, f.name) for f in fields(self)},
            "tokens_per_s": self.tokens_per_s, "mfu": self.mfu, "causal_mfu": self.causal_mfu, "hfu": self.hfu,
        }  # fmt: skip


def time_lines(time: Mapping[str, Any]) -> list[str]:
    """A step time (``StepTime.to_dict()``) as text: the step, and its parts that are not next to nothing."""
    step_s = time["step_s"]
    return [
        f"a step: {step_s:.3f} s, {time['tokens_per_s']:,.0f} tokens/s ({time['tokens_per_s'] / time['ranks']:,.0f} a "
        f"rank), MFU {time['mfu']:.1%}, HFU {time['hfu']:.1%}",
        *(f"  {text:<28}{time[name]:>9.3f} s {time[name] / step_s:>6.1%}"
          for name, text in _TEXTS.items() if time[name] > 5e-4 * step_s),
        *(f"  not counted: {what}" for what in time["not_counted"]),
    ]  # fmt: skip


_ITEMSIZE = {"fp32": 4, "fp64": 8}
"""Bytes of a number; of every other dtype 2."""


@dataclass
class _Direction:
    """A layer forward, or back, on one rank."""

    products_s: float = 0.0
    passes_s: float = 0.0
    tensor_s: float = 0.0
    host_s: float = 0.0
    flops: float = 0.0
    again_flops: float = 0.0
    hidden_flops: float = 0.0  # of flops, what a causal mask hides

    @property
    def device_s(self) -> float:
        return self.products_s + self.passes_s + self.tensor_s


def step_time(
    model: Transformer, layout: Layout, hardware: Hardware, software: Software = LEAN, *, dtype: str = "bf16"
) -> StepTime:
    """Forecast one step.

    A micro-batch of one stage takes the longer of what its device computes and of what its host begins. 1F1B with p
    stages of v chunks takes ``n · slowest + (Σ others) / v`` for n micro-batches (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2). With stage 3 a layer takes as long as the gather of the next one, where that is
    longer.

    Args:
        dtype: of parameters, of what is kept and sent, and of products: numbers of "fp32" have 4 bytes, others 2.

    Raises:
        ValueError: the model cannot lie so. HardwareError: the device states no FLOP/s for the dtype.
    """
    layout.check(model)
    return _Step(model, layout, hardware, software, dtype).time()


class _Step:
    def __init__(self, model: Transformer, layout: Layout, hardware: Hardware, software: Software, dtype: str) -> None:
        self.model, self.layout, self.hardware, self.software, self.dtype = model, layout, hardware, software, dtype
        self.tokens = layout.micro_batch * model.seq
        self.itemsize = _ITEMSIZE.get(dtype, 2)
        self.hidden = (model.seq - 1) / (2 * model.seq)  # of scores, the part above the diagonal
        self.local_data = max(min(layout.data, hardware.ranks_per_node // layout.tensor), 1)

    def time(self) -> StepTime:
        model, layout, soft = self.model, self.layout, self.software
        forward, backward = self._layer()
        repeated = self._again(forward)
        layers, n, p = model.layers // layout.pipeline, layout.micro_batches, layout.pipeline
        embedding, head = self._embedding(), self._head()
        stages = []
        gather, exposed_once = self._gathers(forward, backward, repeated)
        for index in range(p):
            last, first = index == p - 1, index == 0
            more = [embedding] * first + [head] * last
            device = layers * (forward.device_s + backward.device_s) + sum(d.device_s for d in more)
            again = layers * repeated.device_s
            host = layers * (forward.host_s + backward.host_s + repeated.host_s)
            host += soft.micro_batch_s + sum(d.host_s for d in more)
            stages.append((max(device + again, host) + layers * gather, device, again, host, more))
        slowest = max(stages, key=lambda s: s[0])
        message = self._message()
        _, device, again, _, more = slowest
        own = [(forward, layers), (backward, layers), *((d, 1) for d in more)]
        others = sum(s[0] for s in stages) - slowest[0]
        ends = [d for s in stages for d in s[4]]
        flops, causal_flops, again_flops = self._flops(forward, backward, repeated, ends)
        return StepTime(
            products_s=n * sum(k * d.products_s for d, k in own), passes_s=n * sum(k * d.passes_s for d, k in own),
            tensor_s=n * sum(k * d.tensor_s for d, k in own), again_s=n * again,
            host_s=n * (slowest[0] - layers * gather - device - again),
            gather_s=n * layers * gather + exposed_once,
            bubble_s=others / layout.chunks,
            messages_s=(n * layout.chunks + (p - 1)) * message if p > 1 else 0.0,
            reduce_s=self._reduce(), update_s=self._update(),
            flops=flops, causal_flops=causal_flops, again_flops=again_flops,
            tokens=layout.global_batch * model.seq, ranks=layout.ranks,
            peak_flops_per_s=self.hardware.device.peak(self.dtype),
        )  # fmt: skip

    def _flops(
        self, forward: _Direction, backward: _Direction, repeated: _Direction, ends: list[_Direction]
    ) -> tuple[float, float, float]:
        """(dense, causal, computed again), of all ranks. ends: embedding and head."""
        times, layers = self.layout.micro_batches * self.layout.data * self.layout.tensor, self.model.layers
        flops = times * (layers * (forward.flops + backward.flops) + sum(d.flops for d in ends))
        hidden = times * layers * (forward.hidden_flops + backward.hidden_flops)
        again = repeated.flops + backward.again_flops
        return flops, flops - hidden, times * layers * again

    # A layer ---------------------------------------------------------------------------------------------------------

    def _layer(self) -> tuple[_Direction, _Direction]:
        layout, soft = self.layout, self.software
        forward, backward = _Direction(host_s=soft.forward_s), _Direction(host_s=soft.backward_s)
        operations = list(
            forward_of_layer(
                self.model, layout.micro_batch, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel
            )
        )
        for operation in operations:
            self._add(forward, operation)
            for back in backward_of(operation):
                self._add(backward, back)
        heads = max(self.model.heads // layout.tensor, 1) * layout.micro_batch
        for direction in (forward, backward):
            if layout.tensor > 1:
                direction.tensor_s = 2 * self._sum_of_tensor()
                direction.host_s += soft.split_s
            if heads % soft.whole_softmax:
                direction.host_s += soft.unfused_s
        if layout.sequence_parallel and layout.tensor > 1:
            # Backward gathers what the products were given once more.
            backward.tensor_s += self._sum_of_tensor()
        return forward, backward

    def _add(self, direction: _Direction, operation: Product | Pass | Fused) -> None:
        device = self.hardware.device
        if isinstance(operation, Pass):
            direction.passes_s += pass_s(device, operation.num_bytes * self.itemsize / 2)
            return
        if isinstance(operation, Fused):
            rate = device.peak(self.dtype) * self.software.attention_reached
            direction.products_s += operation.flops / rate + self.software.gap_s
            direction.flops += operation.dense_flops
            direction.again_flops += operation.again_flops
            direction.hidden_flops += operation.dense_flops * self.hidden
            return
        whole = product_s(
            device, operation.m, operation.n, operation.k, batch=operation.batch, dtype=self.dtype,
            itemsize=self.itemsize,
        )  # fmt: skip
        direction.products_s += whole + self.software.gap_s
        direction.flops += operation.flops
        direction.hidden_flops += 0.0 if operation.weight else operation.flops * self.hidden

    def _sum_of_tensor(self) -> float:
        size = self.itemsize * self.tokens * self.model.hidden
        local = min(self.layout.tensor, self.hardware.ranks_per_node)
        return seconds("all_reduce", size, self.layout.tensor, self.hardware, local=local)

    def _again(self, forward: _Direction) -> _Direction:
        """Of a layer, what backward computes once more."""
        if self.layout.recompute == "none":
            return _Direction()
        if self.layout.recompute == "full":
            return forward
        # Nothing of the tensor axis. The attention's core: its products and its softmax.
        found = _Direction()
        operations = list(forward_of_layer(self.model, self.layout.micro_batch, tensor=self.layout.tensor))
        if self.layout.recompute == "alternate":
            model, t = self.model, self.layout.tensor
            kept = {"k": model.kv_width, "out": model.hidden, "in": model.inner if model.gated else model.hidden}
            for columns in kept.values():
                self._add(found, Product(m=self.tokens, n=columns // t, k=model.hidden))
            for operation in operations:
                if isinstance(operation, Pass):
                    self._add(found, operation)
            return found
        at = [i for i, o in enumerate(operations) if isinstance(o, Product) and not o.weight]
        for operation in operations[at[0] : at[-1] + 1] if self.model.attention == "eager" else ():
            self._add(found, operation)
        return found

    def _embedding(self) -> _Direction:
        found = _Direction()
        self._add(found, Pass(num_bytes=12 * self.tokens * self.model.hidden))
        return found

    def _head(self) -> _Direction:
        """Logits, their loss, and back."""
        t = self.layout.tensor
        rows = -(-self.model.vocab // t)
        found = _Direction(host_s=self.software.head_s)
        product = Product(m=self.tokens, n=rows, k=self.model.hidden)
        for operation in (product, *backward_of(product)):
            self._add(found, operation)
        found.products_s -= 3 * self.software.gap_s
        self._add(found, Pass(num_bytes=self.software.loss_bytes * self.tokens * rows))
        return found

    # Communication ---------------------------------------------------------------------------------------------------

    def _over_data(self, op: str, num_bytes: float) -> float:
        layout = self.layout
        found = seconds(op, num_bytes, layout.data, self.hardware, local=self.local_data, rings=layout.rings)
        return found / self.software.link_reached

    def _gathers(self, forward: _Direction, backward: _Direction, again: _Direction) -> tuple[float, float]:
        """(exposed a layer and micro-batch, once a step): gathers of stage 3 and reductions of each micro-batch."""
        layout, soft = self.layout, self.software
        if layout.stage < 2 or layout.data == 1:
            return 0.0, 0.0
        parameters = self.model.layer_parameters / layout.tensor
        gather = self._over_data("all_gather", self.itemsize * parameters) if layout.stage == 3 else 0.0
        reduce = self._over_data("reduce_scatter", self.gradient_bytes * parameters)
        ahead = max(forward.device_s, forward.host_s)
        back = max(backward.device_s + again.device_s, backward.host_s + again.host_s)
        slowed = soft.contention * (min(gather, ahead) + min(gather + reduce, back))
        exposed = max(gather - ahead, 0.0) + max(gather + reduce - back, 0.0) + slowed
        return exposed, gather + reduce

    def _message(self) -> float:
        """Seconds of the messages of a micro-batch between two stages: there, and the gradient back."""
        layout = self.layout
        size = (
            self.itemsize * self.tokens * self.model.hidden / layout.tensor
        )  # each rank of the tensor axis sends its part
        beyond = layout.tensor * layout.data >= self.hardware.ranks_per_node
        link = self.hardware.between if beyond else self.hardware.inside
        rate = link.bytes_per_s
        if beyond:
            rate = min(rate, self.hardware.node_bytes_per_s / self.hardware.ranks_per_node)
        return 2 * (self.software.message_s + link.latency_s + size / rate)

    def _reduce(self) -> float:
        layout = self.layout
        if layout.data == 1:
            return 0.0
        here = self._parameters_here()
        if layout.stage >= 2:
            left = self._table_parameters() / layout.tensor
            return self._over_data("reduce_scatter", self.gradient_bytes * left) + (
                self._over_data("all_gather", self.itemsize * here) if layout.stage == 2 else 0.0
            )
        if layout.stage == 1:
            part = self._over_data("reduce_scatter", self.gradient_bytes * here)
            return self.software.reduce_part * part + self._over_data("all_gather", self.itemsize * here)
        return self.software.reduce_part * self._over_data("all_reduce", self.gradient_bytes * here)

    def _parameters_here(self) -> float:
        """Of the first stage."""
        model, layout = self.model, self.layout
        return (model.layers // layout.pipeline * model.layer_parameters + self._table_parameters()) / layout.tensor

    def _table_parameters(self) -> int:
        """Of the first stage, those outside of layers: the embedding, and a head of its own where it is the last."""
        model = self.model
        head = model.vocab * model.hidden if not model.tied and self.layout.pipeline == 1 else 0
        return model.embedding_parameters + head

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient on the wire; one is never narrower there than its parameter."""
        return max(self.software.gradient_bytes, self.itemsize)

    def _update(self) -> float:
        here = self._parameters_here() / (self.layout.data if self.layout.stage else 1)
        return pass_s(self.hardware.device, self.software.update_bytes * here) + self.software.step_s
