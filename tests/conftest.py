"""One thread a worker: xdist runs as many workers as there are cores, and tests start processes of their own."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("zoo", deadline=None)
settings.load_profile("zoo")
