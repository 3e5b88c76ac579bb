"""What batch systems and launchers have allotted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.launch import discovery
from zoo.launch.discovery import Allotment, Node

RANGES = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))


@examples(times=1)
@given(st.lists(RANGES, min_size=1, max_size=4), st.sampled_from(["", "-ib"]))
def test_a_list_of_nodes_is_what_its_ranges_say(ranges: list[tuple[int, int, int]], after: str) -> None:
    """Each range with a name of its own, so that none comes twice."""
    text = ",".join(
        f"n{place}x[{low:0{width}d}-{low + more:0{width}d}]{after}" for place, (low, more, width) in enumerate(ranges)
    )
    assert discovery.expand_nodes(text) == [
        f"n{place}x{number:0{width}d}{after}"
        for place, (low, more, width) in enumerate(ranges)
        for number in range(low, low + more + 1)
    ]


def test_lists_of_nodes_as_slurm_writes_them() -> None:
    assert discovery.expand_nodes("a[03-05,7],b1,c") == ["a03", "a04", "a05", "a7", "b1", "c"]
    assert discovery.expand_nodes("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]
    for wrong in ("a[3-1]", "a[x]", "a[\u00b2]", "a[1-\u0663]", "a[" + "9" * 5000 + "]", "a[1", "a]", "a,,b", ""):
        with pytest.raises(ValueError, match="no list of nodes as SLURM writes it"):
            discovery.expand_nodes(wrong)
    with pytest.raises(ValueError, match="names the node 'a1' twice"):
        discovery.expand_nodes("a[1-2],a1")
    for many in ("a[0-999999999]", "a[0-999]b[0-999]c[0-999]"):
        with pytest.raises(ValueError, match="more than 100000 nodes"):
            discovery.expand_nodes(many)
    assert discovery.expand_counts("4(x2),3") == [4, 4, 3]
    for wrong in ("4x2", "\u0663", "1(x999999999)", "9" * 5000):
        with pytest.raises(ValueError, match="no list of tasks"):
            discovery.expand_counts(wrong)


def test_what_is_allotted(tmp_path: Path) -> None:
    assert discovery.allotment({}) is None
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert discovery.allotment(slurm) == Allotment("SLURM", {"n1": 1, "n2": 1})
    assert discovery.allotment({**slurm, "SLURM_TASKS_PER_NODE": "4,3"}) == Allotment("SLURM", {"n1": 4, "n2": 3})
    assert discovery.allotment({**slurm, "SLURM_GPUS_ON_NODE": "8"}) == Allotment("SLURM", {"n1": 8, "n2": 8})
    with pytest.raises(ValueError, match="about 3 nodes, and the job has 2: n1, n2"):
        discovery.allotment({**slurm, "SLURM_TASKS_PER_NODE": "2(x3)"})
    with pytest.raises(ValueError, match="SLURM_GPUS_ON_NODE='some'"):
        discovery.allotment({**slurm, "SLURM_GPUS_ON_NODE": "some"})
    file = tmp_path / "nodes"
    file.write_text("b\nb\na\n\n")
    assert discovery.allotment({"PBS_NODEFILE": str(file)}) == Allotment("PBS", {"b": 2, "a": 1})
    file.write_text("\n")
    with pytest.raises(ValueError, match="which has no hosts"):
        discovery.allotment({"PBS_NODEFILE": str(file)})
    with pytest.raises(ValueError, match="which is not there"):
        discovery.allotment({"PBS_NODEFILE": str(tmp_path / "none")})


def test_which_node_this_is() -> None:
    assert discovery.node({}) is None
    plain = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "h"}
    assert discovery.node(plain) == Node("plain variables", 1, 2, "h")
    slurm = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[7-8]"}
    assert discovery.node(slurm) == Node("SLURM", 1, 2, "n7")
    assert discovery.node({**slurm, "MASTER_ADDR": "x"}) == Node("SLURM", 1, 2, "x")
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    assert discovery.node(mpi) == Node("Open MPI", 0, 3, None)
    job = {"JOB_COMPLETION_INDEX": "2", "NNODES": "3", "MASTER_ADDR": "job-0.job"}
    assert discovery.node(job) == Node("an indexed Job of Kubernetes", 2, 3, "job-0.job")
    with pytest.raises(ValueError, match=r"NODE_RANK=2 and NNODES=2; ranks are 0 to 1"):
        discovery.node({**plain, "NODE_RANK": "2"})
    with pytest.raises(ValueError, match="NODE_RANK='one'"):
        discovery.node({**plain, "NODE_RANK": "one"})
    with pytest.raises(ValueError, match="NODE_RANK='\u00b2'"):
        discovery.node({**plain, "NODE_RANK": "\u00b2"})


def test_the_number_of_ranks_that_is_asked_for_is_that_of_a_lent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with one task a node, which is the launcher, as ``zoo launch --write`` has it."""
    from zoo.cli.launch import _hosts

    for name, value in {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert _hosts(None, "", "", None, 4)[0] == {"n1": [0, 1, 2, 3], "n2": [0, 1, 2, 3]}
    assert _hosts(None, "", "", 1, None)[0] == {"n1": [0]}
