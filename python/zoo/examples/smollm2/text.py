"""The text, which parts of it are held out, and windows of its tokens."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_REPEATED = 40  # characters without spaces from which on a paragraph that was there before is left out


@dataclass(frozen=True, kw_only=True)
class Text:
    """Paragraphs, each one once, and which of them are held out.

    The text is cut into ``num_segments`` equal segments; paragraphs that begin in the last ``held_out`` part of one are
    validation text, the others training text. A paragraph of 40 characters or more (without spaces) that was there
    before, however it is spaced, is left out: otherwise a held-out paragraph could be one that is trained on.

    Attributes:
        source: what the text is, in words.
    """

    paragraphs: tuple[str, ...]
    source: str
    num_segments: int = 8
    held_out: float = 0.1
    num_repeated: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0 or self.num_segments < 1:
            raise ValueError(
                f"a text got held_out={self.held_out} and num_segments={self.num_segments}; the held-out part lies "
                f"between 0 and 1 and there is at least one segment."
            )

    @classmethod
    def of(cls, texts: Sequence[str], source: str, *, num_segments: int, held_out: float) -> Text:
        """The paragraphs of ``texts``, which blank lines divide."""
        seen: set[str] = set()
        kept: list[str] = []
        repeated = 0
        for paragraph in (part.strip("\n") for text in texts for part in _BLANK_LINES.split(text)):
            key = "".join(paragraph.split())
            if not key:
                continue
            if len(key) >= _REPEATED and key in seen:
                repeated += 1
                continue
            seen.add(key)
            kept.append(paragraph)
        return cls(
            paragraphs=tuple(kept), source=source, num_segments=num_segments, held_out=held_out, num_repeated=repeated
        )

    @cached_property
    def pieces(self) -> tuple[list[str], list[str]]:
        """Training and validation text: paragraphs that follow each other, joined."""
        total = sum(len(paragraph) for paragraph in self.paragraphs)
        runs: tuple[list[list[str]], list[list[str]]] = ([], [])
        start, before = 0, None
        for paragraph in self.paragraphs:
            segment, within = divmod(start * self.num_segments / total, 1.0)
            place = (segment, within >= 1.0 - self.held_out)
            if place != before:
                runs[place[1]].append([])
                before = place
            runs[place[1]][-1].append(paragraph)
            start += len(paragraph)
        train, held = (["\n\n".join(run) for run in part] for part in runs)
        return train, held

    @cached_property
    def sha256(self) -> str:
        """Of all that is kept, in order."""
        return hashlib.sha256("\n\n".join(self.paragraphs).encode()).hexdigest()

    def describe(self) -> str:
        """One line: size and checksum."""
        return (
            f"{self.source}: {sum(map(len, self.paragraphs)):,} characters in {len(self.paragraphs):,} paragraphs, "
            f"without {self.num_repeated:,} repeated ones, sha256 {self.sha256}"
        )


def manual(*, num_segments: int = 8, held_out: float = 0.1) -> Text:
    """The help topics of ``pydoc``: the greater part of the Python language reference, in every installation.

    Many topics are sections of other topics. The longest come first, so that what stays is in the order of the manual.
    """
    from pydoc_data.topics import topics  # 500 kB: read only when asked for

    ordered = [topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name))]
    source = f"help topics of Python {platform.python_version()}"
    return Text.of(ordered, source, num_segments=num_segments, held_out=held_out)


def file_text(path: str | Path, *, num_segments: int = 8, held_out: float = 0.1) -> Text:
    """One UTF-8 file of the user's own."""
    found = Path(path)
    if not found.is_file():
        raise ValueError(f"the text file {str(path)!r} does not exist; give the path of a readable file.")
    try:
        text = found.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text file {str(path)!r} is not UTF-8 ({error}); convert it.") from None
    return Text.of([text], f"the file {found.name}", num_segments=num_segments, held_out=held_out)


@dataclass(frozen=True)
class Tokens:
    """Pieces of text as token ids, one after the other.

    Attributes:
        ids: (N,) int32, in memory or mapped from a file.
        lengths: (P,) int64, tokens of each piece.
    """

    ids: np.ndarray
    lengths: np.ndarray


def tokenise(
    pieces: Sequence[str], encode: Callable[[str], Sequence[int]], *, cache: str | Path | None = None, key: str = ""
) -> Tokens:
    """The pieces in tokens; with ``cache``, from the files that this made there the first time, mapped and not read.

    Args:
        cache: a folder for ``tokens-<checksum of pieces and key>.*.npy``; any number of processes may use it at once.
        key: what else decides the tokens: the tokenizer.
    """
    if cache is None:
        return _encode(pieces, encode)
    digest = hashlib.sha256(key.encode())
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece.encode())
    folder = Path(cache)
    paths = [folder / f"tokens-{digest.hexdigest()[:32]}.{part}.npy" for part in ("ids", "lengths")]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        made = _encode(pieces, encode)
        for path, array in zip(paths, (made.ids, made.lengths), strict=True):
            _write(path, array)
    try:
        ids, lengths = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
    except (ValueError, EOFError) as error:
        raise ValueError(f"the cached tokens {str(paths[0])!r} are damaged ({error}); remove them.") from None
    if ids.dtype != np.int32 or ids.ndim != 1 or lengths.shape != (len(pieces),) or int(lengths.sum()) != len(ids):
        raise ValueError(f"the cached tokens {str(paths[0])!r} are not those of this text; remove them.")
    return Tokens(ids, lengths)


def _encode(pieces: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Tokens:
    parts = [np.asarray(encode(piece), dtype=np.int32) for piece in pieces]
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    return Tokens(ids, np.array([len(part) for part in parts], dtype=np.int64))


def _write(path: Path, array: np.ndarray) -> None:
    # Whole or not at all: another rank may be writing the same file, or reading it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class TokenWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i is ``(x, y)``: ``context`` tokens and the tokens that follow each of them, both (context,) int64.

    Windows start every ``context`` tokens inside each piece, so that every token is predicted at most once in an epoch;
    none goes from one piece to the next.

    Raises:
        ValueError: no piece is as long as one window and the token after it.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.tokens, self.context = tokens, context
        ends = np.cumsum(tokens.lengths)
        starts = [np.arange(end - n, end - context, context) for n, end in zip(tokens.lengths, ends, strict=True)]
        self.starts = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
        if not len(self.starts):
            raise ValueError(
                f"none of {len(tokens.lengths)} pieces of text holds a window of {context} tokens and the token after "
                f"it; use a longer text, fewer segments, more held-out text or a shorter context."
            )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[index])
        window = torch.from_numpy(self.tokens.ids[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]
