"""Variables that go along, and cores of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.launch import cores, exports


def test_variables_by_prefix_and_file(tmp_path: Path) -> None:
    here = {
        "PYTHONPATH": "a",
        "UCX_NET_DEVICES": "b",
        "HOME": "c",
        "MV2_X": "d",
        "NCCL_DEBUG": "e",
        "BASH_FUNC_x%%": "f",
    }
    assert exports.exported(here) == {"PYTHONPATH": "a", "UCX_NET_DEVICES": "b", "MV2_X": "d"}
    without = {"JOB": ["UCX_NET_DEVICES"]}
    assert "UCX_NET_DEVICES" in exports.exported(here, without=without)
    assert "UCX_NET_DEVICES" not in exports.exported({**here, "JOB": "1"}, without=without)
    home, folder = tmp_path / "home", tmp_path / "here"
    home.write_text("# mine\n\nPYTHONPATH=z\nNCCL_DEBUG = a=b \n")
    folder.write_text("NCCL_DEBUG=last")
    found = exports.exported(here, files=[home, folder, tmp_path / "none"])
    assert (found["PYTHONPATH"], found["NCCL_DEBUG"]) == ("z", "last")
    home.write_text("NCCL_DEBUG\n")
    with pytest.raises(ValueError, match=r"home has the line 'NCCL_DEBUG'; a line is NAME=value"):
        exports.exported(here, files=[home])


def test_where_the_file_may_be(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert exports.environment_files(home) == [tmp_path / ".deepspeed_env", Path(".deepspeed_env")]
    assert exports.environment_files({**home, "DS_ENV_FILE": "e"}) == [tmp_path / "e", Path("e")]
    assert exports.environment_files({**home, "DS_ENV_FILE": "/x/e"}) == [Path("/x/e")]


@examples(times=1)
@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 8))
def test_ranks_have_as_many_cores_of_their_own(there: set[int], ranks: int) -> None:
    text = ",".join(map(str, sorted(there)))
    assert cores.parse_cores(text) == sorted(there)
    if len(there) < ranks:
        with pytest.raises(ValueError, match="cannot have cores of their own"):
            cores.bind(ranks, there)
        return
    found = cores.bind(ranks, there)
    assert found == cores.bind(ranks, range(64), text)
    used = [core for one in found for core in one]
    assert len(set(used)) == len(used)
    assert used == sorted(there)[: len(used)]
    assert {len(one) for one in found} == {len(there) // ranks}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3-1", "no list of cores that rises"), ("0,0", "rises"), ("2,1", "rises"), ("a", "no list of cores"),
        ("", "no list"), ("7", r"cores \[7\] are not there; this process may use \[0, 1\]"),
        ("\u00b2", "no list of cores"), ("0-" + "9" * 5000, "no list"), ("0-99999999", "has the core 99999999"),
        ("0", "2 ranks cannot have cores of their own out of 1"),
    ],
)  # fmt: skip
def test_cores_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cores.bind(2, {0, 1}, text)
