"""docs/architecture.md shows the rooms that exist."""

from __future__ import annotations

import re

import pytest
from tests.house.pages import ROOT, text

PAGE = "docs/architecture.md"


def test_the_picture_has_every_subpackage_and_no_other() -> None:
    (picture,) = re.findall(r"```\n(registry .*?)```", text(PAGE), re.DOTALL)
    drawn = re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", picture))
    there = [path.parent.name for top in ("python", "cuda", "moe", "compression")
             for path in ROOT.glob(f"{top}/zoo/*/__init__.py")]  # fmt: skip
    assert sorted(drawn) == sorted(there)


@pytest.mark.parametrize("package", ["shard", "zero", "engine"])
def test_the_table_of_a_package_has_every_folder_and_no_other(package: str) -> None:
    (table,) = re.findall(rf"^\| room of `zoo\.{package}` .*?(?=^\n)", text(PAGE), re.DOTALL | re.MULTILINE)
    there = [path.parent.name for path in (ROOT / "python/zoo" / package).glob("*/__init__.py")]
    assert sorted(re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)) == sorted(there)
