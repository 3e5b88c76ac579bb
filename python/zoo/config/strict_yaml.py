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


_MERGE = "tag:yaml.org,2002:merge"


class StrictYaml(yaml.SafeLoader):
    """Looks for keys that are there twice before ``<<`` brings in those of other mappings, which may be given again."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [self._key(key) for key, _ in node.value if key.tag != _MERGE]
        for key in keys:
            if keys.count(key) > 1:
                raise DocumentError(f"key {key!r} is given twice{node.start_mark}; remove one")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Own keys win over merged ones, and earlier merges over later ones: of a mapping that has merged some itself
        PyYAML 6.0.4 takes the merged value."""
        own = [(key, value) for key, value in node.value if key.tag != _MERGE]
        known, merged = [self._key(key) for key, _ in own], []
        for merge in (value for key, value in node.value if key.tag == _MERGE):
            for source in merge.value if isinstance(merge, yaml.SequenceNode) else [merge]:
                if not isinstance(source, yaml.MappingNode):
                    raise DocumentError(f"<< takes a mapping, or a list of them{source.start_mark}")
                self.flatten_mapping(source)
                for key, value in source.value:
                    name = self._key(key)
                    if name not in known:
                        known.append(name)
                        merged.append((key, value))
        node.value = merged + own

    def _key(self, node: yaml.Node) -> Any:
        return self.construct_object(node, deep=True)


def _integer(loader: StrictYaml, node: yaml.ScalarNode) -> int:
    digits = str(node.value).replace("_", "")
    return integer(digits) if re.fullmatch(r"[-+]?[0-9]{4001,}", digits) else loader.construct_yaml_int(node)


StrictYaml.add_constructor("tag:yaml.org,2002:int", _integer)

# YAML 1.1 takes 1e-4 for a string because it has no dot; everybody who writes it in a configuration means the number.
StrictYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
