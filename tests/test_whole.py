"""Folders that are there whole or not at all."""

from pathlib import Path

import pytest

from bert_jax import whole
from bert_jax.errors import InputError
from bert_jax.whole import check_free, locked, new_folder, whole_folder


def test_a_folder_appears_with_the_end_of_the_block(tmp_path):
    out = tmp_path / "deep" / "out"
    with whole_folder(out) as scratch:
        (scratch / "file").write_text("x")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["file"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_error_leaves_nothing(tmp_path):
    def fail():
        with whole_folder(tmp_path / "out") as scratch:
            (scratch / "file").write_text("x")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    left = tmp_path / ".out.partial"
    (left / "folder").mkdir(parents=True)
    (left / "half").write_text("x")
    with whole_folder(tmp_path / "out") as scratch:
        (scratch / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="exists already"), whole_folder(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_two_writers_of_one_folder(tmp_path):
    with whole_folder(tmp_path / "out") as scratch:
        (scratch / "file").write_text("first")
        with (
            pytest.raises(InputError, match="in use by another process"),
            whole_folder(tmp_path / "out"),
        ):
            pass
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_one_that_was_finished_meanwhile(tmp_path, monkeypatch):
    """Between the look at `out` and the lock, another process wrote it."""
    out = tmp_path / "out"
    checks = []

    def check(path):
        checks.append(path)
        if len(checks) == 2:
            out.mkdir()
            (out / "file").write_text("theirs")
        check_free(path)

    monkeypatch.setattr(whole, "check_free", check)
    with pytest.raises(InputError, match="exists already"), whole_folder(out):
        pass
    assert (out / "file").read_text() == "theirs"


def test_empty_folders_that_cannot_be_replaced(tmp_path, monkeypatch):
    """Found before any work is done, not after."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    for out in (tmp_path / "link", tmp_path / "empty", "."):
        with (
            pytest.raises(InputError, match="cannot be replaced: give a new folder"),
            whole_folder(out),
        ):
            pass
    monkeypatch.chdir(tmp_path)
    with whole_folder(tmp_path / "empty") as scratch:
        (scratch / "file").write_text("x")
    assert (tmp_path / "link/file").read_text() == "x"


def test_a_full_disk(tmp_path):
    def fill():
        with whole_folder(tmp_path / "out"):
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"out could not be written: .*No space left"):
        fill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gs://bucket/out", Path("gs://bucket/out")])
def test_a_bucket_is_no_folder(name):
    with pytest.raises(InputError, match="is in a bucket"), whole_folder(name):
        pass


def test_a_new_folder_in_a_bucket(bucket):
    with new_folder("gs://models/new") as scratch:
        (scratch / "file").write_text("x")
    assert (bucket / "models/new/file").read_text() == "x"
    with (
        pytest.raises(InputError, match="exists already"),
        new_folder("gs://models/new"),
    ):
        pass


def test_a_lock_is_given_back(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            pass
