"""Real processes on gloo, as confirmation of what simulated ranks show."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import run_ranks
from tests.zero import gloo_worker


@pytest.mark.slow
def test_all_stages_equal_ddp_after_20_steps() -> None:
    found = run_ranks(2, gloo_worker.equality)
    assert sorted(found) == [0, 1]
    for rank, differences in found.items():
        for stage, difference in differences.items():
            assert difference <= 1e-6, f"rank {rank} stage {stage} differs from DDP by {difference}"


@pytest.mark.slow
def test_axes_within_the_group() -> None:
    found = run_ranks(4, gloo_worker.axes)
    assert sorted(found) == [0, 1, 2, 3]
    for differences in found.values():
        assert max(differences["all-reduce"], differences["mics"]) <= 1e-6
        assert differences["two stages"] == differences["hpz"] == 0
        # Adam moves an element by about lr a step at most, whatever its gradient: 5 steps of 1e-3.
        assert 0 < differences["quantised"] <= 0.011


def test_a_dead_peer_is_noticed() -> None:
    found = run_ranks(2, gloo_worker.dies)
    assert list(found) == [0]
    assert found[0]["noticed_s"] < 30


@pytest.mark.slow
@pytest.mark.long
def test_a_peer_that_stops_answering_is_noticed_within_the_timeout() -> None:
    found = run_ranks(2, gloo_worker.stalls, group_timeout_s=3)
    assert found[0]["noticed_s"] < 8  # the timeout of the group is 3 s


def test_the_check_names_the_ranks_that_differ() -> None:
    found = run_ranks(2, gloo_worker.mismatch)
    for rank in (0, 1):
        assert "rank 0 called all_gather of 32 float32 (parameters of '0')" in found[rank]["error"]
        assert "rank 1 called all_gather of 32 float32 (parameters of '1')" in found[rank]["error"]


def test_processes_share_the_host_memory_of_their_node(tmp_path: Path) -> None:
    found = run_ranks(2, gloo_worker.budget, str(tmp_path))
    capacity, reserved, _ = found[0]["stats"]
    assert found[0]["stats"] == found[1]["stats"]
    assert reserved == found[0]["own"] + found[1]["own"] >= 300 * 1024
    assert capacity == 1 << 20
    assert found[0]["equal"]
    assert found[1]["equal"]


@pytest.mark.slow
def test_all_stages_equal_ddp_on_three_ranks() -> None:
    found = run_ranks(3, gloo_worker.equality)
    for differences in found.values():
        assert max(differences.values()) <= 1e-6
