"""Exact numbers of parameters, and their names."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.convert.engine import flatten
from bert_jax.convert.tables import LAYOUTS
from bert_jax.models.arch import Arch
from bert_jax.models.heads import HEADS
from bert_jax.models.model import count_params, param_shapes
from bert_jax.presets import PRESETS, preset
from tests.conftest import ROOT

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
GOLDEN = Path(__file__).parent / "trees"
SMALL = ("models", "convert")  # parts of the package that have to stay so
COLUMNS = (("pooler",), ("lm",), ("lm", "pooler", "nsp"))
# The rest of the family: what is counted, and how many.
POOLED, LM, PAIRS = ("pooler",), ("lm",), ("lm", "pooler", "sop")
FAMILY = {
    ("roberta-base", POOLED): 124_645_632,
    ("roberta-base", LM): 124_697_433,
    ("roberta-large", POOLED): 355_359_744,
    ("roberta-large", LM): 355_412_057,
    ("distilroberta-base", POOLED): 82_118_400,
    ("xlm-roberta-base", POOLED): 278_043_648,
    ("xlm-roberta-large", POOLED): 559_890_432,
    ("albert-base-v1", POOLED): 11_683_584,
    ("albert-base-v2", PAIRS): 11_813_810,
    ("albert-large-v1", POOLED): 17_683_968,
    ("albert-large-v2", PAIRS): 17_847_474,
    ("albert-xlarge-v1", POOLED): 58_724_864,
    ("albert-xlarge-v2", PAIRS): 59_021_490,
    ("albert-xxlarge-v1", POOLED): 222_595_584,
    ("albert-xxlarge-v2", PAIRS): 223_158_450,
    ("electra-small-discriminator", ()): 13_483_008,
    ("electra-small-discriminator", ("rtd",)): 13_549_057,
    ("electra-base-discriminator", ()): 108_891_648,
    ("electra-base-discriminator", ("rtd",)): 109_483_009,
    ("electra-large-discriminator", ()): 334_092_288,
    ("electra-large-discriminator", ("rtd",)): 335_142_913,
    ("electra-small-generator", LM): 13_546_682,
    ("electra-base-generator", LM): 33_740_602,
    ("electra-large-generator", LM): 51_295_290,
    ("xlnet-base-cased", ()): 116_718_336,
    ("xlnet-base-cased", LM): 116_750_336,
    ("xlnet-large-cased", ()): 360_268_800,
    ("xlnet-large-cased", LM): 360_300_800,
    ("openai-gpt", LM): 116_534_784,
    ("gpt2", LM): 124_439_808,
    ("gpt2-medium", LM): 354_823_168,
    ("gpt2-large", LM): 774_030_080,
    ("gpt2-xl", LM): 1_557_611_200,
    ("distilbert-base-uncased", ()): 66_362_880,
    ("distilbert-base-uncased", LM): 66_985_530,
    ("TinyBERT_General_4L_312D", POOLED): 14_350_248,
    ("TinyBERT_General_6L_768D", POOLED): 66_955_008,
    ("nezha-cn-base", POOLED): 101_874_432,
    ("nezha-cn-large", POOLED): 324_998_144,
    ("longformer-base-4096", POOLED): 148_659_456,
    ("longformer-large-4096", POOLED): 434_600_960,
    ("ernie-1.0-base-zh", POOLED): 99_866_112,
    ("ernie-2.0-base-en", POOLED): 109_496_064,
    ("spanbert-base-cased", POOLED): 108_310_272,
    ("spanbert-large-cased", POOLED): 333_579_264,
    ("chinese-bert-wwm", POOLED): 102_267_648,
    ("chinese-bert-wwm-ext", POOLED): 102_267_648,
    ("chinese-roberta-wwm-ext", POOLED): 102_267_648,
    ("chinese-roberta-wwm-ext-large", POOLED): 325_522_432,
    ("chinese-macbert-base", POOLED): 102_267_648,
    ("chinese-macbert-large", POOLED): 325_522_432,
    ("unilm-base-cased", POOLED): 108_310_272 + 4 * 768,
    ("unilm-large-cased", POOLED): 333_579_264 + 4 * 1024,
    # Without the adaptive softmax: counted by transformers 4.57 (tests/goldens).
    ("transfo-xl-wt103", ()): 519_730_176,
    ("transfo-xl-wt103", LM): 519_997_911,
}
# Sizes that no table lists: counted by hand from the shapes, as in test_miniatures.
BERT_SHAPED = {  # layers, width, inner, vocabulary, positions, types, tasks
    "MiniLM-L12-H384-uncased": (12, 384, 1536, 30522, 512, 2, 0),
    "MiniLM-L6-H384-uncased": (6, 384, 1536, 30522, 512, 2, 0),
    "ernie-2.0-large-en": (24, 1024, 4096, 30522, 512, 4, 16),
    "ernie-3.0-base-zh": (12, 768, 3072, 40000, 2048, 4, 3),
    "ernie-3.0-medium-zh": (6, 768, 3072, 40000, 2048, 4, 3),
    "ernie-3.0-mini-zh": (6, 384, 1536, 40000, 2048, 4, 3),
    "ernie-3.0-micro-zh": (4, 384, 1536, 40000, 2048, 4, 3),
    "ernie-3.0-nano-zh": (4, 312, 1248, 40000, 2048, 4, 3),
    "nezha-en-base": (12, 768, 3072, 30522, 0, 2, 0),
    "nezha-en-large": (24, 1024, 4096, 30522, 0, 2, 0),
    "distilbert-base-cased": (6, 768, 3072, 28996, 512, 0, 0),
    "distilbert-base-multilingual-cased": (6, 768, 3072, 119547, 512, 0, 0),
}
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


@pytest.mark.parametrize(("name", "heads"), FAMILY)
def test_family(name: str, heads: tuple[str, ...]):
    assert count_params(preset(name).arch, heads=heads) == FAMILY[name, heads]


@pytest.mark.parametrize("name", BERT_SHAPED)
def test_bert_shaped(name: str):
    L, H, F, V, P, T, J = BERT_SHAPED[name]
    body = (V + P + T + J) * H + 2 * H
    body += L * (4 * (H * H + H) + 2 * H + 2 * H * F + F + H + 2 * H)
    assert count_params(preset(name).arch, heads=("pooler",)) == body + H * H + H


def test_transformer_xl_base():
    """16 layers of 410, 10 heads, 2100 inside; no biases but those of the FFN."""
    L, H, F, V = 16, 410, 2100, 267735
    layer = 5 * H * H + 2 * H * F + F + H + 2 * 2 * H
    arch = preset("transfo-xl-wt103-base").arch
    biases = 2 * H  # u and v, one of each for all layers
    assert count_params(arch, heads=()) == V * H + L * layer + biases


def test_albert_ablations():
    """The paper's: all shared with wide tables, and narrow tables with none shared."""
    albert = preset("albert-base-v1").arch
    wide, apart = albert.but(embed_width=0), albert.but(share="none")
    assert count_params(wide, heads=POOLED) == 31_114_752
    assert count_params(apart, heads=POOLED) == 89_650_176


