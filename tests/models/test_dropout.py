"""Dropout bits: as many as asked, independent, and the same however they are split.

Each statistic of a right program lies outside its bound once in 10^5 draws (4.4
standard deviations); the keys are fixed, so that in fact it does never or always.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.models.dropout import Noise, dropout
from tests.reference import collectives_in, shardings

SHAPE = (8, 64, 96)
BOUND = 4.4
CONFIDENCE = 1e-5


def noise(step: int = 0, rows=None) -> Noise:
    rows = jnp.arange(SHAPE[0]) if rows is None else jnp.asarray(rows)
    key = jax.random.fold_in(jax.random.key(0), step)
    return Noise.of(key, rows)


@partial(jax.jit, static_argnames=("rate", "shape"))
def draw(given: Noise, *, rate: float = 0.5, shape=SHAPE):
    return dropout(jnp.ones(shape), rate=rate, noise=given)


def kept(given: Noise, **options) -> np.ndarray:
    return np.asarray(draw(given, **options)) > 0


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_rate_and_scale(rate: float):
    values = np.asarray(draw(noise(), rate=rate))
    assert np.unique(values).tolist() == [0.0, np.float32(1 / (1 - rate))]
    n, dropped = values.size, (values == 0).sum()
    assert abs(dropped - n * rate) < BOUND * (n * rate * (1 - rate)) ** 0.5
    # The mean is kept: its standard deviation is √(rate / (1 - rate) / n).
    assert abs(values.mean() - 1) < BOUND * (rate / (1 - rate) / n) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rate_in_every_line(rate: float, axis: int):
    """Of every row, position and column; 100 bounds at once, so a wider one."""
    bits = kept(noise(), rate=rate)
    others = tuple(a for a in range(3) if a != axis)
    n = bits.size // bits.shape[axis]
    z = (bits.sum(others) - n * (1 - rate)) / (n * rate * (1 - rate)) ** 0.5
    assert np.abs(z).max() < 5.5
    assert stats.kstest(z, "norm").pvalue > CONFIDENCE


def independent(a: np.ndarray, b: np.ndarray) -> None:
    """The four kinds of pairs come as often as they should."""
    table = [[(x & y).sum() for y in (b, ~b)] for x in (a, ~a)]
    assert stats.chi2_contingency(table, correction=False).pvalue > CONFIDENCE
    correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
    assert abs(correlation) < BOUND / a.size**0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("axis", [1, 2])
def test_neighbours_are_independent(rate: float, apart: int, axis: int):
    bits = np.moveaxis(kept(noise(), rate=rate), axis, 0)
    independent(bits[apart:], bits[:-apart])


def test_rows_are_independent():
    bits = kept(noise())
    for a in range(8):
        for b in range(a):
            independent(bits[a], bits[b])


def test_rows_far_apart_are_independent():
    """A running number over all rows would come round again: 1024 x 2^22 = 2^32."""
    bits = kept(noise(rows=[0, 1024]), shape=(2, 16, 512, 512))
    independent(bits[0], bits[1])


def test_layers_and_places_are_independent():
    """Every site of four layers, the embedding's, and the unplaced noise itself."""
    sites = [noise().at(layer).at(place) for layer in range(4) for place in range(3)]
    sites += [noise().at(layer) for layer in range(5)] + [noise()]
    bits = [kept(site) for site in sites]
    for a in range(len(bits)):
        for b in range(a):
            independent(bits[a], bits[b])


def test_steps_are_independent():
    bits = [kept(noise(step)) for step in range(6)]
    for a in range(6):
        for b in range(a):
            independent(bits[a], bits[b])


def test_same_key_same_bits():
    np.testing.assert_array_equal(kept(noise(3)), kept(noise(3)))
    assert (kept(noise(3)) != kept(noise(4))).any()


def test_rows_by_number():
    """Rows 4 to 8 alone draw what they draw within the batch, in any order."""
    whole = kept(noise())
    shape = (4, *SHAPE[1:])
    np.testing.assert_array_equal(kept(noise(rows=range(4, 8)), shape=shape), whole[4:])
    np.testing.assert_array_equal(
        kept(noise(rows=[6, 1, 0, 3]), shape=shape), whole[[6, 1, 0, 3]]
    )


def test_off_without_noise_or_rate():
    x = jnp.arange(6.0).reshape(2, 3)
    assert dropout(x, rate=0.5, noise=None) is x
    assert dropout(x, rate=0.0, noise=noise(rows=[0, 1])) is x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_type_is_kept(dtype):
    x = jnp.ones(SHAPE, dtype)
    y = dropout(x, rate=0.1, noise=noise())
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y) != 0, kept(noise(), rate=0.1))


def test_gradient_is_dropped_where_the_value_is():
    x = jax.random.normal(jax.random.key(1), (8, 50))
    grad = jax.grad(lambda x: dropout(x, rate=0.3, noise=noise()).sum())(x)
    np.testing.assert_allclose(grad * x, dropout(x, rate=0.3, noise=noise()), rtol=1e-6)
    assert 0 < (grad == 0).mean() < 1


def test_eight_devices_draw_what_one_draws():
    _, split = shardings()
    x = jax.random.normal(jax.random.key(1), SHAPE)
    run = jax.jit(partial(dropout, rate=0.3))
    given = noise()
    placed = given.replace(rows=jax.device_put(given.rows, split))
    x_placed = jax.device_put(x, split)
    compiled = run.lower(x_placed, noise=placed).compile()
    text = compiled.as_text()
    assert "num_partitions=8" in text
    assert not collectives_in(text)
    for generator in ("rng", "threefry", "philox"):
        assert generator not in text.lower()
    # No array of the whole batch on any device.
    assert "[8,64,96]" not in text
    assert "[1,64,96]" in text
    np.testing.assert_array_equal(
        compiled(x_placed, noise=placed), dropout(x, rate=0.3, noise=given)
    )
