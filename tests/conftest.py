"""One thread a worker: xdist runs as many workers as there are cores, and tests start processes of their own."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
