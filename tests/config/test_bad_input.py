"""Whatever a document says: it loads, or each mistake is one sentence that begins with its path."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.config import Config, ConfigError, Section, load, read
from zoo.config.fates import Fate, fates_of
from zoo.config.section import fields_by_key, section_of
from zoo.config.tree import Tree
from zoo.registry import DEFAULT

ROOT: Any = Tree.of(Config, DEFAULT).whole().root
BASE: dict[str, Any] = {"train_batch_size": 8}


def below(path: str, section: type[Section]) -> dict[str, set[str]]:
    """Path of each section and of each known mapping → the keys that may stand in it."""
    found = {path: {*fields_by_key(section), *fates_of(section)}}
    for key, name in fields_by_key(section).items():
        inner = section_of(section.model_fields[name].annotation)
        if inner is not None and key == name:
            found |= below(f"{path}.{name}" if path else name, inner)
    for name, fate in fates_of(section).items():
        if name in fields_by_key(section):
            continue  # a package has registered it
        found |= inside(f"{path}.{name}" if path else name, fate)
    return found


def inside(path: str, fate: Fate) -> dict[str, set[str]]:
    found = {path: set(fate.keys)} if fate.keys and not fate.open else {}
    for name, inner in fate.keys.items():
        found |= inside(f"{path}.{name}", inner)
    return found


SECTIONS = {path: keys for path, keys in below("", ROOT).items() if path != "sparse_attention"}
PATHS = sorted(f"{path}.{key}" if path else key for path, keys in SECTIONS.items() for key in keys)
TOPS = {path.split(".")[0] for path in PATHS}
NEEDED = {
    "optimizer": {"optimizer": {"type": "SGD"}},
    "scheduler": {"scheduler": {"type": "WarmupLR"}},
    "train": {"train": {"task": {"type": "byte_lm"}, "steps": 1}},
}

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([2**70, -1e300, 1e308, 5e8, 0.5]), st.floats(),
    st.sampled_from(["", "auto", "fp16", "cpu", "none", "x\ny", "3", "true", "1e3"]), st.text(max_size=3),
)  # fmt: skip
KEYS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["data", "pipe", "enabled", "type", "params", "device"]), st.text(max_size=2), st.integers(0, 2),
    st.none(),
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def merged(base: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``base`` with a value at a dotted path."""
    head, _, rest = path.partition(".")
    inner = base.get(head)
    return {**base, head: merged(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with it, in sentences that have a form; any other exception is an error of this test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = load(document, world_size=4)
        except ConfigError as error:
            found = error.problems
        else:
            config.explain()
            return []
    assert found
    for problem in found:
        assert len(problem.splitlines()) == 1, problem
        assert re.split(r"[.:= ,]", problem)[0] in TOPS, problem
    return found


@examples(times=20)
@given(st.data())
def test_a_value_of_any_kind(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    value = data.draw(VALUES)
    base = {**BASE, **NEEDED.get(path.split(".")[0], {})}
    # Each value in it may be wrong by itself; one that is no container is at most one mistake.
    found = problems(merged(base, path, value))
    found = [problem for problem in found if not problem.endswith("required and not given") or problem.startswith(path)]
    if not isinstance(value, dict | list):
        assert len(found) <= 1, found


@examples(times=20)
@given(st.data())
def test_a_key_that_nobody_knows(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(sorted(SECTIONS)))
    known = SECTIONS[section]
    near = st.builds(lambda key, at: key[:at] + "_" + key[at:], st.sampled_from(sorted(known)), st.integers(0, 9))
    key = data.draw((near | st.text(min_size=1, max_size=12)).filter(lambda key: key not in known))
    path = f"{section}.{key}" if section else key
    tree: dict[str, Any] = {key: data.draw(VALUES)}
    for part in reversed(section.split(".") if section else []):
        tree = {part: tree}
    base = {**BASE, **NEEDED.get(section.split(".")[0], {})}
    with pytest.raises(ConfigError) as caught:
        load(_deep(base, tree), world_size=4)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path if path.isprintable() else ''}")
    assert ": unknown key; " in problem


def _deep(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key for key in base if key in over and isinstance(base[key], Mapping) and isinstance(over[key], Mapping)}
    return {**base, **over, **{key: _deep(base[key], over[key]) for key in both}}


@examples(times=10)
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=5))
def test_several_values_of_any_kind(pairs: list[tuple[str, Any]]) -> None:
    document: dict[str, Any] = dict(BASE)
    for path, value in pairs:
        document = merged(document, path, value)
    problems(document)


