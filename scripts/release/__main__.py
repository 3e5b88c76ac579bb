"""Everything that a release needs.

python -m scripts.release version            the version, and whether all files say the same
python -m scripts.release set 0.2.0          write another version everywhere
python -m scripts.release build              wheels and source archives into dist/, with SBOM and checksums
python -m scripts.release twice              build in two clean clones at different paths, and compare every byte
python -m scripts.release try [PYTHON ...]   train with the wheels in an empty environment of each of these Pythons
python -m scripts.release all                version, twice, and try with the Python of .venv
"""

from __future__ import annotations

import sys

from scripts.release import building, versions


def main(words: list[str]) -> None:
    """One of the above."""
    match words:
        case ["version"]:
            print(versions.checked())
        case ["set", version]:
            versions.write(version)
        case ["build"]:
            versions.checked()
            building.build()
        case ["twice"]:
            versions.checked()
            building.twice()
        case ["try", *pythons]:
            building.try_them(pythons)
        case ["all"]:
            versions.checked()
            building.twice()
            building.try_them([])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
