"""Every documented key has a fate, is on the page, and does what the page says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.config.documented import (
    EFFECTS,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    OPTIMIZERS,
    OTHERS,
    SCHEDULES,
    ZERO,
)

from zoo.config import Config, ConfigError, json_schema, load, read, read_section
from zoo.config.fates import Fate, spread
from zoo.config.page import Row, rows
from zoo.registry import DEFAULT
from zoo.zero.options.root import ZeroRoot

ROOT = Path(__file__).parents[2]
TABLES = rows()
REGISTERED = set(DEFAULT.names("config_section"))
FATES = {
    path: fate for path, fate in spread({**Config.fates, **ZeroRoot.fates}) if path.split(".")[0] not in REGISTERED
}


def found(path: str, title: str | None = None) -> Row | None:
    """The row of a dotted path, in any spelling of its last part."""
    for row in TABLES.get(path.rpartition(".")[0] if title is None else title, []):
        above = row.path.rpartition(".")[0]
        if path in (row.path, *(f"{above}.{alias}" if above else alias for alias in row.aliases)):
            return row
    return None


def documented() -> Iterator[tuple[str, str | None]]:
    """Dotted path and title of the table, where that is not the section."""
    for path in OTHERS:
        yield path, None
    for section, keys in (("", ZERO), ("offload_param.", OFFLOAD_PARAM), ("offload_optimizer.", OFFLOAD_OPTIMIZER)):
        for name, (_, _, aliases) in keys.items():
            for key in (name, *aliases):
                yield f"zero_optimization.{section}{key}", None
    for section, components in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        for name, (_, names) in components.items():
            for key in names:
                both = key == "last_batch_iteration"
                yield f"{section}.params.{key}", "scheduler.params" if both else f'{section} "{name}"'


@pytest.mark.matrix
@pytest.mark.parametrize(("path", "title"), list(documented()), ids=str)
def test_every_documented_key_is_on_the_page(path: str, title: str | None) -> None:
    row = found(path, title)
    assert row is not None
    assert row.fate in ("carried out", "unnecessary", "translated", "refused", "waits")
    above = found(title.rpartition(".")[0]) if title and '"' not in title else found(path.rpartition(".")[0])
    assert row.sentence or row.path.endswith("enabled") or (above and above.sentence)


def test_every_documented_key_that_is_carried_out_has_a_test_of_its_effect() -> None:
    inside = {key for key, title in documented() if title is None}
    for path in sorted(inside):
        row = found(path)
        assert row is not None
        if row.fate != "carried out" or row.type == "section":
            continue
        named = next((key for key in (row.path, path, path.rpartition(".")[0]) if key in EFFECTS), None)
        assert named is not None, f"{path} is carried out; EFFECTS says which test shows what it does"
        file, _, function = EFFECTS[named].partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text if function else "def test_" in text


def document(path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    tree: dict[str, Any] = {last: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return {"train_batch_size": 1, **tree}


def other(fate: Fate) -> Any:
    """A value that asks for something."""
    if isinstance(fate.kind, tuple):
        values = [value for value in fate.kind if not isinstance(value, type) and not fate.asks_for_nothing(value)]
        return values[0] if values else {bool: True, int: 7, float: 7.5, str: "x"}[fate.kind[0]]
    if fate.kind is bool:
        return not fate.default
    return {int: 7, float: 7.5, str: "other", list: ["other"], dict: {"other": 1}}[fate.kind]  # type: ignore[index]


PLAIN = {path: fate for path, fate in FATES.items() if not fate.keys and fate.what != "translated"}


@pytest.mark.filterwarnings("error")
def test_what_asks_for_nothing_is_taken_without_a_word() -> None:
    plain = load({"train_batch_size": 1})
    for path, fate in PLAIN.items():
        if "sparse_attention" in path:
            continue  # whatever it has
        for value in (None, "auto", fate.default, *fate.nothing):
            assert load(document(path, value)) == plain, path
    for path, fate in FATES.items():
        if fate.keys:
            assert load(document(path, {})) == load(document(path, None)) == load(document(path, False)) == plain


@pytest.mark.parametrize("top", sorted({path.split(".")[0] for path in PLAIN}))
def test_what_asks_for_something_has_its_fate(top: str) -> None:
    for path, fate in PLAIN.items():
        if path.split(".")[0] != top:
            continue
        value = other(fate)
        switched = path.rpartition(".")[0] in FATES and FATES[path.rpartition(".")[0]].alone
        above = FATES[path.rpartition(".")[0]] if switched else None
        parameter = above is not None and "enabled" in above.keys and not path.endswith(".enabled")
        silent = not fate.asks or fate.asks_for_nothing(value) or parameter or fate.open
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                load(document(path, value))
                problems: list[str] = []
            except ConfigError as error:
                problems = error.problems
        said = [str(note.message) for note in notes]
        if top == "sparse_attention":
            assert problems == ["sparse_attention: given; it waits for sparse attention, which zoo does not have yet; "
                                "leave it out"]  # fmt: skip
        elif silent:
            assert (problems, said) == ([], []), path
        elif fate.what == "unnecessary":
            assert problems == []
            assert said == [f"{path}={value!r} has no effect: {fate.text}."]
        else:
            (problem,) = problems
            assert problem.startswith(f"{path}: given {value!r}; ")
            assert fate.text in problem


def test_wrong_kinds_and_names_in_sections_that_are_not_there() -> None:
    for path, fate in FATES.items():
        if fate.kind is not object and not isinstance(fate.kind, tuple):
            with pytest.raises(ConfigError) as caught:
                load(document(path, object()))
            assert any(problem.startswith(f"{path}: given <object") for problem in caught.value.problems)
        if fate.keys and not fate.open and not fate.whole:
            name = next(iter(fate.keys))
            with pytest.raises(ConfigError) as caught:
                load(document(f"{path}.{name}x", 1))
            assert caught.value.problems == [f"{path}.{name}x: unknown key; did you mean {name!r}?"]


HUGGING_FACE = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1, "auto_cast": False,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": float("inf"),
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "amp": {"enabled": "auto"},
    "dump_state": False, "sparse_gradients": False, "data_types": {"grad_accum_dtype": None},
}  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_a_section_is_read_alone_while_others_are_to_be_chosen() -> None:
    zero = read_section("zero_optimization", HUGGING_FACE)
    plain = type(zero)()
    assert (zero.stage, zero.offload_param.device, zero.sub_group_size) == (3, "cpu", 10**9)
    assert zero.reduce_bucket_size is plain.reduce_bucket_size
    assert zero.param_persistence_threshold == plain.param_persistence_threshold
    assert read_section("fp16", HUGGING_FACE).enabled is False
    assert read_section("bfloat16", {"bf16": {"enabled": True}}).enabled is True
    assert read_section("train", HUGGING_FACE) is None
    assert read_section("optimizer", HUGGING_FACE).params == {}


@pytest.mark.dear
def test_editors_take_what_is_read() -> None:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(json_schema())
    chosen = {
        **HUGGING_FACE, "steps_per_print": 5, "tensor_parallel": {"autotp_size": 1}, "comms_logger": None,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "last_batch_iteration": -1}},
    }  # fmt: skip
    assert [error.message for error in validator.iter_errors(chosen)] == []
    read(chosen)
    for wrong in ({"fp16": {"enabled": "yes"}}, {"amp": {"opt": 1}}, {"zero_optimization": {"legacy_stage1": 1}}):
        assert list(validator.iter_errors({**chosen, **wrong}))


def test_what_is_wrong_with_a_section_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        read_section("zero_optimization", {"zero_optimization": {"stage": "3", "offload_param": {"devise": "cpu"}}})
    assert caught.value.problems == ["zero_optimization.offload_param.devise: unknown key; did you mean 'device'?"]
    with pytest.raises(ConfigError) as caught:
        read_section("zero_optimization", {"zero_optimization": {"stage": "3", "nonsense_elsewhere": None}, "x": 1})
    assert caught.value.problems[0].startswith("zero_optimization.nonsense_elsewhere: unknown key")
    with pytest.raises(ConfigError) as caught:
        read_section("zero_optimization", {"zero_optimization": {"stage": "3"}})
    assert caught.value.problems == ["zero_optimization.stage: given '3' (str); allowed: int"]
    with pytest.raises(ConfigError, match="seed: no section; known: optimizer"):
        read_section("seed", {})


def test_the_rest_is_read_when_it_is_known() -> None:
    document = read(HUGGING_FACE)
    values = dict.fromkeys(document.auto_paths(), 1) | {
        "optimizer.params.betas": [0.9, 0.999], "fp16.enabled": False, "bf16.enabled": True,
    }  # fmt: skip
    config = document.resolve_auto(values).load(world_size=1)
    assert config.zero_optimization.reduce_bucket_size == 1
    assert config.bf16.enabled
    assert config.steps_per_print is None
