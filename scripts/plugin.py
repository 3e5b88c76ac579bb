"""The package of examples/plugin as somebody has it who has only zoo: built, installed and tested outside of the tree.

python scripts/plugin.py           with the zoo of this Python
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="zoo-plugin-") as home:
        package, site = Path(home) / "package", Path(home) / "site"
        ignore = shutil.ignore_patterns("__pycache__", "dist")
        shutil.copytree(ROOT / "examples/plugin", package, ignore=ignore)
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=package, check=True)
        (wheel,) = (package / "dist").glob("*.whl")
        # A wheel of pure Python is its own folder; beside zoo, and out of its environment.
        shutil.unpack_archive(wheel, site, "zip")
        (package / "zoo_example").rename(package / "not_here")  # what is tested is what was installed
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        sys.exit(subprocess.run(command, cwd=package, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
