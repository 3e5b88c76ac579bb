"""The benchmark of activation checkpointing runs, on a model of a few values, and its page says what was measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.activation_checkpointing.run import main


def test_it_runs_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# old\n\n## Remarks\n\nKept by hand.\n")
    small = ["--rounds", "1", "--blocks", "2", "--width", "16", "--shape", "1", "8"]
    main([*small, "--folder", str(tmp_path), "--page", str(page)])
    text = page.read_text()
    assert text.endswith("Kept by hand.\n")
    for name in ("no checkpoint", "torch, re-entrant", "zoo, contiguous", "zoo, NVMe", "zoo, save matmul"):
        assert f"| {name} " in text
