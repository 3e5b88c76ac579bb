"""Every schedule of the battery: its table, its programs, what the validator and the interpreter say of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipe.battery import CASES, KINDS, Case, all_sizes, some_sizes, tables
from tests.pipe.mutants import mutant
from tests.profiles import examples

from zoo import registry
from zoo.pipe import Computation, Kind, ScheduleError, Step, Table, Transfer, build, check, lower
from zoo.pipe.interpret import Outcome, interpret
from zoo.pipe.schedules import CsvSchedule, from_csv, looped, to_csv, v_shaped
from zoo.pipe.schedules.inference import forwards
from zoo.pipe.validate import validate

BY_NAME = pytest.mark.parametrize("case", CASES, ids=str)


def facts(table: Table) -> dict[str, Any]:
    return {"rank_of": table.rank_of, "num_micro_batches": table.num_micro_batches, "trains": table.trains}


def test_the_battery_has_every_schedule_that_has_a_name() -> None:
    assert {*KINDS, "csv", "auto"} == set(registry.names("pipe_schedule"))  # auto is one of the others


# -- tables -----------------------------------------------------------------------------------------------------------


@examples(times=3)
@given(tables())
def test_schedules_are_accepted_and_compute_what_one_process_computes(table: Table) -> None:
    check(table)
    verdict = interpret(lower(table), **facts(table))
    assert verdict.outcome is Outcome.DONE, verdict.reason


@pytest.mark.parametrize(
    "sizes", [pytest.param(some_sizes, marks=pytest.mark.slow), pytest.param(all_sizes, marks=pytest.mark.campaign)]
)
@BY_NAME
def test_schedules_of_all_sizes_are_accepted(case: Case, sizes: Any) -> None:
    for num_ranks, num_micro_batches in sizes(case):
        table = case.build(num_ranks, num_micro_batches)
        check(table)
        verdict = interpret(lower(table), **facts(table))
        assert verdict.outcome is Outcome.DONE, f"{case} {num_ranks} {num_micro_batches}: {verdict.reason}"


@BY_NAME
@given(data=st.data())
def test_what_ranks_keep_is_as_documented(case: Case, data: st.DataObject) -> None:
    sizes = [(r, m) for r, m in all_sizes(case, 6, 20) if case.optimal(r, m)]
    num_ranks, num_micro_batches = data.draw(st.sampled_from(sizes))
    kept = check(case.build(num_ranks, num_micro_batches)).peak_activations
    assert list(kept) == case.kept(num_ranks, num_micro_batches)


@given(tables(6, 12))
def test_micro_batches_go_through_each_stage_in_order(table: Table) -> None:
    # So gradients are added up in the order in which one process adds them.
    for rank in range(table.num_ranks):
        seen: dict[tuple[str, int], list[int]] = {}
        for c in table.order(rank):
            for part in {"B": "IW"}.get(c.kind.value, c.kind.value):
                seen.setdefault((part, c.stage), []).append(c.micro_batch)
        assert all(numbers == list(range(table.num_micro_batches)) for numbers in seen.values())


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 12), chunks=st.integers(1, 3), v=st.booleans())
def test_forwards_on_any_placement_are_accepted(ranks: int, micro_batches: int, chunks: int, v: bool) -> None:
    table = forwards(v_shaped(ranks) if v else looped(ranks, chunks), micro_batches)
    check(table)
    assert interpret(lower(table), **facts(table)).outcome is Outcome.DONE


def test_placements() -> None:
    assert looped(3) == (0, 1, 2)
    assert looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert v_shaped(3) == (0, 1, 2, 2, 1, 0)
    assert build("zb_v", 3, 4).stages_of == ((0, 5), (1, 4), (2, 3))


def test_one_f_one_b_as_it_is_drawn() -> None:
    assert str(build("1f1b", 3, 4)).splitlines()[1:] == [
        "rank 0  0F0     0F1     0F2 0B0 0F3 0B1     0B2     0B3",
        "rank 1      1F0     1F1 1B0 1F2 1B1 1F3 1B2     1B3",
        "rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_as_it_is_drawn() -> None:
    # Qi et al., figure 3, with three ranks: the last one ends with the W that it put off.
    assert str(build("zb_h1", 3, 4)).splitlines()[1:] == [
        "rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: build("1f1b", 0, 3), "one or more of both"),
        (lambda: build("dualpipe_v", 3, 5), "6, or more"),
        (lambda: build("data_parallel", 2, 5), "2 pipeline ranks"),
        (lambda: build("interleaved_1f1b", 2, 2, num_chunks=0), "one or more stages"),
        (lambda: build("1f1b", 2, 2, num_chunks=2), "num_chunks"),
        (lambda: build("1f2b", 2, 2), "1f1b"),
        (lambda: Computation.parse("F5"), "such as 2F5"),
    ],
)
def test_mistakes_are_told(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


# -- CSV --------------------------------------------------------------------------------------------------------------


@given(tables(6, 12))
def test_a_table_survives_csv(table: Table) -> None:
    again = from_csv(to_csv(table), name=table.name)
    assert (again.rows, again.rank_of, again.trains) == (table.rows, table.rank_of, table.trains)


def test_a_csv_file_is_a_schedule(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0, 1B0 ,1F1,1B1\n")
    table = build("csv", 2, 2, path=str(path))
    assert check(table).peak_activations == (2, 1)
    assert [str(c) for c in table.order(1)] == ["1F0", "1B0", "1F1", "1B1"]
    schedule = CsvSchedule(CsvSchedule.Config(path=str(path)))
    for sizes, said in (((3, 2), "there are 3"), ((2, 3), "for 2 micro-batches; there are 3")):
        with pytest.raises(ScheduleError, match=said):
            schedule.build(*sizes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no cell"),
        ("0F0,zero", "rank 0, slot 1: 'zero'"),
        ("0F0\n0B0", "stage 0 is on rank 0 already"),
        ("0F0\n2F0", "no stage 1"),
        ("0F0,0F2", "no micro-batch 1"),
        ("0F0\n999999999F0", "no stage 1"),
        ("0F0,0F999999999", "no micro-batch 1"),
        (f"0F0,{'9' * 5000}F0", "is no computation"),
        ("0F0," + " " * 200_000, "this is no CSV: field larger"),
    ],
)
def test_csv_that_is_no_schedule(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        from_csv(text)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff0F0,,,0B0\n,1F0,1B0\n",
        "0F0,,,0B0\r\n\r\n,1F0,1B0\r\n,,,\r\n",
        "0F0,,,0B0\r,1F0,1B0\r",
        "0F0,,,0B0\n   \n,1F0,1B0,\n",
    ],
)
def test_csv_as_spreadsheets_write_it(text: str, tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(text.encode())
    table = build("csv", 2, 1, path=str(path))
    assert table.rows == build("1f1b", 2, 1).rows
    check(table)


def test_csv_that_is_no_text_is_told(tmp_path: Any) -> None:
    (tmp_path / "mine.csv").write_bytes(b"0F0,0B0\xe9")
    with pytest.raises(ValueError, match="it is no text in UTF-8"):
        build("csv", 1, 1, path=str(tmp_path / "mine.csv"))


# -- programs ---------------------------------------------------------------------------------------------------------


def test_programs_of_two_ranks() -> None:
    first, second = lower(build("1f1b", 2, 1))
    out, back = ("activation", 0, 0, 1), ("gradient", 1, 0, 1)
    assert first == (
        Step(Computation(Kind.FORWARD, 0, 0), (Transfer(True, *out),), 0),  # type: ignore[arg-type]
        Step(None, (Transfer(False, *back),), 2),  # type: ignore[arg-type]
        Step(Computation(Kind.BACKWARD, 0, 0), (), 3),
    )
    assert [str(step) for step in second] == [
        "-, receive activation 0:0 from rank 0", "1F0", "1B0, send gradient 1:0 to rank 0",
    ]  # fmt: skip


@given(tables(6, 12))
def test_transfers_are_where_ranks_change_and_messages_of_a_channel_keep_their_order(table: Table) -> None:
    programs = lower(table)
    channels: dict[tuple[bool, int, int], list[Any]] = {}
    for rank, program in enumerate(programs):
        for step in program:
            for t in step.transfers:
                channels.setdefault((t.sends, *((rank, t.peer) if t.sends else (t.peer, rank))), []).append(
                    (t.message, step.slot)
                )
    sent = sum(len(found) for (sends, *_), found in channels.items() if sends)
    cuts = sum(a != b for a, b in zip(table.rank_of, table.rank_of[1:], strict=False))
    assert sent == cuts * table.num_micro_batches * (2 if table.trains else 1)
    for (sends, source, target), found in channels.items():
        assert channels[not sends, source, target] == found


# -- the validator and the interpreter --------------------------------------------------------------------------------


@examples(times=2)
@given(st.data())
def test_the_validator_and_the_interpreter_agree_about_mutants(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    table = data.draw(tables(4, 7))
    programs, seen = lower(table), Counter[bool]()
    for _ in range(30):
        changed = mutant(programs, rng, rng.choice((1, 1, 1, 2, 2, 3)))
        try:
            validate(changed, **facts(table))
            said = None
        except ScheduleError as error:
            said = str(error)
        verdict = interpret(changed, **facts(table))
        assert (said is None) == (verdict.outcome is Outcome.DONE), f"{said} | {verdict}"
        seen[said is None and changed != programs] += 1


def test_some_mutants_stay_right_and_each_way_of_being_wrong_is_found() -> None:
    table, rng = build("zb_v", 3, 4), random.Random(0)
    programs, outcomes, sentences = lower(table), Counter[Outcome](), []
    for _ in range(250):
        changed = mutant(programs, rng, 1)
        if changed == programs:
            continue
        outcomes[interpret(changed, **facts(table)).outcome] += 1
        try:
            validate(changed, **facts(table))
        except ScheduleError as error:
            sentences.append(str(error))
    assert min(outcomes[outcome] for outcome in Outcome) >= 5, outcomes
    for said in (
        "is done twice", "is not done before it", "no such stage", "goes twice", "not from this rank to that one",
        "sent before it is computed", "is never sent", "not received in a step before it", "never does",
    ):  # fmt: skip
        assert any(said in sentence for sentence in sentences), said


def test_batches_that_wait_for_each_other_are_a_deadlock() -> None:
    def transfer(sends: bool, what: Any, m: int) -> Step:
        to_first = (what == "gradient") == sends
        return Step(None, (Transfer(sends, what, int(what == "gradient"), m, 0 if to_first else 1),), m)

    def compute(text: str) -> Step:
        return Step(Computation.parse(text), (), 0)

    first = [compute("0F0"), transfer(True, "activation", 0), compute("0F1"), transfer(False, "gradient", 0),
             transfer(True, "activation", 1), compute("0B0"), transfer(False, "gradient", 1),
             compute("0B1")]  # fmt: skip
    second = [transfer(False, "activation", 0), compute("1F0"), compute("1B0"), transfer(False, "activation", 1),
              transfer(True, "gradient", 0), compute("1F1"), compute("1B1"),
              transfer(True, "gradient", 1)]  # fmt: skip
    sizes: dict[str, Any] = {"rank_of": (0, 1), "num_micro_batches": 2, "trains": True}
    with pytest.raises(ScheduleError, match="deadlock: these batches of transfers wait for each other: rank"):
        validate([tuple(first), tuple(second)], **sizes)
    verdict = interpret([tuple(first), tuple(second)], **sizes)
    assert verdict.outcome is Outcome.DEADLOCK
    assert verdict.reason == "rank 0 waits for rank 1; rank 1 waits for rank 0"
    # The same two in one batch are right.
    first[3:5] = [Step(None, first[3].transfers + first[4].transfers, 0)]
    validate([tuple(first), tuple(second)], **sizes)
    assert interpret([tuple(first), tuple(second)], **sizes).outcome is Outcome.DONE


def test_a_limit_of_activations() -> None:
    table = build("gpipe", 2, 5)
    check(table, max_activations=5)
    with pytest.raises(ScheduleError, match=r"rank 0 keeps up to 5 .* limit is 4"):
        check(table, max_activations=4)


def test_messages_that_wait_are_counted() -> None:
    assert set(check(build("1f1b", 4, 9)).waiting.values()) == {1}
    eager = from_csv("0F0,0F1,0F2,,,,,,,0B0,0B1,0B2\n,,,1F0,1F1,1F2,1B0,1B1,1B2")
    assert check(eager).waiting == {(0, 1): 3, (1, 0): 3}


def test_tables_that_cannot_be() -> None:
    c = Computation(Kind.FORWARD, 0, 0)
    good: dict[str, Any] = {"name": "t", "rank_of": (0,), "num_micro_batches": 1, "rows": ((c,),), "trains": True}
    Table(**good)
    for change, said in (
        ({"rows": ((c,), ())}, "rows have"),
        ({"rows": ()}, "at least one"),
        ({"rank_of": (1,)}, "there are 1 rows"),
        ({"rows": ((c,), (None,))}, "there are 2 rows; each is of a rank that has a stage"),
        ({"rank_of": (1, 0), "rows": ((c,), (None,))}, "stage 0 is on rank 1"),
        ({"num_micro_batches": 0}, "at least one"),
        ({"rows": ((Computation(Kind.FORWARD, 0, 1),),)}, "1 micro-batches"),
        ({"rows": ((Computation(Kind.BACKWARD, 0, 0),),), "trains": False}, "forwards only"),
    ):
        with pytest.raises(ScheduleError, match=said):
            Table(**{**good, **change})
