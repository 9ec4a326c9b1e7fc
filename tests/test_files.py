from __future__ import annotations

import os
from pathlib import Path

import pytest

from gattn_viz.errors import GattnVizError
from gattn_viz.files import replacing


def test_writes_and_makes_directories(tmp_path: Path) -> None:
    target = tmp_path / "new" / "table.csv"
    with replacing(target) as temporary:
        assert temporary.suffix == ".csv"
        temporary.write_text("a")
        assert not target.exists()
    assert target.read_text() == "a"
    assert os.listdir(target.parent) == ["table.csv"]


def test_what_was_there_survives_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    target.write_text("old")

    def write_half() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        write_half()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["table.csv"]


def test_keeps_the_mode_and_follows_links(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "new") as temporary:
        temporary.write_text("a")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    for bad in (tmp_path / "file" / "table.csv", tmp_path):
        with pytest.raises(GattnVizError, match=rf"^cannot write {bad}: .*; expected a place"), replacing(bad):
            pass


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As /dev/null, which root could otherwise exchange for a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(pipe) as temporary:
        temporary.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_odd_paths(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for bad in (loop / "a.csv", tmp_path / ("a" * 300)):
        with pytest.raises(GattnVizError, match=r"^cannot write"), replacing(bad):
            pass


def test_a_reader_that_has_gone(tmp_path: Path) -> None:
    """No error of its own: the command line is quiet about it."""
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), replacing(f"/dev/fd/{writer}") as temporary:
        temporary.write_text("lost")
    os.close(writer)