def test_the_family_stays_small():
    """More lines than this, and an axis is cut wrongly. The kernels of flash attention
    are none: they compute what `attention.py` says."""
    files = [path for part in SMALL for path in (ROOT / "bert_jax" / part).glob("*.py")]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    kernels = ("flash.py", "flash_layout.py", "products.py", "relative.py")
    assert sum(lines.values()) - sum(lines[name] for name in kernels) < 3750


def test_every_preset_is_counted_here():
    named = {f"bert_uncased_L-{L}_H-{H}_A-{H // 64}" for L, H in MINIATURES}
    named |= {name for name, _ in FAMILY} | set(BERT_SHAPED) | set(TABLE)
    named |= {"transfo-xl-wt103-base"}
    listed = {path.stem for path in GOLDEN.glob("*.txt")}  # every shape, by name
    assert set(PRESETS) == named | (listed & set(PRESETS))


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


def tree(name: str) -> str:
    """Every parameter of a member, with all heads its class has, and its shape."""
    member = preset(name)
    heads = {head for heads in LAYOUTS[member.layout].classes for head in heads}
    shapes = flatten(
        param_shapes(member.arch, heads=tuple(h for h in HEADS if h in heads))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype("float32")}
    return "".join(f"{path} {shapes[path].shape}\n" for path in sorted(shapes))


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_names(name: str):
    """Checkpoints hold these names: whoever changes one breaks the old ones.

    A new member's: python -m tests.models.test_sizes NAME
    """
    assert tree(name) == (GOLDEN / f"{name}.txt").read_text()


def test_every_kind_of_tree_is_stored():
    """Presets of one layout whose trees have the same names need one file."""

    def names(text: str) -> list[str]:
        return [line.split(" ")[0] for line in text.splitlines()]

    stored = [names(path.read_text()) for path in GOLDEN.glob("*.txt")]
    missing = [name for name in PRESETS if names(tree(name)) not in stored]
    assert not missing


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (GOLDEN / f"{name}.txt").write_text(tree(name))
