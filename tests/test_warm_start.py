"""What a run takes over from another model; the whole road is in test_train.py."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.convert.engine import flatten
from bert_jax.errors import InputError
from bert_jax.model_dir import LoadedModel
from bert_jax.models.model import param_shapes
from bert_jax.presets import preset
from bert_jax.warm_start import stretched, warm_start
from tests.convert.test_members import make_params, make_tokenizer
from tests.models.made import TINY, probe


class Source(LoadedModel):
    """A model in memory."""

    tokenizer = make_tokenizer(TINY.vocab_size)


def source_of(arch) -> LoadedModel:
    member = dataclasses.replace(preset("roberta-base"), arch=arch)
    return Source(Path("there"), member, make_params(arch, heads=("lm",)), Path("."))


def started(arch, source: LoadedModel) -> tuple[dict, dict, list[str]]:
    """Fresh and started parameters, by name, and the report."""
    shapes = param_shapes(arch, heads=("lm",))
    fresh = jax.tree.map(lambda leaf: np.full(leaf.shape, 7.0, np.float32), shapes)
    params, report = warm_start(
        fresh, arch=arch, tokenizer=source.tokenizer, source=source
    )
    return flatten(fresh), flatten(params), report


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_positions_follow_the_id_of_padding(offset: int):
    """RoBERTa counts from 2; a vocabulary whose padding is another piece does not."""
    theirs = TINY.but(position_offset=2, max_positions=42)
    source = source_of(theirs)
    arch = theirs.but(position_offset=offset, max_positions=40 + offset)
    _, params, report = started(arch, source)
    table, trained = params["embed/position"], source.params["embed"]["position"]
    np.testing.assert_array_equal(table[offset:], trained[2:])
    if offset == 2:
        np.testing.assert_array_equal(table, trained)
    assert not any("stretched" in line for line in report)


def test_positions_of_another_width():
    source = source_of(TINY.but(position_offset=2))
    with pytest.raises(InputError, match=r"embed/position has shape \(40, 24\), here"):
        started(TINY.but(width=20, position_offset=1), source)


# A longer table of learned positions.


def test_longformer_stretches_robertas_table():
    """512 rows eight times, after the first two."""
    short = probe((514, 3))
    long = stretched(short, 4098, offset=2)
    assert long.shape == (4098, 3)
    np.testing.assert_array_equal(long[:2], short[:2])
    for copy in range(8):
        start = 2 + 512 * copy
        np.testing.assert_array_equal(long[start : start + 512], short[2:])


@pytest.mark.parametrize(("rows", "offset"), [(11, 0), (17, 0), (12, 1), (5, 0)])
def test_stretched(rows: int, offset: int):
    short = probe((5, 2))
    long = stretched(short, rows, offset=offset)
    assert long.shape == (rows, 2)
    for n in range(rows):
        source = n if n < offset else offset + (n - offset) % (5 - offset)
        np.testing.assert_array_equal(long[n], short[source])


def test_a_table_is_not_cut():
    with pytest.raises(InputError, match="514 positions cannot be stretched to 512"):
        stretched(probe((514, 3)), 512, offset=2)
