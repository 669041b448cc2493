"""Replaced-token detection: a small generator fills blanks, the model finds where.

    L = MLM(generator)  +  λ · Σ_i BCE(was x_i replaced?) / (number of tokens)

The generator is a second tower on the same embedding tables. It predicts 15 % of the
tokens, 85 % of which it sees as [MASK], the rest as they are. A piece drawn from its
softmax is put in the place of each, in text that is otherwise clean, and the model says
of every token, special ones too, whether it was replaced; a piece that was guessed
right was not. No gradient goes through the draw (ELECTRA, Clark et al. 2020,
arXiv:2003.10555).

Both towers learn together, or in two stages (section 3.2 there): first the generator
alone, then the model, which begins with the weights of a generator of its own size, and
whose generator stays as it is (configs/electra_two_stage.py). A run that begins with
the second takes the model of config.init as it is.

Differs from the release in: positions are chosen without replacement. From the paper's
two stages in: the tables stay shared, so the recipe's second stage leaves them as they
are; moved for the model, they would undo what the generator has learned.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.objectives.base import Batch, Mean, Net, Objective, Terms, tokens_of
from bert_jax.objectives.losses import binary_cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.placing import on_tpu

PHASES = ("joint", "generator", "discriminator")
BLOCKS = 128  # of pieces, at most


@dataclasses.dataclass(frozen=True)
class ReplacedToken(Objective):
    name = "replaced_token"
    heads = ("rtd", "generator/lm")

    # From the tokenizer.
    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]  # never predicted
    # Hyper-parameters.
    rate: float = 0.15  # share of the tokens that the generator predicts
    hide: float = 0.85  # share of these it sees as [MASK]
    weight: float = 50.0  # λ
    generator: float = 0.25  # its width, as a share of the model's
    generator_layers: float = 1.0  # its layers, likewise
    phase: str = "joint"  # joint | generator | discriminator: which of them learns

    def __post_init__(self):
        problems = [
            f"objective.{name}={getattr(self, name)} must be more than 0, and at most 1"
            for name in ("generator", "generator_layers")
            if not 0 < getattr(self, name) <= 1
        ]
        if self.weight < 0:
            problems.append(f"objective.weight={self.weight} is negative")
        if self.phase not in PHASES:
            problems.append(unknown("objective.phase", self.phase, PHASES))
        try:
            _ = self.masked
        except InputError as error:
            problems.append(str(error))
        if problems:
            raise InputError("\n".join(problems))

    @property
    def masked(self) -> MaskedLM:
        """What the generator learns."""
        return MaskedLM(
            vocab_size=self.vocab_size,
            mask_id=self.mask_id,
            special_ids=self.special_ids,
            rate=self.rate,
            hide=self.hide,
            randomise=0.0,
            next_sentence=0.0,
        )

    @property
    def weights(self) -> dict[str, float]:
        both = {"replaced_token_loss": self.weight, **self.masked.weights}
        learns = {"joint": both, "generator": self.masked.weights}
        return learns.get(self.phase, {"replaced_token_loss": self.weight})

    def problems(self, arch: Arch, rows: str) -> list[str]:
        if arch.lm_head != "transform" and self.generator != 1:
            return [
                "replaced_token: the generator has another width than "
                "the table it shares with the model, which needs "
                f"config.arch.lm_head=transform instead of {arch.lm_head}, or "
                "config.objective.generator=1"
            ]
        (_, its), *_ = self.towers(arch)
        if self.phase != "discriminator" or its == arch:
            return []
        return [
            "config.objective.phase=discriminator begins with the generator's weights: "
            f"it must be as large as the model (width {its.width} and {its.layers} "
            f"layers instead of {arch.width} and {arch.layers}): "
            "config.objective.generator=1, config.objective.generator_layers=1"
        ]

    def begin(self, params: dict) -> dict:
        if self.phase != "discriminator":
            return params
        own = {
            part: params["generator"][part]
            for part in ("stack", "project")
            if part in params["generator"]
        }
        return params | jax.tree.map(jnp.copy, own)

    def towers(self, arch: Arch) -> tuple[tuple[str, Arch], ...]:
        """Heads of 64 and an inner width of four times the width, as in the release; as
        wide as the model, it has the model's."""
        layers = max(1, round(arch.layers * self.generator_layers))
        if self.generator == 1:
            return (("generator", arch.but(layers=layers)),)
        width = max(1, round(arch.width * self.generator))
        heads = max(1, width // 64)
        width -= width % heads
        table = arch.table_width
        small = arch.but(
            width=width,
            heads=heads,
            inner=4 * width,
            layers=layers,
            embed_width=0 if table == width else table,
        )
        return (("generator", small),)

    def corrupt(self, keys: jax.Array, batch: Batch) -> Batch:
        """As masked LM; and the clean ids, and a number in [0, 1) for each draw."""
        keys, draw_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        hidden = self.masked.corrupt(keys, batch)
        slots = hidden["where"].shape[1]
        draws = jax.vmap(lambda key: jax.random.uniform(key, (slots,)))(draw_keys)
        return {**hidden, "clean": batch["ids"], "draws": draws}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        real = {"replaced_token_loss": (batch["group"] > 0).sum()}
        return real | self.masked.counts(batch)

    def terms(self, net: Net, batch: Batch, carry=None) -> Terms:
        asked = dict(where=batch["where"], heads=("lm",), tower="generator")
        logits = net(tokens_of(batch), **asked)["lm"]
        if self.phase == "generator":
            return Terms(self.masked.scores(logits, batch))
        guesses = jax.lax.stop_gradient(sample(logits, batch["draws"]))
        ids, replaced = put(guesses, batch)
        scores = net(tokens_of({**batch, "ids": ids}), heads=("rtd",))["rtd"]
        loss, said = binary_cross_entropy(scores, replaced), scores > 0
        real = batch["group"] > 0
        means = {
            "replaced_token_loss": Mean.of(loss, real),
            "replaced_token_accuracy": Mean.of(said == replaced, real),
            "replaced_token_recall": Mean.of(said, real & replaced),
            "replaced_token_precision": Mean.of(replaced, real & said),
            "replaced_token_share": Mean.of(replaced, real),
            **self.masked.scores(logits, batch),
        }
        return Terms(means)


def sample(logits: jax.Array, draws: jax.Array) -> jax.Array:
    """A piece from softmax(logits) [B, P, V] for each draw [B, P] from [0, 1): the
    first at which the probabilities so far add up to the draw.

    Found in two steps: the block of pieces in which that is, then the place in it. So
    nothing is added up along a whole vocabulary, and of pieces that lie on other
    devices only sums are told.
    """
    V = logits.shape[-1]
    wide = -(-V // BLOCKS)
    number = jnp.arange(-(-V // wide))
    each = jax.nn.softmax(logits.astype(jnp.float32))
    whole = sums(each, wide, of="blocks")
    so_far, chosen = reach(whole, draws)
    here = number == chosen[..., None]
    before = jnp.where(here, so_far - whole, 0.0).sum(-1)
    in_block = jnp.arange(V) // wide == chosen[..., None]
    inside = sums(jnp.where(in_block, each, 0.0), wide, of="places")
    # As a share of the block, whose sum was rounded in another way.
    rest = (draws * so_far.max(-1) - before) / jnp.where(here, whole, 0.0).sum(-1)
    # Of logits that are no numbers nothing can be drawn.
    return jnp.minimum(chosen * wide + reach(inside, rest)[1], V - 1)


def sums(x: jax.Array, wide: int, *, of: str) -> jax.Array:
    """x [B, P, V], cut into blocks that are so wide: what is in each block, [B, P,
    blocks], or at each place of them, [B, P, wide].

    To cut an array so takes a TPU as long as the generator's layers: there it is a
    product with zeros and ones.
    """
    V = x.shape[-1]
    blocks = -(-V // wide)
    if not on_tpu():
        full = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * wide - V)))
        return full.reshape(*x.shape[:-1], blocks, wide).sum(
            -1 if of == "blocks" else -2
        )
    block, place = jnp.divmod(jnp.arange(V)[:, None], wide)
    which = block == jnp.arange(blocks) if of == "blocks" else place == jnp.arange(wide)
    return jnp.matmul(x, which.astype(x.dtype), precision="highest")


def reach(chances: jax.Array, share: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums [B, P, n] of the chances so far, and the first possible place at which they
    reach that share [B, P] of the largest: they are rounded, and may fall a little."""
    so_far = jnp.cumsum(chances, axis=-1)
    possible, number = chances > 0, jnp.arange(chances.shape[-1], dtype=jnp.int32)
    top = jnp.where(possible, so_far, 0.0).max(-1, keepdims=True)
    there = possible & (so_far >= jnp.clip(share[..., None], 0.0, 1.0) * top)
    return so_far, jnp.where(there, number, number.size - 1).min(-1)


def put(guesses: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The clean ids with the guesses in their places, and which of them are other than
    they were: [B, S]. By a sum: a scatter over the batch would make devices talk."""
    clean = batch["clean"]
    at = batch["where"][:, :, None] == jnp.arange(clean.shape[1])  # [B, P, S]
    at &= batch["weights"][:, :, None] > 0
    put_there = jnp.sum(jnp.where(at, guesses[:, :, None], 0), axis=1)
    ids = jnp.where(at.any(1), put_there, clean)
    return ids, ids != clean
