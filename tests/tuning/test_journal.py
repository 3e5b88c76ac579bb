"""Nothing that was written is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.tuning import Journal, JournalError
from zoo.tuning.journal import put_aside, read


@examples(times=1)
@given(number=st.integers(1, 6), data=st.data())
def test_a_journal_cut_anywhere_has_every_whole_event(
    number: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("search")
    with Journal(folder) as journal:
        for k in range(number):
            journal.write("start", number=k, text="ä" * k)
    path = folder / "journal.jsonl"
    text = path.read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    path.write_bytes(text[:cut])
    whole = text[:cut].count(b"\n")
    assert [event["number"] for event in read(path)] == list(range(whole))
    with Journal(folder, resumes=True) as journal:
        assert len(journal.events) == whole
        journal.write("end", number=99)
    assert [event["number"] for event in read(path)] == [*range(whole), 99]


def test_an_event_is_on_the_disk_when_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("begin", value=1)
    assert read(tmp_path / "journal.jsonl") == [{"event": "begin", "value": 1}]
    journal.__exit__(None, None, None)


def test_what_cannot_be_a_search_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"has no journal\.jsonl"):
        read(tmp_path / "journal.jsonl")
    with pytest.raises(JournalError, match=r"has no journal\.jsonl"):
        Journal(tmp_path / "new", resumes=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "journal.jsonl").write_text('{"event": "begin"}\nnot JSON\n{"event": "end"}\n')
    with pytest.raises(JournalError, match="line 2 of"):
        Journal(tmp_path, resumes=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be written to"):
        Journal(tmp_path / "file" / "below")


def test_a_search_is_not_overwritten_and_has_one_process(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.write("begin")
        with pytest.raises(JournalError, match="another process is searching"):
            Journal(tmp_path, resumes=True)
    with pytest.raises(JournalError, match=r"there is a search in .* already.*--resume"):
        Journal(tmp_path)


def test_a_journal_that_another_process_writes_is_not_put_aside(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.write("begin")
        with pytest.raises(JournalError, match="another process is searching"):
            put_aside(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["journal.jsonl"]
    put_aside(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["journal-1.jsonl"]
    put_aside(tmp_path)
    put_aside(tmp_path / "nothing")


def test_a_line_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    text = """
import resource, signal, sys
from pathlib import Path
from zoo.tuning import Journal, JournalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
with Journal(Path(sys.argv[1])) as journal:
    journal.write("begin")
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, limit[1]))
    try:
        journal.write("start", text="x" * 100)
    except JournalError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    journal.write("stop")
"""
    made = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "cannot be written to: File too large; make room, and go on with --resume" in made.stdout
    assert [event["event"] for event in read(tmp_path / "journal.jsonl")] == ["begin", "stop"]
