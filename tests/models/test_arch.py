"""The page of choices: what is refused and why, what is derived, how it starts."""

import dataclasses
import inspect
import re
from functools import partial

import jax
import numpy as np
import pytest

from bert_jax.convert.engine import flatten
from bert_jax.errors import InputError
from bert_jax.models.arch import CHOICES, SIZES, Arch
from bert_jax.models.model import Model, init_params
from tests.models.made import TINY, XLNET, quick_jit

# One word for each field that none of them knows, near to one of its own.
WRONG = "lerned"


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_words(name: str):
    with pytest.raises(InputError) as caught:
        Arch(**{name: WRONG})
    text = str(caught.value)
    assert f"unknown arch.{name} '{WRONG}'" in text
    assert text.endswith(f"Valid: {', '.join(sorted(CHOICES[name]))}")


def test_every_word_is_a_choice():
    words = {f.name for f in dataclasses.fields(Arch) if f.type is str}
    assert words == {*CHOICES, "stack"}
    for name, choices in CHOICES.items():
        assert getattr(Arch(), name) in choices


def test_the_nearest_word_is_named():
    with pytest.raises(InputError, match="Did you mean learned"):
        Arch(position=WRONG)


@pytest.mark.parametrize("name", SIZES)
def test_least_sizes(name: str):
    least = SIZES[name]
    with pytest.raises(InputError, match=rf"arch.{name}={least - 1} must be .*{least}"):
        Arch(**{name: least - 1})


def test_every_size_has_a_least():
    sizes = {f.name for f in dataclasses.fields(Arch) if f.type is int}
    assert sizes == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_a_slip(name: str):
    with pytest.raises(InputError, match=rf"arch.{name}=1000+ must be from"):
        Arch(**{name: 10**12})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["norm_eps", "init_std"])
def test_small_numbers(name: str, value: float):
    with pytest.raises(InputError, match=rf"arch.{name}={value}: a small number > 0"):
        Arch(**{name: value})


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_rates(name: str, rate: float):
    with pytest.raises(InputError, match=rf"arch.{name}={rate} must be in \[0, 1\)"):
        Arch(**{name: rate})


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", "768"), ("width", 768.0), ("layers", True), ("share", 1)],
)
def test_types(name: str, value):
    with pytest.raises(InputError, match=rf"arch.{name}={value!r} is not of type"):
        Arch(**{name: value})


# Two fields, each right by itself: (the two, changes).
CLASHES = [
    (("width", "heads"), dict(width=100, heads=12)),
    (("max_positions", "position_offset"), dict(max_positions=2, position_offset=2)),
    (("layers", "group_layers"), dict(share="all", layers=12, group_layers=5)),
    (("groups", "layers"), dict(share="all", groups=13)),
    (("groups", "layers"), dict(share="all", groups=7, group_layers=2)),
    (("groups", "share"), dict(groups=2)),
    (("groups", "share"), dict(group_layers=2)),
    (("streams", "position"), dict(streams=2)),
    (("streams", "position"), dict(streams=3, position="xl")),
    (("type_scheme", "position"), dict(type_scheme="relative")),
    (("attention", "position"), dict(attention="window", position="xl")),
    (
        ("attention", "position"),
        dict(attention="window", position="functional", max_distance=3),
    ),
    (
        ("attention", "position"),
        dict(attention="flash", position="functional", max_distance=3),
    ),
    (("window", "attention"), dict(attention="window", window=7)),
    (("max_distance", "position"), dict(position="functional")),
    (
        ("heads", "position"),
        dict(position="functional", max_distance=3, width=33, heads=3),
    ),
    (("width", "position"), dict(position="xl", width=33, heads=3)),
    (("lm_head", "embed_width"), dict(lm_head="bare", embed_width=128)),
    (("lm_head", "embed_width"), dict(lm_head="bias", embed_width=128)),
    (("stack", "layers"), dict(stack="scan:5")),
    (("stack", "layers"), dict(stack="scan:24")),
]


@pytest.mark.parametrize(("pair", "changes"), CLASHES)
def test_clashes(pair: tuple[str, str], changes: dict):
    with pytest.raises(InputError) as caught:
        Arch(**changes)
    lines = str(caught.value).splitlines()
    values = [f"arch.{name}={(Arch.__dict__ | changes)[name]!r}" for name in pair]
    assert any(all(value in line for value in values) for line in lines), lines


def test_every_clash_is_tried():
    """The pairs that the code names are the pairs above."""
    source = inspect.getsource(Arch.clashes)
    named = set(re.findall(r'\("(\w+)", "(\w+)"\)', source))
    assert named == {pair for pair, _ in CLASHES} - {("stack", "layers")}


@pytest.mark.parametrize(
    "changes",
    [
        dict(width=33, heads=3),
        dict(share="all", groups=6, group_layers=2),
        dict(window=7),
        dict(lm_head="bare", embed_width=768),
        dict(position="functional", max_distance=1),
        XLNET,
        dict(stack="scan:4"),
    ],
)
def test_what_is_right(changes: dict):
    arch = Arch().but(**changes)
    assert all(getattr(arch, name) == value for name, value in changes.items())


def test_all_problems_at_once():
    with pytest.raises(InputError) as caught:
        Arch(width=0, dropout=2.0, share="some", order="up")
    assert len(str(caught.value).splitlines()) == 4
    with pytest.raises(InputError) as caught:
        Arch(width=100, streams=2, stack="scan:5")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "stack", ["scan:", "scan:x", "scan:0", "scan:-1", "scan:²", "loop:2", "loop:", ""]
)
def test_unknown_stacks(stack: str):
    with pytest.raises(InputError, match="must be loop, scan or scan:k"):
        Arch(stack=stack)


