"""Write the reference pages that are made of other files: ``make pages``; --check only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.pages import benchmarks, pictures

from zoo.cli.explaining import messages

ROOT = Path(__file__).resolve().parents[2]


def texts() -> dict[str, str]:
    """Path from the root → what stands there."""
    return {
        "docs/reference/benchmarks.md": benchmarks.page(ROOT),
        "docs/reference/messages.md": messages.page(),
        **{f"docs/concepts/{name}": text for name, text in pictures.pictures().items()},
    }


def main() -> None:
    for name, text in texts().items():
        target = ROOT / name
        if "--check" not in sys.argv:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is not what it is made of now; `make pages` writes it again")


if __name__ == "__main__":
    main()
