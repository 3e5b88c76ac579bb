"""Write docs/config.schema.json, with which editors complete and check ds_config documents; --check only compares."""

import json
import sys
from pathlib import Path

from zoo.config import json_schema

TARGET = Path(__file__).parent.parent / "docs" / "config.schema.json"


def main() -> None:
    text = json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        sys.exit("docs/config.schema.json is not what the sections say now; `make schema` writes it again")


if __name__ == "__main__":
    main()
