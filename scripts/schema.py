"""Write docs/config.schema.json, with which editors complete and check ds_config documents, and docs/config.md, the
table of all keys; --check only compares."""

import json
import sys
from pathlib import Path

from zoo.config import json_schema
from zoo.config.page import page

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    texts = {
        "config.schema.json": json.dumps(json_schema(), indent=2, sort_keys=True) + "\n",
        "config.md": page(),
    }
    for name, text in texts.items():
        target = DOCS / name
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/{name} is not what the sections say now; `make schema` writes it again")


if __name__ == "__main__":
    main()