@examples(times=5)
@given(st.dictionaries(KEYS | st.sampled_from(sorted(TOPS)), VALUES, max_size=4))
def test_documents_of_any_kind(document: dict[Any, Any]) -> None:
    found: list[str] = []
    try:
        read(document)
    except ConfigError as error:
        found = error.problems
    assert all(len(problem.splitlines()) == 1 for problem in found)


@examples(times=5)
@given(st.dictionaries(st.sampled_from(PATHS) | st.text(alphabet="ab._", max_size=4), VALUES, max_size=3))
def test_overrides_of_any_kind(overrides: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load(BASE, world_size=4, overrides=overrides)
    except ConfigError as error:
        found = error.problems
    else:
        found = [] if config.explain() else [""]
    assert all(len(problem.splitlines()) == 1 for problem in found)


METRIC = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.words"


def metric(**options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"clustering_type": "single_cluster", "schedule_type": "fixed_linear", **options}
    found["schedule_config"] = {"total_curriculum_step": 4, "difficulty_step": 1, **options.get("schedule_config", {})}
    for key in reversed(METRIC.split(".")):
        found = {key: found}
    return found


def test_what_is_switched_off_with_all_that_is_in_it_is_taken() -> None:
    inner = {"enabled": False, "dynamic_batching": {"enabled": True, "max_tokens": 3}}
    for outer in (True, False):
        load({**BASE, "data_efficiency": {"enabled": outer, "data_sampling": inner}}, world_size=4)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"zero_optimization": {"divergent": True}}, "zero_optimization: divergent needs stage 3"),
        ({"zero_optimization": {"mics_shard_size": 0}}, "zero_optimization: mics_shard_size=0; it is a number of"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero_optimization: offload_param needs stage 3"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            'zero_optimization: offload_optimizer.device = "nvme" needs offload_optimizer.nvme_path',
        ),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "torch_autocast.enabled, and bf16.enabled"),
        ({"mesh": {"axes": {"data": 2, "pipe": "2"}}}, "mesh.axes.pipe: given '2' (str); allowed: a valid integer"),
        ({"mesh": {"data": ["a", 3]}}, "mesh.data.1: given 3 (int); allowed: a valid string"),
        ({"optimizer": {"type": "Lmab"}}, "optimizer.type: no optimizer is named 'Lmab'; did you mean 'Lamb'?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}}, "scheduler.params.last_batch_"),
        ({"train": {"task": {"type": "byte_lm", "params": {"width": "x"}}, "steps": 1}}, "train.task.params.width: "),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size = train_micro_batch_size_per_gpu × "),
        ({3: 1}, "3: unknown key; known here: "),
        ({"comm": {"timeout_s": math.inf}}, "comm.timeout_s: given inf (float); allowed: a finite number"),
        ({"fp16": {"loss_scale": math.inf}}, "fp16.loss_scale: given inf (float); allowed: a finite number"),
        ({"gradient_clipping": math.nan}, "gradient_clipping: given nan (float); allowed: a finite number"),
        (
            {"progressive_layer_drop": {"gamma": math.inf}},
            "progressive_layer_drop.gamma: given inf (float); allowed: a fi",
        ),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": math.inf}}}, "optimizer.params.max_coeff: "),
        (
            metric(schedule_config={"total_curriculum_step": math.inf}),
            f"{METRIC}: schedule_config.total_curriculum_step = ",
        ),
        (
            metric(schedule_config={"total_curriculum_step": math.nan}),
            f"{METRIC}: schedule_config.total_curriculum_step = ",
        ),
        (
            {"data_efficiency": {"data_routing": {"enabled": True}}},
            "data_efficiency: data_routing.enabled is true in a section without enabled, which is false by default",
        ),
        (
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 3}},
                }
            },
            "data_efficiency: dynamic_batching.enabled is true in a section without enabled",
        ),
        (metric(min_dificulty=1), f"{METRIC}.min_dificulty: unknown key; did you mean 'min_difficulty'?"),
        (metric(min_difficulty="auto"), f'{METRIC}.min_difficulty: still "auto"'),
        (metric(min_difficulty="1"), f"{METRIC}.min_difficulty: given '1' (str); allowed: int"),
        ({"fp16": {None: 1}}, "fp16.None: unknown key; known here: "),
    ],
)
def test_contradictions_and_unknown_names_are_one_sentence(document: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({**BASE, **document}, world_size=4)
    (problem,) = caught.value.problems
    assert problem.startswith(said)
