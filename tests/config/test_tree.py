"""Keys of packages: at the root and as sections, loaded when a document has them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pytest
from pydantic import Field, field_validator

from zoo.config import Config, ConfigError, Section, json_schema, load, register_section
from zoo.config.fates import Fate, refused, translated
from zoo.config.section import fields_by_key
from zoo.registry import Registry


class Sounds(Section):
    """Keys of the root."""

    loudness: float = Field(default=1.0, ge=0, alias="volume")
    """How loud."""
    muted: bool = False

    fates: ClassVar[Mapping[str, Fate]] = {
        "silent": translated({"loudness": {True: 0.0}}),
        "stereo": refused("there is one channel", False),
    }

    @field_validator("loudness", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return 2.0 if value == "loud" else value

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.muted and self.loudness != 1 and config.seed != 7:
            yield "muted, and loudness is given; drop one of the two"


class Lamp(Section):
    enabled: bool = False
    watts: int = 5


class Needs(Section):
    size: int


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for key in ("loudness", "volume", "muted", "silent", "stereo"):
        registry.register("config_root", key, f"{__name__}:Sounds")
    register_section("lamp", Lamp, registry=registry)
    register_section("needs", Needs, registry=registry)
    register_section("absent", "zoo_no_such_module:Absent", registry=registry)
    return registry


def go(registry: Registry, document: dict[str, Any], **options: Any) -> Config:
    return load({"train_batch_size": 1, **document}, registry=registry, world_size=1, **options)


def test_a_package_has_keys_at_the_root(registry: Registry) -> None:
    config = go(registry, {"volume": "loud"}, overrides=["muted=false"])
    assert (config.loudness, config.muted) == (2.0, False)
    assert config.source("loudness") == "dict, alias 'volume'"
    assert go(registry, {}).loudness == 1.0
    with pytest.warns(UserWarning, match="silent is deprecated"):
        assert go(registry, {"silent": True}).loudness == 0.0
    for document, said in (
        ({"loudness": -1}, "loudness: given -1 (int); allowed: greater than or equal to 0"),
        ({"loudness": 1, "volume": 2}, "volume: given twice, as 'loudness' and as 'volume'"),
        ({"loudnes": 1}, "loudnes: unknown key; did you mean 'loudness'?"),
        ({"muted": True, "loudness": 3}, "muted, and loudness is given; drop one of the two"),
        ({"stereo": True}, "stereo: given True; not supported: there is one channel"),
    ):
        with pytest.raises(ConfigError) as caught:
            go(registry, document)
        (problem,) = caught.value.problems
        assert problem.startswith(said)
    assert go(registry, {"muted": True, "loudness": 3, "seed": 7}).muted
    assert {"loudness", "volume", "stereo"} <= set(json_schema(registry=registry)["properties"])


def test_what_is_not_in_the_document_has_its_defaults(registry: Registry) -> None:
    plain, used = go(registry, {}), go(registry, {"lamp": {}, "loudness": 1.0})
    assert plain.lamp == Lamp()
    assert plain.lamp is plain.lamp
    assert plain.needs is None
    with pytest.raises(AttributeError, match="no key 'lmap'; registered are"):
        _ = plain.lmap
    with pytest.raises(AttributeError, match="absent: config_section 'absent'"):
        _ = plain.absent
    assert plain == used
    assert used == plain
    assert plain != go(registry, {"lamp": {"watts": 6}})
    assert go(registry, {"needs": {"size": 1}}) != plain
    assert plain.to_dict() == used.to_dict()
    assert plain.to_dict()["lamp"] == {"enabled": False, "watts": 5}
    assert go(registry, dict(plain.to_dict())) == plain
    assert plain.explain().replace("default", "dict").count("lamp.watts = 5") == 1
    assert {line.split("  (")[0].rstrip() for line in plain.explain().splitlines()} == {
        line.split("  (")[0].rstrip() for line in used.explain().splitlines()
    }
    assert not plain.asks_for("lamp")
    assert list(plain.package_sections) == []
    assert list(used.package_sections) == ["lamp"]


@pytest.mark.parametrize("document", [{}, {"lamp": {"watts": 7}, "loudness": 2}])
def test_it_survives_pickle(registry: Registry, document: dict[str, Any]) -> None:
    config = go(registry, document)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert (again.lamp, again.loudness, again.needs) == (config.lamp, config.loudness, None)
    assert again.explain() == config.explain()
    default = load({"train_batch_size": 1, **({"aio": {"queue_depth": 3}} if document else {})})
    assert pickle.loads(pickle.dumps(default)) == default


def test_keys_that_two_have_are_errors(registry: Registry) -> None:
    registry.register("config_root", "lamp", f"{__name__}:Sounds")
    with pytest.raises(ConfigError, match="lamp: two packages, or one and the core, have this key"):
        go(registry, {})
    other = Registry()
    register_section("seed", Lamp, registry=other)
    with pytest.raises(ConfigError, match="seed: two packages"):
        go(other, {})
    third = Registry()
    third.register("config_root", "loudness", Sounds)
    with pytest.raises(ConfigError, match='muted: a key of Sounds that is not registered as "config_root"'):
        go(third, {"loudness": 1})


def test_a_registered_section_takes_the_place_of_one_that_waits(registry: Registry) -> None:
    register_section("eigenvalue", Lamp, registry=registry)
    assert go(registry, {"eigenvalue": {"enabled": True}}).eigenvalue.watts == 5
    with pytest.raises(ConfigError, match="max_iter: unknown key"):
        go(registry, {"eigenvalue": {"max_iter": 1}})


CODE = """
import sys
from zoo.config import load
before = set(sys.modules)
config = load({"train_batch_size": 4, "seed": 3, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "mesh": {},
               "wall_clock_breakdown": True, "flops_profiler": {"enabled": False}, "comms_logger": {"enabled": True}},
              world_size=2)
heavy = ("torch", "numpy", "yaml")
ours = ("zoo.zero", "zoo.shard", "zoo.train", "zoo.io", "zoo.engine", "zoo.monitor", "zoo.optim", "zoo.data_efficiency")
loaded = sorted(name for name in sys.modules if name in heavy or name.startswith(ours))
assert not loaded, loaded
try:
    load({"train_batch_size": 4, "zero_optimisation": {}})
except ValueError as error:
    assert "did you mean 'zero_optimization'?" in str(error), error
assert "torch" not in sys.modules
assert config.zero_optimization.stage == 0
assert "zoo.shard" in sys.modules and "zoo.train" not in sys.modules
"""


def test_reading_imports_only_what_the_document_uses() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_the_cores_keys_at_the_root() -> None:
    config = load({"train_batch_size": 1, "communication_data_type": "bfp16"})
    assert config.communication_data_type == "bf16"
    with pytest.raises(ConfigError, match="gradient_predivide_factor = 2 has no effect"):
        load({"train_batch_size": 1, "prescale_gradients": True, "gradient_predivide_factor": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load({"train_batch_size": 1, "fp32_allreduce": True}).communication_data_type == "fp32"


def test_the_keys_of_a_section_are_each_callers_own() -> None:
    class Later(Section):
        first: int = Field(1, alias="one", description="d")

    keys = fields_by_key(Later)
    assert keys == {"first": "first", "one": "first"}
    keys["two"] = "first"
    assert fields_by_key(Later) == {"first": "first", "one": "first"}
