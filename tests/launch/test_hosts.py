"""Which hosts and slots a job gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.launch import hosts

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,7}", fullmatch=True)
FILES = st.dictionaries(NAMES, st.integers(1, 8), min_size=1, max_size=5)


@examples(times=1)
@given(FILES, st.data())
def test_a_file_of_hosts_gives_back_what_was_written(there: dict[str, int], data: st.DataObject) -> None:
    lines = []
    for host, slots in there.items():
        lines += data.draw(st.lists(st.sampled_from(["", "  ", "# slots=3", "#"]), max_size=2))
        lines.append(f"{data.draw(st.sampled_from(['', ' ']))}{host}\tslots={slots} max_slots=9")
    assert list(hosts.parse_hostfile(lines).items()) == list(there.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb slots=1\na slots=1", "has 'a' twice; write its slots in one line"),
        ("a slots=0", "gives 'a' no slots; write at least slots=1"),
        ("a", r'has the line \'a\'; a line is "host slots=n"'),
        ("a slots=-1", "has the line 'a slots=-1'"),
        ("a b slots=1", "has the line 'a b slots=1'"),
        ("\n# a slots=1\n", "has no hosts"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as told:
        hosts.read_hostfile(file)
    assert str(file) in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file of hosts '.*none'; give the path of one"):
        hosts.read_hostfile(tmp_path / "none")


@examples(times=1)
@given(FILES, st.data())
def test_what_include_takes_exclude_leaves(there: dict[str, int], data: st.DataObject) -> None:
    """The two filters part the slots: none is in both, none is lost."""
    whole = hosts.all_slots(there)
    named = data.draw(st.lists(st.sampled_from(list(there)), min_size=1, unique=True))
    parts = []
    for host in named:
        slots = data.draw(st.lists(st.sampled_from(whole[host]), unique=True))
        parts.append(host + (":" + ",".join(map(str, slots)) if slots else ""))
    text = "@".join(parts)
    taken, left = hosts.select(whole, include=text), hosts.select(whole, exclude=text)
    assert {host: sorted([*taken.get(host, []), *left.get(host, [])]) for host in whole} == whole
    assert not any(set(taken.get(host, [])) & set(left.get(host, [])) for host in whole)
    order = list(whole)
    for found in (taken, left):
        assert list(found) == sorted(found, key=order.index)
        assert all(found.values())


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("a", "b", "include 'a' and exclude 'b' are both given"),
        ("c", "", "host 'c' is not in the file of hosts, which has a, b"),
        ("", "b:2", r"host 'b' has no slot 2; it has \[0, 1\]"),
        ("a:x", "", "'a:x' does not name a host and its slots"),
        ("a@", "", "'' does not name a host"),
        ("a:", "", "'a:' does not name a host"),
    ],
)
def test_filters_that_cannot_be(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hosts.select({"a": [0], "b": [0, 1]}, include, exclude)


def test_a_host_that_is_named_whole_is_whole_whatever_slots_are_named_too() -> None:
    assert hosts.parse_filter("a:0@b@a") == hosts.parse_filter("a@b@a:0") == {"a": [], "b": []}


def test_the_first_hosts_and_slots() -> None:
    there = {"a": [0, 2, 3], "b": [1, 2]}
    assert hosts.first(there) == there
    assert hosts.first(there, 1) == {"a": [0, 2, 3]}
    assert hosts.first(there, 2, 2) == {"a": [0, 2], "b": [1, 2]}
    for nodes, gpus, said in (
        (3, None, r"--num_nodes is 3, and there are 2 hosts: a, b"),
        (None, 3, r"--num_gpus is 3, and host 'b' has 2 slots: \[1, 2\]"),
        (0, None, "--num_nodes is 0; give 1 or more"),
        (None, -1, "--num_gpus is -1; give 1 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            hosts.first(there, nodes, gpus)
