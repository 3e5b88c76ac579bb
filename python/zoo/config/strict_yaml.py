"""YAML in which a key is given once and numbers are what everybody takes for numbers."""

from __future__ import annotations

import re
from typing import Any

import yaml

from zoo.config.reading import DocumentError, integer

__all__ = ["parse"]


def parse(text: str) -> Any:
    """What the text says; raises DocumentError for one that is not well-formed."""
    try:
        return yaml.load(text, Loader=StrictYaml)
    except yaml.YAMLError as error:
        raise DocumentError(str(error)) from None


class StrictYaml(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise DocumentError(f"key {key!r} is given twice{node.start_mark}; remove one")
        return super().construct_mapping(node, deep)


def _integer(loader: StrictYaml, node: yaml.ScalarNode) -> int:
    digits = str(node.value).replace("_", "")
    return integer(digits) if re.fullmatch(r"[-+]?[0-9]{4001,}", digits) else loader.construct_yaml_int(node)


StrictYaml.add_constructor("tag:yaml.org,2002:int", _integer)

# YAML 1.1 takes 1e-4 for a string because it has no dot; everybody who writes it in a configuration means the number.
StrictYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
