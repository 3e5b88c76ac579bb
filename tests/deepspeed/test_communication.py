"""``deepspeed.comm`` on simulated ranks, and ``deepspeed.accelerator``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zoo.deepspeed as deepspeed
from zoo import sim

dist: Any = deepspeed.comm


# -- comm -------------------------------------------------------------------------------------------------------------


def collectives(rank: int) -> None:
    n = dist.get_world_size()
    assert (dist.get_rank(), dist.get_world_group().size(), dist.get_global_rank(None, rank)) == (rank, n, rank)
    x = torch.full((4,), float(rank + 1))
    assert dist.all_reduce(x) is None
    total = n * (n + 1) / 2
    assert (x == total).all()
    handle = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, async_op=True)
    handle.wait()
    dist.inference_all_reduce(x)
    assert (x == total * n).all()
    out = torch.empty(2 * n)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out[::2].tolist() == list(range(n))
    dist.allgather_fn(out, torch.full((2,), float(-rank)))
    parts = [torch.empty(1) for _ in range(n)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    assert torch.cat(parts).tolist() == list(range(n))
    for scatter in (dist.reduce_scatter_fn, dist.reduce_scatter_tensor):
        own = torch.empty(1)
        scatter(own, torch.arange(float(n)))
        assert own.item() == rank * n
    own = torch.empty(1)
    dist.reduce_scatter(own, [torch.full((1,), float(i)) for i in range(n)], group=None)
    assert own.item() == rank * n
    both = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(both)
    assert all((t == n).all() for t in both)
    wide = [torch.empty(n), torch.empty(2 * n)]
    dist.all_gather_coalesced(wide, [torch.tensor([1.0 * rank]), torch.ones(2)], async_op=True).wait()
    assert wide[0].tolist() == list(range(n))
    swapped = torch.empty(n)
    dist.all_to_all_single(swapped, torch.arange(float(n)) + 10 * rank)
    assert swapped.tolist() == [10 * r + rank for r in range(n)]
    dist.broadcast(x, 0)
    dist.reduce(x, dst=0)
    said: list[Any] = [None] * n
    dist.all_gather_object(said, {"rank": rank})
    assert [s["rank"] for s in said] == list(range(n))
    objects = [rank]
    dist.broadcast_object_list(objects, src=n - 1)
    assert objects == [n - 1]
    group = dist.new_group([0])
    assert dist.get_rank(group) == (0 if rank == 0 else -1)
    assert dist.get_all_ranks_from_group() == list(range(n))
    if n > 1:
        peer = {0: 1, 1: 0}.get(rank)
        if peer is not None:
            got = torch.empty(1)
            ops = [dist.P2POp(dist.isend, torch.ones(1) * rank, peer), dist.P2POp(dist.irecv, got, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert got.item() == peer
    assert dist.has_all_gather_into_tensor()
    assert dist.has_reduce_scatter_tensor()
    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_return_what_torchs_do(ranks: int) -> None:
    sim.run(ranks, collectives)


def test_without_a_process_group_ranks_are_refused() -> None:
    assert dist.is_available()
    assert not dist.is_initialized()
    for ask in (dist.get_rank, dist.get_world_size, dist.get_local_rank, dist.get_world_group, dist.new_group):
        with pytest.raises(AssertionError, match="init_distributed"):
            ask()
    with pytest.raises(AssertionError, match="isend or"):
        dist.P2POp(dist.send, torch.ones(1), 0)
    with pytest.raises(AttributeError, match=r"deepspeed-names\.md"):
        dist.nothing_like_this  # noqa: B018


def test_the_log_counts_what_goes_through(capsys: pytest.CaptureFixture[str]) -> None:
    dist.configure({"comms_logger": {"enabled": True}})
    try:

        def job(rank: int) -> Any:
            dist.all_reduce(torch.ones(8), log_name="mine")
            return dist.log_summary(show_straggler=True, return_dict=True)

        found = sim.run(1, job)[0]
        row = found["summary"]["mine"][32]
        assert (row["count"], row["msg_size_str"]) == (1, "32.0 B")
        assert found["straggler_analysis"]["mine"][32]["total_straggler_ms"] == 0
        assert "mine" in capsys.readouterr().out
        assert dist.has_comm_data()
        assert "mine" in dist.get_logged_comm_ops()
        assert dist.get_comm_operation_count() >= 1
        with pytest.raises(ValueError, match="prof_all"):
            dist.configure({"comms_logger": {"enable": True}})
    finally:
        dist.reset_log()
        dist.configure(enabled=False)
    assert not dist.has_comm_data()


@pytest.fixture
def log() -> Iterator[Any]:
    """The log, as it was afterwards."""
    from zoo.deepspeed.comm.comm import comms_logger

    before = dict(vars(comms_logger))
    comms_logger.comms_dict = {}
    yield comms_logger
    vars(comms_logger).update(before)


SECTION = {"enabled": True, "prof_all": False, "prof_ops": ["mine"]}


def test_the_log_is_configured_by_a_configuration(log: Any) -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "comms_logger": SECTION}
    config = deepspeed.DeepSpeedConfig(document)
    assert config.comms_config.comms_logger_enabled
    assert config.comms_config.comms_logger.prof_ops == ["mine"]
    dist.configure(config)
    assert (log.enabled, log.prof_all, log.prof_ops) == (True, False, ["mine"])
    log.set(enabled=False)
    dist.configure(deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}))
    assert not log.enabled
    off = deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "comms_logger": {"prof_ops": ["other"]}})
    dist.configure(deepspeed_config=off)
    assert (log.enabled, log.prof_ops) == (False, ["other"])
    sim.run(1, lambda rank: deepspeed.init_distributed(config=config))
    assert log.enabled
    with pytest.raises(ValueError, match="got object; give it a dict"):
        dist.configure(object())


def test_initialize_configures_the_log_with_all_of_its_section(log: Any) -> None:
    section = {"enabled": True, "prof_all": True, "verbose": True, "debug": True}

    def job(rank: int) -> None:
        deepspeed.initialize(
            model=torch.nn.Linear(2, 2),
            config={
                "train_micro_batch_size_per_gpu": 1, "comms_logger": section,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )  # fmt: skip
        dist.all_reduce(torch.ones(2))

    sim.run(1, job)
    assert (log.enabled, log.prof_all, log.verbose, log.debug) == (True, True, True, True)
    assert list(log.comms_dict) == ["all_reduce | [Caller Func: job]"]


def test_a_section_says_all_of_the_log_and_not_what_an_earlier_one_said(log: Any) -> None:
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["mine"], "verbose": True}})
    dist.configure({})  # no section: as it was
    assert (log.enabled, log.prof_all, log.prof_ops, log.verbose) == (True, False, ["mine"], True)
    dist.configure({"comms_logger": {"enabled": True}})
    assert (log.enabled, log.prof_all, log.prof_ops, log.verbose) == (True, True, [], False)
    for silent in ({}, {"enabled": "auto"}, {"enabled": None, "prof_all": "auto"}):
        dist.configure({"comms_logger": {"enabled": True, "prof_all": False}})
        dist.configure({"comms_logger": silent})
        assert (log.enabled, log.prof_all) == (False, True)


def test_the_log_counts_names_that_were_asked_for(log: Any) -> None:
    log.set(**SECTION)

    def job(rank: int) -> None:
        dist.all_reduce(torch.ones(2), log_name="mine")
        dist.all_reduce(torch.ones(2))
        dist.inference_all_reduce(torch.ones(2))
        log.set(prof_ops=["all_reduce"])
        dist.inference_all_reduce(torch.ones(4))

    sim.run(1, job)
    assert {name: {size: row[0] for size, row in rows.items()} for name, rows in log.comms_dict.items()} == {
        "mine": {8: 1}, "all_reduce": {16: 1},
    }  # fmt: skip


def test_the_log_counts_messages_that_nobody_waits_for(log: Any) -> None:
    log.set(enabled=True, prof_all=True)

    def job(rank: int) -> None:
        got = torch.empty(3)
        send, receive = (dist.isend, torch.ones(3)), (dist.irecv, got)
        works = [op(tensor, 1 - rank) for op, tensor in ([send, receive] if rank else [receive, send])]
        pair = [dist.P2POp(dist.isend, torch.ones(2), 1 - rank), dist.P2POp(dist.irecv, torch.empty(2), 1 - rank)]
        for work in (*works, *dist.batch_isend_irecv(pair)):
            work.wait()
        dist.barrier()

    sim.run(2, job)
    counted = {name: {size: row[0] for size, row in rows.items()} for name, rows in log.comms_dict.items()}
    assert counted == {"isend": {12: 2}, "irecv": {12: 2}, "batch_isend_irecv": {16: 2}, "barrier": {0: 2}}


def test_names_of_the_log_have_the_caller_where_debug_is_on(log: Any) -> None:
    log.set(enabled=True, prof_all=True, debug=True)

    def job(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        dist.log_summary()

    sim.run(1, job)
    assert log.get_operation_names() == [
        "all_reduce | [Caller Func: job]",
        "log_summary_barrier | [Caller Func: log_summary]",
    ]
    assert log.get_total_operations() == 3


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        ("all_reduce", (0.008, 0.004)),
        ("all_reduce_coalesced", (0.008, 0.004)),
        ("inference_all_reduce", (0.008, 0.004)),
        ("all_gather", (0.008, 0.004)),
        ("all_gather_into_tensor", (0.008, 0.004)),
        ("reduce_scatter", (0.008, 0.004)),
        ("reduce_scatter_tensor", (0.008, 0.004)),
        ("all_to_all", (0.004, 0.002)),
        ("all_to_all_single", (0.004, 0.002)),
        ("broadcast", (0.004, 0.004)),
        ("send", (0.004, 0.004)),
    ],
)
def test_speeds_are_those_of_deepspeed(operation: str, found: tuple[float, float]) -> None:
    from zoo.deepspeed.utils.comms_logging import calc_bw_log

    assert calc_bw_log(operation, 1000, 2.0, 2) == pytest.approx(found)


# -- accelerator ------------------------------------------------------------------------------------------------------


def test_the_cpu_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = deepspeed.accelerator
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    accelerator.set_accelerator(None)
    here = deepspeed.get_accelerator()
    try:
        assert here is accelerator.get_accelerator()
        assert (here.device_name(), here.current_device_name(), here.communication_backend_name()) == (
            "cpu", "cpu", "gloo",
        )  # fmt: skip
        assert here.on_accelerator(torch.ones(1))
        assert here.is_available()
        assert here.is_synchronized_device()
        assert here.FloatTensor([1, 2]).dtype is torch.float32
        assert torch.bfloat16 in here.supported_dtypes()
        assert 0 < here.memory_allocated() <= here.max_memory_allocated() <= here.total_memory()
        assert 0 < here.available_memory() <= here.total_memory()
        x = torch.ones(3)
        assert here.pin_memory(x) is x
        with here.stream(here.current_stream()), here.device(0):
            here.synchronize()
        state = here.get_rng_state()
        first = torch.rand(2)
        here.set_rng_state(state)
        assert torch.equal(first, torch.rand(2))
        assert here.create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
        assert not here.create_op_builder("EvoformerAttnBuilder").is_compatible()
        assert here.create_op_builder("nothing") is None
        with pytest.raises(ValueError, match="inductor"):
            here.set_compile_backend("nothing")
        with pytest.raises(AssertionError, match="DeepSpeedAccelerator"):
            accelerator.set_accelerator("cpu")
        monkeypatch.setenv("DS_ACCELERATOR", "xyz")
        accelerator.set_accelerator(None)
        with pytest.raises(ValueError, match="cuda, cpu"):
            accelerator.get_accelerator()
    finally:
        accelerator.set_accelerator(None)


def test_several_at_once_are_nothing_outside_of_the_group() -> None:
    def job(rank: int) -> None:
        group = torch.distributed.new_group([1, 2])
        x, out = torch.ones(2), torch.zeros(4)
        for later in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's word for it
                for handle in (
                    dist.all_reduce_coalesced([x, x + 1], group=group, async_op=later),
                    dist.all_gather_coalesced([out], [x], group=group, async_op=later),
                ):
                    assert (handle is None) == (rank == 0 or not later)
                    if handle is not None:
                        handle.wait()
        assert x.tolist() == ([1.0, 1.0] if rank == 0 else [4.0, 4.0])

    sim.run(3, job)


def test_the_log_has_nothing_of_ranks_outside_of_the_group_and_gives_copies(log: Any) -> None:
    log.set(enabled=True, prof_all=True)

    def job(rank: int) -> None:
        group = torch.distributed.new_group([1, 2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's word for it
            dist.all_reduce(torch.ones(2), group=group)

    sim.run(3, job)
    before = log.get_raw_data()
    assert before["all_reduce"][8][0] == 2
    log.append("all_reduce", "all_reduce", 1.0, 8)
    assert before["all_reduce"][8][0] == len(before["all_reduce"][8][1]) == 2
