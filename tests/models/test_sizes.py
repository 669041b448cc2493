"""Exact numbers of parameters, and their names."""

import jax
import numpy as np
import pytest

from bert_jax.convert.hf import flatten
from bert_jax.models.arch import Arch
from bert_jax.models.model import count_params, param_shapes
from bert_jax.presets import PRESETS, preset

# name: encoder and pooler, BertForMaskedLM, BertForPreTraining
TABLE = {
    "bert-tiny": (4_385_920, 4_416_698, 4_433_468),
    "bert-mini": (11_170_560, 11_201_594, 11_267_900),
    "bert-small": (28_763_648, 28_795_194, 29_058_876),
    "bert-medium": (41_373_184, 41_404_730, 41_668_412),
    "bert-base-uncased": (109_482_240, 109_514_298, 110_106_428),
    "bert-large-uncased": (335_141_888, 335_174_458, 336_226_108),
    "bert-base-cased": (108_310_272, 108_340_804, 108_932_934),
    "bert-large-cased": (333_579_264, 333_610_308, 334_661_958),
    "bert-base-chinese": (102_267_648, 102_290_312, 102_882_442),
    "bert-large-chinese": (325_522_432, 325_545_608, 326_597_258),
    "bert-base-multilingual-cased": (177_853_440, 177_974_523, 178_566_653),
    "bert-base-multilingual-uncased": (167_356_416, 167_463_831, 168_055_961),
}
COLUMNS = (("pooler",), ("lm",), ("lm", "pooler", "nsp"))
MINIATURES = [(L, H) for L in (2, 4, 6, 8, 10, 12) for H in (128, 256, 512, 768)]


def columns(arch: Arch) -> tuple[int, ...]:
    arch = arch.but(stack="scan")  # quicker to trace, the same shapes: tested below
    return tuple(count_params(arch, heads=heads) for heads in COLUMNS)


@pytest.mark.parametrize("name", TABLE)
def test_counts(name: str):
    assert columns(preset(name).arch) == TABLE[name]


@pytest.mark.parametrize(("layers", "width"), MINIATURES)
def test_miniatures(layers: int, width: int):
    L, H, V, P, T, F = layers, width, 30522, 512, 2, 4 * width
    body = V * H + P * H + T * H + 2 * H
    body += L * (4 * (H * H + H) + 2 * H + 2 * H * F + F + H + 2 * H)
    pooler, lm, nsp = H * H + H, H * H + H + 2 * H + V, 2 * H + 2
    arch = preset(f"bert_uncased_L-{L}_H-{H}_A-{H // 64}").arch
    assert (arch.layers, arch.width, arch.heads) == (L, H, H // 64)
    assert columns(arch) == (body + pooler, body + lm, body + lm + pooler + nsp)


def test_every_preset_is_counted_here():
    named = {f"bert_uncased_L-{L}_H-{H}_A-{H // 64}" for L, H in MINIATURES}
    assert set(PRESETS) == set(TABLE) | named


@pytest.mark.parametrize("multiple", [1, 8, 128, 1000])
def test_surplus_rows_are_not_counted(multiple: int):
    arch = preset("bert-tiny").arch.but(vocab_multiple=multiple)
    assert columns(arch) == TABLE["bert-tiny"]
    shapes = param_shapes(arch, heads=("lm",))
    rows = -(-30522 // multiple) * multiple
    assert shapes["embed"]["token"].shape == (rows, 128)
    assert shapes["lm"]["bias"].shape == (rows,)


def test_how_it_is_run_changes_no_shape():
    arch = preset("bert-mini").arch
    plain = param_shapes(arch, heads=COLUMNS[-1])
    for change in (dict(stack="scan"), dict(stack="scan:2"), dict(remat="full")):
        assert param_shapes(arch.but(**change), heads=COLUMNS[-1]) == plain


NAMES = """
embed/norm/bias (128,)
embed/norm/scale (128,)
embed/position (512, 128)
embed/token (30592, 128)
embed/type (2, 128)
lm/bias (30592,)
lm/dense/bias (128,)
lm/dense/kernel (128, 128)
lm/norm/bias (128,)
lm/norm/scale (128,)
nsp/dense/bias (2,)
nsp/dense/kernel (128, 2)
pooler/dense/bias (128,)
pooler/dense/kernel (128, 128)
stack/layers/attention/k/bias (2, 128)
stack/layers/attention/k/kernel (2, 128, 128)
stack/layers/attention/o/bias (2, 128)
stack/layers/attention/o/kernel (2, 128, 128)
stack/layers/attention/q/bias (2, 128)
stack/layers/attention/q/kernel (2, 128, 128)
stack/layers/attention/v/bias (2, 128)
stack/layers/attention/v/kernel (2, 128, 128)
stack/layers/attention_norm/bias (2, 128)
stack/layers/attention_norm/scale (2, 128)
stack/layers/ffn/inner/bias (2, 512)
stack/layers/ffn/inner/kernel (2, 128, 512)
stack/layers/ffn/outer/bias (2, 128)
stack/layers/ffn/outer/kernel (2, 512, 128)
stack/layers/ffn_norm/bias (2, 128)
stack/layers/ffn_norm/scale (2, 128)
"""


def test_names():
    """Checkpoints hold these names: whoever changes one breaks the old ones."""
    shapes = flatten(param_shapes(preset("bert-tiny").arch, heads=COLUMNS[-1]))
    listed = [f"{name} {shapes[name].shape}" for name in sorted(shapes)]
    assert listed == NAMES.strip().splitlines()
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype("float32")}
