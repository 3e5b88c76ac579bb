"""Named dims: which rows each rank has, against index arrays of numpy; what cannot be is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zoo.tensor.dims import Dims, stored
from zoo.tensor.plans import Plan, Rule, matches
from zoo.tensor.shares import Heads, deal


@given(number=st.integers(1, 60), degree=st.integers(1, 8), grain=st.integers(1, 4))
def test_a_deal_is_even_and_leaves_nothing_out(number: int, degree: int, grain: int) -> None:
    if number < degree:
        with pytest.raises(ValueError, match=f"degree is at most {number}"):
            deal(number * grain, degree, 0, grain)
        return
    shares = [deal(number * grain, degree, rank, grain) for rank in range(degree)]
    assert [index for start, stop in shares for index in range(start, stop)] == list(range(number * grain))
    sizes = {stop - start for start, stop in shares}
    assert max(sizes) - min(sizes) in (0, grain)
    if grain > 1:
        with pytest.raises(ValueError, match=f"multiples of {grain}"):
            deal(number * grain + 1, degree, 0, grain)


@given(kv=st.integers(1, 6), each=st.integers(1, 5), degree=st.integers(1, 6))
@example(kv=3, each=3, degree=2)
def test_heads_read_their_keys_and_groups_are_equally_large(kv: int, each: int, degree: int) -> None:
    num, degree = kv * each, min(degree, kv * each)
    seen: list[int] = []
    for rank in range(degree):
        groups = Heads(num, kv, degree, rank).groups
        queries = [query for _, group in groups for query in group]
        seen += queries
        assert len({len(group) for _, group in groups}) == 1
        assert all(query // each == key for key, group in groups for query in group)
    assert seen == list(range(num))


def indices(layout: str, num: int, kv: int, dim: int) -> tuple[str, int, dict[str, np.ndarray]]:
    """The dims, the number of rows, and the rows of queries (H, dim), keys (K, dim) and values."""
    each = num // kv
    if layout == "parts":
        rows = np.arange((num + 2 * kv) * dim).reshape(-1, dim)
        return "(head kv kv) dim", rows.size, {"q": rows[:num], "k": rows[num : num + kv], "v": rows[num + kv :]}
    if layout == "heads":
        rows = np.arange(num * 3 * dim).reshape(num, 3, dim)
        return "head part=3 dim", rows.size, {"q": rows[:, 0], "k": rows[:, 1], "v": rows[:, 2]}
    if layout == "thirds":
        rows = np.arange(num * 3 * dim).reshape(3, num, dim)
        return "part=3 head dim", rows.size, {"q": rows[0], "k": rows[1], "v": rows[2]}
    rows = np.arange(kv * (each + 2) * dim).reshape(kv, each + 2, dim)
    keys = {"q": rows[:, :each].reshape(num, dim), "k": rows[:, each], "v": rows[:, each + 1]}
    return "kv (query one=1 one=1) dim", rows.size, keys


@given(
    layout=st.sampled_from(["parts", "heads", "thirds", "groups"]), kv=st.integers(1, 5), each=st.integers(1, 4),
    dim=st.integers(1, 3), degree=st.integers(1, 6),
)  # fmt: skip
@example(layout="parts", kv=3, each=3, dim=2, degree=2)
@example(layout="groups", kv=3, each=3, dim=2, degree=2)
def test_every_rank_sees_its_queries_their_keys_and_values(
    layout: str, kv: int, each: int, dim: int, degree: int
) -> None:  # fmt: skip
    num = kv * each
    kv = num if layout in ("heads", "thirds") else kv
    degree = min(degree, num)
    text, total, rows = indices(layout, num, kv, dim)
    plan = Plan("test", (("head", num), ("kv", kv)))
    rule = Rule(module="qkv", rows=text, cut="kv" if layout == "groups" else "head")
    for rank in range(degree):
        groups = Heads(num, kv, degree, rank).groups
        queries = [query for _, group in groups for query in group]
        keys = [key for key, _ in groups]
        dims = Dims.parse(text).resolved(dict(plan.sizes), total, "qkv")
        seen = [row for start, stop in dims.runs(rule.cut, plan.share(degree, rank)) for row in range(start, stop)]
        if layout == "parts":
            expected = np.concatenate([rows["q"][queries], rows["k"][keys], rows["v"][keys]]).ravel()
        elif layout == "heads":
            expected = np.stack([rows[name][queries] for name in "qkv"], axis=1).ravel()
        elif layout == "thirds":
            expected = np.stack([rows[name][queries] for name in "qkv"]).ravel()
        else:
            lists = [[*rows["q"][list(group)], rows["k"][key], rows["v"][key]] for key, group in groups]
            expected = np.array(lists).ravel()
        assert seen == expected.tolist()
        cut = plan.cut(rule, total, degree, rank)
        kept = [row for start, stop in cut.runs for row in range(start, stop)]
        assert kept == sorted(set(seen))
        assert len(kept) == cut.size
        keys_of = [{key for key, _ in Heads(num, kv, degree, other).groups} for other in range(degree)]
        assert cut.shared == any(keys_of[a] & keys_of[b] for a in range(degree) for b in range(a))
        taken = kept if cut.take is None else [kept[i] for start, stop in cut.take for i in range(start, stop)]
        assert taken == seen


@given(runs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)).map(lambda r: (r[0], r[0] + r[1])), max_size=6))
def test_what_is_stored_is_there_once_and_taken_in_order(runs: list[tuple[int, int]]) -> None:
    found, take = stored(runs)
    rows = [row for start, stop in found for row in range(start, stop)]
    assert rows == sorted({row for start, stop in runs for row in range(start, stop)})
    seen = [row for start, stop in runs for row in range(start, stop)]
    assert seen == (rows if take is None else [rows[i] for start, stop in take for i in range(start, stop)])


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "at least one"), ("head (", "brackets"), ("()", "brackets"), ("head-dim", "a dim is a name"),
     ("part=0 head", "a dim is a name"), ("((a b)", "brackets")],
)  # fmt: skip
def test_what_is_no_list_of_dims_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Dims.parse(text)


@pytest.mark.parametrize(
    ("text", "total", "told"),
    [("head dim", 13, "makes multiples of 4"), ("head part=3", 13, "makes 12"), ("a b", 12, "no size for a, b"),
     ("(head what) dim", 12, "no size for")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_told(text: str, total: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Dims.parse(text).resolved({"head": 4}, total, "q_proj")


def test_a_plan_goes_out_as_data_and_comes_back() -> None:
    plan = Plan("own", (("head", 6), ("kv", 2)), (Rule(module="a.*.q", rows="head dim", cut="head"),), layers="a.*")
    assert Plan.of_data(plan.as_data()) == plan
    assert "a.*.q: rows 'head dim', cut 'head'" in str(plan)
    assert plan.within("model").rules[0].module == "model.a.*.q"
    with pytest.raises(ValueError, match="rule got turn; it has module, rows"):
        Plan.of_data({"name": "x", "rules": [{"module": "a", "turn": True}]})
    with pytest.raises(ValueError, match="it takes rows and cut"):
        Rule(module="a", rows="head", columns="head", cut="head")
    with pytest.raises(ValueError, match="has the dims"):
        Rule(module="a", rows="head dim", cut="inner")
    with pytest.raises(ValueError, match="5 query heads for 2"):
        Plan("x", (("head", 5), ("kv", 2)))
    with pytest.raises(ValueError, match="at most 6"):
        plan.share(7, 0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([1], "a plan is .1.; it takes a mapping"),
        ({"rules": []}, "a plan lacks name"),
        ({"name": "x", "rules": {"module": "a"}}, "rules of a plan is .*; it takes a list"),
        ({"name": "x", "rules": [5]}, "one of the rules of a plan is 5; it takes a mapping"),
        ({"name": "x", "rules": [{"rows": "a", "cut": "a"}]}, "a rule lacks module"),
        ({"name": "x", "rules": [{"module": "a", "rows": 5, "cut": "a"}]}, "a rule has rows=5; it takes a text"),
        ({"name": "x", "rules": [{"module": "a", "rows": "a", "cut": "a", "gather": "false"}]}, "takes true or false"),
        ({"name": "x", "rules": [{"module": "a", "inside": [["w", "1", "a"]], "cut": "a"}]},
         r"a rule has inside=.*; it takes a list, each item \[a text, an integer, a text\]"),
        ({"name": "x", "counts": [{"module": "a"}]}, "a count lacks attribute, dims"),
        ({"name": "x", "takes": [{"module": "a", "argument": 0, "dim": True, "dims": "head"}]}, "dim=True; it takes"),
        ({"name": "x", "sizes": ["head"]}, "sizes of a plan is .*; it takes a mapping"),
        ({"name": "x", "sizes": {"head": "4"}}, "a plan has sizes="),
        ({"name": "x", "sizes": {"head": 4, "kv": 0}}, "the sizes {'kv': 0}; a size is an integer from 1 on"),
        ({"name": "x", "layers": 3}, "layers=3; it takes a text"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_told(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.of_data(data)


def test_a_star_is_one_name() -> None:
    assert matches("a.*.c", "a.b.c")
    assert not matches("a.*.c", "a.b.b.c")
    assert not matches("a.*", "a.b.c")
    assert not matches("a.b", "a_b")
