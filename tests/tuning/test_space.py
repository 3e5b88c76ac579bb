"""What candidates there are."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.tuning.fakes import BASE, job

from zoo.tuning import Candidate, SpaceError, candidates
from zoo.tuning.needs import settings
from zoo.tuning.space import divisors, meshes


@examples(times=5)
@given(st.integers(1, 8), st.integers(1, 24), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_every_candidate_keeps_the_batch_and_the_ranks_and_none_is_there_twice(
    ranks: int, per_rank: int, tensor: bool, pipe: bool, blocks: bool, fast: bool
) -> None:
    base = Candidate(stage=1, micro=per_rank, accumulation=1, mesh=(1, ranks, 1))
    made = job(ranks=ranks, batch=ranks * per_rank, base=base, tensor=tensor, pipe=pipe, blocks=blocks, fast=fast)
    found = candidates(made)
    assert len(set(found)) == len(found)
    assert base in found or (fast and per_rank not in divisors(per_rank)[-3:])
    for c in found:
        assert c.micro * c.accumulation * c.data == made.batch
        assert math.prod(c.mesh) == ranks
        assert c.tensor == 1 or tensor
        assert c.pipe == 1 or pipe
        assert not c.checkpointing or blocks
        assert bool(c.schedule) == (c.pipe > 1)
    if not fast:
        assert {c.mesh for c in found if c.pipe == c.tensor == 1} == {(1, ranks, 1)}
        assert {c.micro for c in found if c.data == ranks} == set(divisors(per_rank))


@given(st.integers(1, 64))
def test_meshes_are_all_factorisations(ranks: int) -> None:
    brute = {
        (p, d, t) for p in range(1, ranks + 1) for d in divisors(ranks) for t in divisors(ranks) if p * d * t == ranks
    }
    assert set(meshes(ranks)) == brute
    assert meshes(ranks)[0] == (1, ranks, 1)


def test_a_candidate_comes_back_from_json() -> None:
    for c in candidates(job(tensor=True, pipe=True, space={"optimizer.params.lr": [0.1, 0.2]})):
        assert Candidate.from_dict(json.loads(json.dumps(c.to_dict()))) == c


def test_what_makes_no_difference_is_not_varied() -> None:
    found = candidates(job(tensor=True, pipe=True))
    assert {c.bucket for c in found if c.data == 1} == {0}
    assert len({c.bucket for c in found if c.data == 2}) == 3
    assert {c.schedule for c in found if c.pipe == 2 and c.accumulation == 1} == {"1f1b"}
    assert {c.offload for c in found} == {"none"}  # one memory on the CPU, and no folder for NVMe
    assert {c.offload for c in candidates(job(device="cuda", nvme="/nvme")) if c.stage} == {"none", "cpu", "nvme"}


def test_the_section_names_values_dimensions_and_paths() -> None:
    found = candidates(job(space={"stage": [2], "micro": [1, 3], "mesh": [{"data": 2}], "optimizer.params.lr": [1, 2]}))
    assert {(c.stage, c.micro, c.mesh) for c in found} == {(2, 1, (1, 2, 1))}
    assert {c.extra for c in found} == {(("optimizer.params.lr", "1"),), (("optimizer.params.lr", "2"),)}


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"stages": [1]}, r"autotuning\.space\.stages: no such dimension.*Did you mean stage\?"),
        ({"stage": [4]}, r"autotuning\.space\.stage has 4; it is 0, 1, 2 or 3"),
        ({"micro": [0]}, "a number of samples"),
        ({"mesh": [{"data": 3}]}, "whose product is the number of ranks, 2"),
        ({"mesh": [{"expert": 2}]}, "of pipe, data, tensor"),
        ({"mesh": [{"data": "two"}]}, r'mesh has \{"data": "two"\}; .* whole numbers, at least 1'),
        ({"mesh": [{"data": None}]}, "whole numbers, at least 1"),
        ({"mesh": [{"data": 2.9}]}, "whole numbers, at least 1"),
        ({"mesh": [{"data": 2, "pipe": True}]}, "whole numbers, at least 1"),
        ({"mesh": [{"data": -2, "tensor": -1}]}, "whole numbers, at least 1"),
        ({"mesh": [[1, 2, 1]]}, "sizes of axes"),
        ({"stage": []}, r"autotuning\.space\.stage has no values; name at least one"),
        ({"comm.check": []}, r"autotuning\.space\.comm\.check has no values"),
        ({"zero_optimization.stage": [3]}, "the space has the name stage for it"),
        ({"zero_optimization.offload_optimizer": [None]}, "the space has the name offload for it"),
        ({"mesh.axes.data": [2]}, "the space has the name mesh for it"),
        ({"train_micro_batch_size_per_gpu": [2]}, "the space has the name micro for it"),
        ({"autotuning.fast": [True]}, "a trial does not read the section autotuning"),
        ({"offload": ["nvme"]}, "nvme_path"),
        ({"checkpointing": [1]}, "true or false"),
        ({"micro": [3]}, "there is no candidate"),
    ],
)
def test_what_cannot_be_searched_is_named(space: dict[str, object], said: str) -> None:
    with pytest.raises(SpaceError, match=said):
        candidates(job(space=space))


def test_the_first_candidate_is_what_the_configuration_says() -> None:
    assert candidates(job())[0] == BASE
    assert BASE not in candidates(job(space={"stage": [3]}))


def test_every_path_that_a_candidate_sets_has_the_name_of_its_dimension() -> None:
    many = {"ranks": 8, "batch": 64, "tensor": True, "pipe": True, "device": "cuda", "nvme": "/nvme"}
    paths = {path for c in candidates(job(**many)) for path in settings(c, job(**many))}
    assert len(paths) == 15
    kept = {"mesh", "train_batch_size"}  # a dimension itself, and what is not searched
    kept |= {path for path in paths if path.endswith("nvme_path")}  # set to what the configuration says
    for path in paths - kept:
        with pytest.raises(SpaceError, match="the space has the name"):
            candidates(job(space={path: [1]}))


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_the_largest_micro_batches_are_those_of_a_ranks_share(ranks: int, power: int, least: int, wide: bool) -> None:
    share = 2**power
    made = job(ranks=ranks, batch=share * ranks, fast=True, base=Candidate(
        stage=1, micro=1, accumulation=share, mesh=(1, ranks, 1),
    ))  # fmt: skip
    bounded = replace(made, least_micro=least if share >= least else 1, most_micro=1000 if wide else None)
    found = {c.micro for c in candidates(bounded)} - {1}
    assert found == set([n for n in divisors(share) if n >= bounded.least_micro][-3:]) - {1}


def test_bounds_of_micro_batches() -> None:
    made = job(ranks=8, batch=64, fast=True, base=Candidate(stage=1, micro=8, accumulation=1, mesh=(1, 8, 1)))
    plain = candidates(made)
    assert {c.micro for c in plain} == {2, 4, 8}
    assert candidates(replace(made, least_micro=2)) == candidates(replace(made, most_micro=1000)) == plain
    assert {c.micro for c in candidates(replace(made, most_micro=4))} == {1, 2, 4}
    with pytest.raises(SpaceError, match="between the bounds"):
        candidates(replace(made, least_micro=9))
