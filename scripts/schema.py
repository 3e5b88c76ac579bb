"""Write what is made of the sections of a configuration; --check only compares.

docs/config.schema.json, with which editors complete and check ds_config documents; docs/reference/configuration.md and
docs/reference/config, the tables of all keys; and ``ZeroOptions``, the keywords of ZeRO optimizers for type checkers.
"""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from zoo.config import json_schema
from zoo.config.page import pages
from zoo.config.section import section_of
from zoo.zero import ZeroConfig

ROOT = Path(__file__).parent.parent

HEAD = '''"""Written by ``make schema`` from the fields of :class:`~zoo.zero.ZeroConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from zoo.shard.offload.config import OffloadOptimizerConfig, OffloadParamConfig


class ZeroOptions(TypedDict, total=False):
    """The options of :class:`~zoo.zero.ZeroConfig`, beside the stage."""

'''


def keywords() -> str:
    """The module ``zoo.zero.options.zero_options``."""
    lines = (
        f"    {name}: {' | '.join(_types(field.annotation))}\n"
        for name, field in ZeroConfig.model_fields.items()
        if name != "stage"
    )
    return HEAD + "".join(lines)


def _types(annotation: Any) -> Iterator[str]:
    """The parts of a type as Python writes them; a section may be given as a mapping too."""
    if get_origin(annotation) is Literal:
        yield f"Literal[{', '.join(json.dumps(value) for value in get_args(annotation))}]"
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _types(part)
    elif section_of(annotation) is not None:
        yield from (annotation.__name__, "Mapping[str, Any]")
    else:
        yield "None" if annotation is types.NoneType else annotation.__name__


def main() -> None:
    texts = {
        "docs/config.schema.json": json.dumps(json_schema(), indent=2, sort_keys=True) + "\n",
        **{f"docs/reference/{name}": text for name, text in pages().items()},
        "python/zoo/zero/options/zero_options.py": keywords(),
    }
    for name, text in texts.items():
        target = ROOT / name
        if "--check" not in sys.argv:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is not what the sections say now; `make schema` writes it again")


if __name__ == "__main__":
    main()
