"""The time of a step: against an execution of 1F1B event by event, and the laws that any forecast must keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import LEAN, Device, Layout, Run, Software, Transformer, calibrate, product_s, read_hardware, step_time
from zoo.cost.hardware import Measured, Tile

A100 = read_hardware("a100-80")
GPT = Transformer(hidden=1024, heads=16, layers=24, seq=1024, vocab=51_200)
LAYOUTS = st.builds(
    lambda tensor, data, pipeline, micro, n, stage, recompute, chunks: Layout(
        tensor=tensor, data=data, pipeline=pipeline, micro_batch=micro, global_batch=n * data * micro,
        stage=stage, recompute=recompute, chunks=chunks if pipeline > 1 else 1,
    ),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8, 32]), st.sampled_from([1, 2, 4]), st.integers(1, 4),
    st.integers(1, 9), st.integers(0, 3), st.sampled_from(["none", "selective", "alternate", "full"]),
    st.sampled_from([1, 3]),
)  # fmt: skip
HOSTS = st.builds(
    Software, forward_s=st.floats(0, 0.01), backward_s=st.floats(0, 0.01), head_s=st.floats(0, 0.1),
    contention=st.floats(0, 1), reduce_part=st.floats(0, 1), step_s=st.floats(0, 0.1),
)  # fmt: skip


@given(LAYOUTS, HOSTS)
def test_laws(layout: Layout, software: Software) -> None:
    """Parts add up and are none below 0; slower machines are slower; what is computed is all that is computed."""
    found = step_time(GPT, layout, A100, software)
    parts = found.parts()
    assert min(parts.values()) >= -1e-12
    assert found.step_s == pytest.approx(sum(parts.values()))
    assert 0 < found.mfu <= found.hfu < 1
    for change in ({"bytes_per_s": A100.device.bytes_per_s / 2}, {"reached": 0.4}):
        slower = dataclasses.replace(A100, device=dataclasses.replace(A100.device, **change))  # type: ignore[arg-type]
        assert step_time(GPT, layout, slower, software).step_s >= found.step_s * (1 - 1e-12)
    products = 3 * layout.global_batch * GPT.seq * 2 * (
        GPT.layers * 12 * GPT.hidden**2 + GPT.vocab * GPT.hidden + GPT.layers * 2 * GPT.seq * GPT.hidden
    )  # fmt: skip
    assert found.flops == pytest.approx(products, rel=1e-12)
    if layout.recompute == "full":
        assert found.again_flops == pytest.approx(products / 3 - layout.global_batch * GPT.seq * 2 * GPT.vocab * 1024)


@given(p=st.integers(1, 6), n=st.integers(1, 12))
def test_1f1b_is_what_its_events_take(p: int, n: int) -> None:
    """Each rank runs its forwards and backwards in 1F1B's order, as soon as what it needs is there.

    The first stage also embeds and the last one has the head: the truth lies between stages that all do, and none.
    """
    model = dataclasses.replace(GPT, layers=p, vocab=1, hidden=512, heads=8)
    one, two = (
        step_time(dataclasses.replace(model, layers=layers), Layout(global_batch=1), A100, _QUIET).step_s
        for layers in (1, 2)
    )
    found = step_time(model, Layout(global_batch=n, pipeline=p), _FREE_MESSAGES, _QUIET).step_s
    least, most = (_executed(p, n, stage / 3, 2 * stage / 3) for stage in (two - one, one))
    assert least * (1 - 1e-9) <= found <= most * (1 + 1e-9)
    assert most < 1.06 * least


_QUIET = Software(gap_s=0.0, loss_bytes=0.0, update_bytes=0.0, message_s=0.0)
_FREE_MESSAGES = dataclasses.replace(
    A100, inside=dataclasses.replace(A100.inside, latency_s=0.0, bytes_per_s=1e18),
    between=dataclasses.replace(A100.between, latency_s=0.0, bytes_per_s=1e18),
)  # fmt: skip


def _executed(p: int, n: int, forward: float, backward: float) -> float:
    orders = []
    for rank in range(p):
        warm = min(p - rank - 1, n)
        order = [("F", i) for i in range(warm)]
        for i in range(n - warm):
            order += [("F", warm + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(n - warm, n)])
    done: dict[Any, float] = {}
    now, at = [0.0] * p, [0] * p
    while any(at[r] < len(orders[r]) for r in range(p)):
        for r in range(p):
            while at[r] < len(orders[r]):
                kind, i = orders[r][at[r]]
                need = ("F", i, r - 1) if kind == "F" and r else ("B", i, r + 1) if kind == "B" and r < p - 1 else None
                if need is not None and need not in done:
                    break
                now[r] = max(now[r], done.get(need, 0.0)) + (forward if kind == "F" else backward)
                done[kind, i, r] = now[r]
                at[r] += 1
    return max(now)


def test_a_gather_that_is_longer_than_a_layer_is_exposed() -> None:
    layout = Layout(global_batch=64, data=64, stage=3)
    slow = dataclasses.replace(A100, between=dataclasses.replace(A100.between, bytes_per_s=1e8))
    inside, outside = step_time(GPT, layout, A100), step_time(GPT, layout, slow)
    # Two gathers and a reduction of each layer leave a node through eight adapters; then those of the embedding.
    sent = 3 * 2 * GPT.layer_parameters * 63 / 64 / 8e8
    hidden = inside.products_s + inside.passes_s
    assert outside.gather_s == pytest.approx(GPT.layers * sent + sent - hidden, rel=0.1)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"layers": 0}, "layers=0; it is a whole number above 0"),
        ({"seq": 10**200}, "seq=10000+; it is a whole number above 0, and below 2"),
        ({"heads": True}, "heads=True; it is a whole number above 0"),
        ({"ffn": -5}, "ffn=-5; it is a whole number of at least 0"),
        ({"positions": 1.5}, "positions=1.5; it is a whole number of at least 0"),
        ({"kv_heads": 3}, "kv_heads=3 of 16 heads: it is to divide them"),
        ({"attention": "slow"}, "attention='slow'; allowed are eager, flash"),
        ({"bias": "some"}, "bias='some'; allowed are all, qkv, none"),
    ],
)
def test_shapes_that_no_transformer_has_are_refused(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(GPT, **given_)
    with pytest.raises(ValueError, match=r"global_batch=10000+; it is a whole number above 0, and below 2"):
        Layout(global_batch=10**200)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"global_batch": 0}, "global_batch=0; it is a whole number above 0"),
        ({"global_batch": 6, "data": 4}, "a batch of 6 is no whole number of micro-batches of 1 on 4 ranks"),
        ({"global_batch": 4, "stage": 4}, "stage=4; allowed are 0, 1, 2 and 3"),
        ({"global_batch": 4, "rings": 0}, "rings=0; it is a whole number above 0, or None"),
        ({"global_batch": 4, "pipeline": 5}, "24 layers on 5 stages of 1 chunk"),
        ({"global_batch": 4, "tensor": 3}, "16 heads, inner width 4096: tensor=3 divides not both"),
    ],
)
def test_what_cannot_be_is_refused(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step_time(GPT, Layout(**given_), A100)
    with pytest.raises(ValueError, match="width 10 has no 3 equal heads"):
        Transformer(hidden=10, heads=3, layers=1, seq=1, vocab=1)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 32))
def test_a_product_is_never_faster_than_peak_and_memory(m: int, n: int, k: int, batch: int) -> None:
    found = product_s(A100.device, m, n, k, batch=batch)
    assert found >= 2 * m * n * k * batch / (312e12 * A100.device.reached)
    assert found >= 2 * batch * (m * n + n * k + m * k) / A100.device.bytes_per_s
    assert product_s(A100.device, m + 1, n, k, batch=batch) >= found
    assert product_s(A100.device, m, n, k + 1, batch=batch) >= found


def test_measured_products_go_before_tiles() -> None:
    known = (Measured(m=64, n=64, k=64, flops_per_s=1e9), Measured(m=4096, n=64, k=64, flops_per_s=4e9))
    device = Device(
        name="mine", flops_per_s={"fp32": 1e10}, memory_bytes=1, bytes_per_s=1e15, products={"fp32": known},
        tiles=(Tile(rows=8, columns=8),),
    )  # fmt: skip
    assert product_s(device, 64, 64, 64, dtype="fp32") == pytest.approx(2 * 64**3 / 1e9)
    between = product_s(device, 512, 64, 64, dtype="fp32")
    assert between == pytest.approx(2 * 512 * 64 * 64 / 2.5e9)


@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0.5, 2))
def test_calibration_finds_the_numbers_that_runs_were_made_with(host: float, gap: float, reached: float) -> None:
    begun = Software(forward_s=1e-3, backward_s=2e-3, gap_s=2e-5)
    true = dataclasses.replace(begun, forward_s=host * 1e-3, backward_s=host * 2e-3, gap_s=gap * 2e-5)
    device = dataclasses.replace(A100.device, memory_reached=reached * A100.device.memory_reached)
    machine = dataclasses.replace(A100, device=device)
    runs = [
        Run(model=model, layout=layout, hardware=A100, step_s=step_time(model, layout, machine, true).step_s)
        for model in (GPT, dataclasses.replace(GPT, hidden=2048))
        for layout in (Layout(global_batch=b * 4, micro_batch=b) for b in (1, 2, 4, 8, 16))
    ]
    found = calibrate(runs, begun, ["gap_s", "memory_reached", "backward_s"])
    assert found.mean_error < 0.02
    assert calibrate(runs, LEAN, []).factors == {}


def test_what_cannot_be_calibrated_is_refused() -> None:
    run = Run(model=GPT, layout=Layout(global_batch=1), hardware=A100, step_s=1.0)
    with pytest.raises(ValueError, match="1 run\\(s\\) for 2 numbers"):
        calibrate([run], LEAN, ["gap_s", "step_s"])
    for name in ("name", "tiles", "speed"):
        with pytest.raises(ValueError, match=f"'{name}' is no number of a Software or of a Device"):
            calibrate([run], LEAN, [name])
    for step_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"a run took step_s={step_s}; it is a number above 0"):
            calibrate([dataclasses.replace(run, step_s=step_s)], LEAN, ["gap_s"])
    other = dataclasses.replace(run, hardware=dataclasses.replace(A100, adapters=1))
    with pytest.raises(ValueError, match="two machines of the runs are named 'a100-80'"):
        calibrate([run, other], LEAN, ["gap_s"])


@pytest.mark.parametrize("stage", range(4))
def test_a_head_of_its_own_is_reduced_and_updated(stage: int) -> None:
    """vocab x hidden parameters more where the head is not the embedding, on the rank that has both."""
    tied, own = (dataclasses.replace(GPT, vocab=1 << 20, tied=tied) for tied in (True, False))
    soft = dataclasses.replace(LEAN, reduce_part=1.0)
    layout = Layout(global_batch=8, data=8, stage=stage)
    less, more = (step_time(model, layout, _BANDWIDTH, soft) for model in (tied, own))
    head = own.vocab * own.hidden
    kept = head / (8 if stage else 1)
    rate = A100.device.bytes_per_s * A100.device.memory_reached
    assert more.update_s - less.update_s == pytest.approx(soft.update_bytes * kept / rate)
    halves = {0: 2, 1: 2, 2: 2, 3: 1}[stage]  # reduce-scatter and all-gather; stage 3 gathers when it computes
    wire = halves * 2 * head * 7 / 8 / A100.inside.bytes_per_s
    assert more.reduce_s - less.reduce_s == pytest.approx(wire, rel=1e-6)
    two = Layout(global_batch=8, data=4, pipeline=2, stage=min(stage, 1))
    assert step_time(tied, two, _BANDWIDTH, soft) == step_time(own, two, _BANDWIDTH, soft)  # no head here


def test_numbers_of_four_bytes_are_moved_and_sent_as_such() -> None:
    layout = Layout(global_batch=64, tensor=2, data=2, pipeline=2)
    two, four = (step_time(GPT, layout, _BANDWIDTH, _QUIET, dtype=dtype) for dtype in ("bf16", "fp32"))
    for name in ("passes_s", "tensor_s", "messages_s", "reduce_s"):
        assert getattr(four, name) == pytest.approx(2 * getattr(two, name)), name
    assert four.products_s > 2 * two.products_s
    assert four.flops == two.flops


_BANDWIDTH = dataclasses.replace(
    A100, inside=dataclasses.replace(A100.inside, latency_s=0.0, all_reduce={}),
    between=dataclasses.replace(A100.between, latency_s=0.0),
)  # fmt: skip
