"""How many files a gradient goes through: what a reader has to open. The number may fall, and does not rise unseen."""

from __future__ import annotations

import pytest
from scripts.crossings import count


@pytest.mark.parametrize(("stage", "files"), [(2, 19), (3, 21)])
def test_files_crossed_by_a_backward_and_a_step(stage: int, files: int) -> None:
    found = count(stage)
    crossed = found["backward"].calls | found["step"].calls
    assert {"zoo/shard/gradients.py", "zoo/zero/update/updater.py"} <= set(crossed)
    assert len(crossed) <= files, sorted(crossed)
