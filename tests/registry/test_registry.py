"""What the registry promises: names, collisions, laziness, overrides, building."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.profiles import examples

from zoo.registry import (
    BuildError,
    Choice,
    DuplicateError,
    LoadError,
    Registry,
    RegistryError,
    UnknownError,
    describe,
    nearest,
)

KINDS = st.sampled_from(["optimizer", "schedule", "gate"])
NAMES = st.text("abcdefgh_.-0", min_size=1, max_size=6)


class Ema:
    class Config(BaseModel):
        decay: float = 0.9
        steps: int = 10

    def __init__(self, config: Config, *, params: list[float]) -> None:
        self.config = config
        self.params = params


class Sgd:
    @dataclass(frozen=True)
    class Config:
        lr: float = 0.1

    def __init__(self, config: Config) -> None:
        self.config = config


def line(slope: float, offset: float = 0.0) -> tuple[float, float]:
    return slope, offset


@pytest.fixture
def registry() -> Registry:
    return Registry(
        {"average": {"ema": Ema}, "optimizer": {"sgd": Sgd, "json": "json:JSONDecoder"}, "curve": {"line": line}}
    )


@examples(times=5)
@given(st.dictionaries(st.tuples(KINDS, NAMES), st.integers(), max_size=8))
def test_every_registered_name_is_found_and_no_other(claims: dict[tuple[str, str], int]) -> None:
    registry = Registry()
    components = {key: object() for key in claims}
    for (kind, name), component in components.items():
        assert registry.register(kind, name, component) is component
    assert registry.kinds() == sorted({kind for kind, _ in claims})
    for kind in registry.kinds():
        assert registry.names(kind) == sorted(name for known, name in claims if known == kind)
    for (kind, name), component in components.items():
        assert registry.get(kind, name) is component
        with pytest.raises(UnknownError):
            registry.get(kind, name + "?")


@examples(times=5)
@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=8))
def test_overrides_and_scopes_leave_no_trace(steps: list[tuple[str, bool]]) -> None:
    registry = Registry({"k": {"a": 1}})

    def nest(rest: list[tuple[str, bool]]) -> None:
        before = [(name, registry.get("k", name)) for name in registry.names("k")]
        if rest:
            (name, use_scope), *rest = rest
            if use_scope and name not in registry.names("k"):
                with registry.scope():
                    registry.register("k", name, object())
                    assert name in registry.names("k")
                    nest(rest)
            else:
                mark = object()
                with registry.override("k", "a", mark):
                    assert registry.get("k", "a") is mark
                    nest(rest)
        assert [(name, registry.get("k", name)) for name in registry.names("k")] == before

    nest(steps)


def test_override_ends_when_the_experiment_fails(registry: Registry) -> None:
    with pytest.raises(KeyError), registry.override("average", "ema", line):
        raise KeyError
    assert registry.get("average", "ema") is Ema


def test_override_of_an_unknown_name_is_a_typing_mistake(registry: Registry) -> None:
    with pytest.raises(UnknownError, match="did you mean 'ema'"), registry.override("average", "emma", line):
        pass


def test_decorator_returns_the_class(registry: Registry) -> None:
    @registry.register("gate", "top1")
    class Top1:
        pass

    assert registry.get("gate", "top1") is Top1
    assert __file__ in registry.entry("gate", "top1").origin


def test_unknown_names_list_the_alternatives_and_the_nearest(registry: Registry) -> None:
    with pytest.raises(UnknownError, match=r"no optimizer is named 'SDG'; did you mean 'sgd'\? known: 'json', 'sgd'"):
        registry.get("optimizer", "SDG")
    with pytest.raises(UnknownError, match=r"no kind is named 'optimiser'; did you mean 'optimizer'\?"):
        registry.get("optimiser", "sgd")


def test_a_second_claim_names_both_origins(registry: Registry) -> None:
    with pytest.raises(DuplicateError, match=r"claimed by .*Ema from table and by .*line from here"):
        registry.register("average", "ema", line, origin="here")
    assert registry.get("average", "ema") is Ema
    assert registry.register("average", "ema", Ema) is Ema  # the same object again is no second claim


@pytest.mark.parametrize(
    ("kind", "name", "target"), [("", "a", 1), ("a b", "a", 1), ("a", "", 1), ("a", "b c", 1), ("a", "b", "no.colon")]
)
def test_names_that_cannot_be_written_down_are_refused(kind: str, name: str, target: object) -> None:
    with pytest.raises(RegistryError):
        Registry().register(kind, name, target)


def test_a_component_in_the_place_of_its_name_is_refused_by_a_sentence(registry: Registry) -> None:
    for ask in (registry.get, registry.entry, registry.build):
        with pytest.raises(RegistryError, match=r"a name is <class 'int'>, a type; it is a text"):
            ask("optimizer", int)
    with pytest.raises(RegistryError, match="a name is 3, a int; it is a text"):
        registry.register("optimizer", 3, int)  # type: ignore[call-overload]


def test_strings_are_imported_only_when_asked_for() -> None:
    sys.modules.pop("this", None)
    registry = Registry({"poem": {"zen": "this:s", "lost": "zoo_no_such_module:x", "half": "json:nothing"}})
    assert registry.names("poem") == ["half", "lost", "zen"]
    assert "this" not in sys.modules
    assert registry.get("poem", "zen").startswith("Gur Mra")
    with pytest.raises(
        LoadError, match=r"poem 'lost' \(zoo_no_such_module:x from table\) cannot be loaded: ModuleNotFound"
    ):
        registry.get("poem", "lost")
    with pytest.raises(LoadError, match="AttributeError"):
        registry.get("poem", "half")


def test_build_validates_the_config_and_passes_runtime_by_keyword(registry: Registry) -> None:
    built = registry.build("average", "ema", {"decay": 0.5}, params=[1.0])
    assert (built.config.decay, built.config.steps, built.params) == (0.5, 10, [1.0])
    config = Ema.Config(steps=3)
    assert registry.build("average", "ema", config, params=[]).config is config
    assert registry.build("optimizer", "sgd").config.lr == 0.1
    assert registry.build("optimizer", "sgd", {"lr": 2}).config.lr == 2
    assert registry.build("curve", "line", {"slope": 2.0}, offset=1.0) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "name", "config", "runtime", "said"),
    [
        (
            "average",
            "ema",
            {"dcay": 1},
            {"params": []},
            r"dcay: unknown key; did you mean 'decay'\? known: decay, steps",
        ),
        ("average", "ema", {"steps": "x"}, {"params": []}, r"steps: .*\(given 'x'\)"),
        ("average", "ema", 3, {"params": []}, "allowed is a mapping or an instance of"),
        ("average", "ema", {}, {}, "missing a required .*'params'"),
        ("average", "ema", {}, {"params": [], "x": 1}, "unexpected keyword argument 'x'"),
        ("optimizer", "sgd", {"rl": 1}, {}, "rl: unknown key"),
        ("optimizer", "sgd", {"lr": "fast"}, {}, "lr: "),
        ("curve", "line", {"slop": 1}, {}, "slop"),
        ("curve", "line", {"slope": 1}, {"slope": 2}, "slope given both"),
    ],
)
def test_build_says_what_does_not_fit(registry, kind, name, config, runtime, said) -> None:
    with pytest.raises(BuildError, match=said) as caught:
        registry.build(kind, name, config, **runtime)
    assert f"{kind} {name!r}" in str(caught.value)


def test_describe_prints_names_origins_and_values(registry: Registry) -> None:
    tree = {
        "optimizer": Choice("optimizer", "sgd", {"lr": 0.5}, parts={"shadow": Choice("average", "ema", {"steps": 3})}),
        "curve": Choice("curve", "line", {"slope": 1}),
    }
    assert describe(tree, registry).splitlines() == [
        f"├─ optimizer: sgd  [{__name__}:Sgd from table]",
        "│  │  lr = 0.5",
        f"│  └─ shadow: average ema  [{__name__}:Ema from table]",
        "│        decay = 0.9  (default)",
        "│        steps = 3",
        f"└─ curve: line  [{__name__}:line from table]",
        "      slope = 1",
    ]


def test_nearest_ignores_case_and_gives_up() -> None:
    assert nearest("ADAMW", ["adam", "adamw"]) == "adamw"
    assert nearest("xyz", ["adam"]) is None


def test_names_in_another_case_are_the_same_names() -> None:
    registry = Registry({"optimizer": {"AdamW": Sgd}}, origin="house")
    assert registry.get("optimizer", "adamw") is Sgd
    assert registry.entry("optimizer", "ADAMW").name == "AdamW"
    assert registry.names("optimizer") == ["AdamW"]
    with pytest.raises(DuplicateError, match="from house and by"):
        registry.register("optimizer", "adamw", dict)
    with registry.override("optimizer", "adamw", dict):
        assert registry.get("optimizer", "AdamW") is dict
    assert registry.get("optimizer", "AdamW") is Sgd


def test_a_config_is_checked_without_building() -> None:
    def task(text: str, *, size: int = 1, seed: int) -> None: ...

    registry = Registry({"optimizer": {"sgd": Sgd}, "task": {"bytes": task, "open": lambda **options: None}})
    made, problems = registry.parse("optimizer", "sgd", {"lr": 0.5})
    assert (made.lr, problems) == (0.5, [])
    assert registry.parse("optimizer", "sgd", {"rl": 1}) == (None, [("rl", "unknown key; known: lr")])
    assert registry.parse("optimizer", "sgd", 3)[1][0][0] == ""
    assert registry.parse("task", "bytes", {"text": "a"}, runtime=["seed"])[1] == []
    assert registry.parse("task", "bytes", {"sise": 1}, runtime=["seed"])[1] == [
        ("sise", "unknown key; did you mean 'size'? known: text, size"), ("text", "required and not given"),
    ]  # fmt: skip
    assert registry.parse("task", "open", {"anything": 1})[1] == []
    assert "allowed is a mapping of arguments" in registry.parse("task", "bytes", [1])[1][0][1]
