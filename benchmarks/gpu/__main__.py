"""``python -m benchmarks.gpu``; needs torch, ninja and a CUDA compiler, and nothing of this repository installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The sources of this checkout, also where nothing of it is installed.
sys.path[:0] = [str(ROOT), str(ROOT / "python"), str(ROOT / "cuda")]

from benchmarks.gpu.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
