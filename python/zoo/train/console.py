"""What a run tells whoever watches: a progress bar on a terminal, lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Watcher:
    """Speaks for rank 0.

    Args:
        silent: say nothing (other ranks).
        total: steps of the run.
        every: steps between lines where there is no bar; None for none.
    """

    def __init__(self, *, silent: bool, total: int, every: int | None) -> None:
        self._silent, self._total, self._every = silent, total, every
        self._console = Console(highlight=False, soft_wrap=True, markup=False)
        self._progress: Progress | None = None
        self._bar: Any = None

    def begin(self, step: int) -> None:
        """Show the bar, if there is a terminal to show it on."""
        if self._silent or not sys.stdout.isatty():
            return
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self._console,
        )  # fmt: skip
        self._bar = self._progress.add_task("", total=self._total, completed=step)
        self._progress.start()

    def line(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if not self._silent:
            self._console.print(text)
            self._console.file.flush()

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        if self._silent:
            return
        text = f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s"
        if self._progress is not None:
            self._progress.update(self._bar, completed=record["step"], description=text)
        elif self._every and (record["step"] % self._every == 0 or record["step"] == self._total):
            memory = ""
            if "rss_bytes" in record:
                rss, state = (
                    " ".join(f"{value / 2**20:.0f}" for value in record[key]) for key in ("rss_bytes", "state_bytes")
                )
                memory = f"  MiB a rank: resident {rss}, model states {state}"
            self.line(f"step {record['step']:>5}/{self._total}  {text}{memory}")

    def end(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