def test_trips():
    found = [Arch(stack=stack).trip for stack in ("loop", "scan", "scan:1", "scan:6")]
    assert found == [1, 1, 1, 6]


def test_derived():
    assert Arch().table_width == 768
    assert Arch(embed_width=128).table_width == 128
    assert Arch().padded_vocab == 30592
    assert Arch(vocab_multiple=1).padded_vocab == 30522
    assert Arch(max_positions=514, position_offset=2).max_length == 512
    assert Arch(position="xl").max_length is None
    assert Arch(position="functional", max_distance=64).max_length is None
    assert Arch(width=96, heads=3).head_size == 32


# Which stored copy each layer uses.


def copies(**changes) -> dict[str, list[int]]:
    arch = Arch(**changes)
    return {part: arch.copies(part) for part in ("attention", "ffn")}


def test_copies_of_nothing_shared():
    own = [0, 1, 2, 3]
    assert copies(layers=4) == dict(attention=own, ffn=own)


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "expected"),
    [
        (4, 1, 1, [0, 0, 0, 0]),
        (4, 2, 1, [0, 0, 1, 1]),
        (6, 3, 1, [0, 0, 1, 1, 2, 2]),
        (6, 4, 1, [0, 0, 1, 2, 2, 3]),
        (4, 4, 1, [0, 1, 2, 3]),
        (6, 1, 2, [0, 1, 0, 1, 0, 1]),
        (8, 2, 2, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_copies(layers: int, groups: int, inner: int, expected: list[int]):
    """Application l of L is of group ⌊l / (L / G)⌋ and runs `inner` layers."""
    sizes = dict(layers=layers, groups=groups, group_layers=inner)
    own = list(range(layers))
    assert copies(**sizes, share="all") == dict(attention=expected, ffn=expected)
    assert copies(**sizes, share="attention") == dict(attention=expected, ffn=own)
    assert copies(**sizes, share="ffn") == dict(attention=own, ffn=expected)


def test_uneven_groups_are_rounded_as_in_transformers():
    """AlbertTransformer's own words, in floating point: 9 / (18 / 14) is below 7."""
    for layers in range(1, 40):
        for groups in range(1, layers + 1):
            theirs = [int(n / (layers / groups)) for n in range(layers)]
            arch = Arch(share="all", layers=layers, groups=groups)
            assert arch.copies("ffn") == theirs
    assert Arch(share="all", layers=18, groups=14).copies("ffn")[9] == 6 < 9 * 14 / 18


@pytest.mark.parametrize("share", ["all", "attention", "ffn"])
def test_a_part_is_shared_with_its_norm(share: str):
    arch = Arch(**XLNET | dict(streams=1), layers=4, share=share)
    for part in ("attention_norm", "position", "types"):
        assert arch.copies(part) == arch.copies("attention")
    assert arch.copies("ffn_norm") == arch.copies("ffn")


def test_biases_shared_by_all_layers():
    arch = Arch(position="xl", position_biases="shared", layers=3)
    assert arch.copies("position") == [0, 0, 0]
    assert arch.copies("attention") == arch.copies("types") == [0, 1, 2]


# Where parameters start.

CUT = 0.8796  # the standard deviation of a normal cut at two of its own
KURTOSIS = 2.37  # of the same


def starts(**changes) -> dict[str, np.ndarray]:
    arch = TINY.but(width=48, inner=96, layers=6, vocab_size=300, **changes)
    draw = quick_jit(partial(init_params, Model(arch), heads=("lm", "pooler")))
    return flatten(jax.device_get(draw(jax.random.key(0))))


def assert_std(leaf: np.ndarray, expected: float) -> None:
    """Within 4.4 standard deviations of the estimate: once in 10^5."""
    error = ((KURTOSIS - 1) / 4 / leaf.size) ** 0.5
    assert abs(leaf.std() / expected - 1) < 4.4 * error
    assert np.abs(leaf).max() <= 2 * expected / CUT * (1 + 1e-6)
    assert abs(leaf.mean()) < 4.4 * expected / leaf.size**0.5


INTO_THE_SUM = ("stack/layers/attention/o/kernel", "stack/layers/ffn/outer/kernel")


@pytest.mark.parametrize("residual_init", ["same", "depth"])
def test_initial_values(residual_init: str):
    """GPT-2: what is added to the residual sum starts √2N smaller, nothing else."""
    params = starts(residual_init=residual_init, norm_place="pre", stack="scan")
    std = 0.02 * CUT
    for name, leaf in params.items():
        if name == "embed/token":
            np.testing.assert_array_equal(leaf[300:], 0.0)
            assert_std(leaf[:300], std)
        elif name.endswith("bias"):
            np.testing.assert_array_equal(leaf, 0.0)
        elif name.endswith("scale"):
            np.testing.assert_array_equal(leaf, 1.0)
        elif name in INTO_THE_SUM and residual_init == "depth":
            assert_std(leaf, std / 12**0.5)  # N = 6
        else:
            assert_std(leaf, std)
    assert set(INTO_THE_SUM) < set(params)


def test_layers_start_apart():
    """Every layer, and every map in it, is drawn by itself."""
    params = starts(stack="scan", **XLNET)
    drawn = [
        leaf[n].ravel()[:1000]
        for name, leaf in params.items()
        if name.startswith("stack/layers") and leaf.std() > 0
        for n in range(6)
    ]
    assert len(drawn) == 6 * (5 + 2 + 4)  # q k v o r; inner outer; u v s t
    for a in range(len(drawn)):
        for b in range(a):
            n = min(len(drawn[a]), len(drawn[b]))
            assert not np.array_equal(drawn[a][:n], drawn[b][:n])
