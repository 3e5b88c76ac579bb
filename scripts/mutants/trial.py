"""Tries one mutant: ``trial.py JOB`` in a forked process that has not imported zoo; its status is pytest's."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from types import CodeType
from typing import Any


def main() -> None:
    job = json.loads(sys.argv[1])
    if any(name.split(".")[0] == "zoo" for name in sys.modules):
        sys.exit("zoo was imported before the mutant could be put in its place")
    real = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == os.path.realpath(job["file"]):
            return self.source_to_code(job["text"].encode(), self.path)  # not the bytecode that is kept of the file
        return real(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    import pytest

    sys.path.insert(0, os.getcwd())
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "--tb=line", "-W", "ignore"]
    sys.exit(int(pytest.main([*options, *job["tests"]])))


if __name__ == "__main__":
    main()
