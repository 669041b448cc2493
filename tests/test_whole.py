"""Folders that are there whole or not at all."""

import pytest

from bert_jax.errors import InputError
from bert_jax.whole import locked, whole_folder


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


def test_a_lock_is_given_back(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            pass
