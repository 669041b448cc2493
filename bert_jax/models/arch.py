"""The architecture of a member on one page: sizes and named choices.

A member of the family is one value of `Arch`; `arch.but(width=256)` is another.
Letters in shape comments everywhere: B batch, S length, P predictions, D width,
E embedding width, H heads, K head size, F inner, V vocabulary, N layers, M memory.
"""

import dataclasses
import re

from bert_jax.errors import InputError, unknown

CHOICES = {
    "position": ("learned", "functional", "xl"),
    "position_biases": ("layer", "shared"),
    "type_scheme": ("absolute", "relative"),
    "embed_norm": ("norm", "none"),
    "embed_scale": ("none", "sqrt"),
    "attention": ("dense", "flash", "auto", "window"),
    "attention_bias": ("all", "none"),
    "norm_place": ("post", "pre"),
    "share": ("none", "all", "attention", "ffn"),
    "order": ("all", "causal"),
    "activation": ("gelu", "gelu_tanh", "relu"),
    "lm_head": ("transform", "bias", "bare"),
    "pooler": ("tanh", "gelu", "relu", "none"),
    "pool_from": ("first", "last"),
    "residual_init": ("same", "depth"),
    "remat": ("none", "dots", "kept", "full"),
}
MOST = 2**24  # of any size; more is no model but a slip
SIZES = {  # the least that each may be
    **dict.fromkeys(("vocab_size", "width", "layers", "heads", "inner"), 1),
    **dict.fromkeys(("max_positions", "labels", "vocab_multiple"), 1),
    **dict.fromkeys(("groups", "group_layers", "streams", "global_slots"), 1),
    **dict.fromkeys(("types", "task_types", "embed_width", "position_offset"), 0),
    **dict.fromkeys(("max_distance",), 0),
    "window": 2,
}


@dataclasses.dataclass(frozen=True)
class Arch:
    """Everything that decides the function the model computes, and how it is run."""

    # Sizes.
    vocab_size: int = 30522  # V: pieces the tokenizer can produce
    width: int = 768  # D: hidden size
    layers: int = 12  # N: layers that are applied
    heads: int = 12  # H
    inner: int = 3072  # F: width inside the feed-forward part
    embed_width: int = 0  # E: width of the tables, then a projection; 0 = D, and none
    labels: int = 2  # outputs of the heads `classify` and `tag`

    # What is added to a piece's vector.
    position: str = "learned"  # learned table | functional (NEZHA) | xl: relative
    max_positions: int = 512  # rows of the learned table
    position_offset: int = 0  # row of an example's first token: 2 in RoBERTa
    max_distance: int = 0  # relative positions further apart count as this; 0 = none
    position_biases: str = "layer"  # xl: u and v for each layer | shared by all
    types: int = 2  # rows of the type table: sentence A, sentence B; 0 = no table
    type_scheme: str = "absolute"  # a table | relative: same type or another (XLNet)
    task_types: int = 0  # rows of the task table (ERNIE); 0 = no table
    embed_norm: str = "norm"  # norm | none
    embed_scale: str = "none"  # none | sqrt: vectors times √D (Transformer-XL)
    streams: int = 1  # 2: a vector for the query stream is learned (XLNet)

    # The layers.
    # dense | flash: the same in linear memory, by a TPU's kernel | auto: flash for long
    # rows on a TPU | window: near tokens and global ones (Longformer).
    attention: str = "dense"
    window: int = 512  # tokens a window spans, half of them on each side
    global_slots: int = 64  # window: the most global tokens that a row may have
    attention_bias: str = "all"  # all | none: biases of q, k, v, o
    norm_place: str = "post"  # post: after the residual sum | pre: before the sub-layer
    share: str = "none"  # which parameters layers share: none | all | attention | ffn
    groups: int = 1  # of layers that share; ALBERT's num_hidden_groups
    group_layers: int = 1  # different layers in a group; ALBERT's inner_group_num
    order: str = "all"  # who sees whom where an objective does not say: all | causal
    activation: str = "gelu"  # gelu is the exact erf form, gelu_tanh Google's
    norm_eps: float = 1e-12
    dropout: float = 0.1  # on embeddings and on the output of every sub-layer
    attention_dropout: float = 0.1  # on attention probabilities
    init_std: float = 0.02  # of a normal cut at two standard deviations
    residual_init: str = "same"  # same | depth: √2N times smaller into the sum (GPT-2)

    # The heads.
    lm_head: str = "transform"  # dense, activation, norm, bias | bias | bare
    pooler: str = "tanh"  # activation of the pooled vector; none = the state itself
    pool_from: str = "first"  # token that stands for an example: first | last

    # Choices of how it is run; none of them changes the result.
    vocab_multiple: int = 128  # tables are stored padded to a multiple of this
    stack: str = "loop"  # loop | scan | scan:k, k layers a trip
    # What the backward pass finds saved: none: all | dots: results of products | kept:
    # linear.keep | full: nothing but inputs of layers
    remat: str = "none"

    def __post_init__(self):
        kinds = {"int": int, "float": int | float, "str": str}
        problems = [
            f"arch.{field.name}={value!r} is not of type {field.type.__name__}"
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
            if not isinstance(value, kinds[field.type.__name__])
            or isinstance(value, bool)
        ]
        if problems:
            raise InputError("\n".join(problems))
        for name, least in SIZES.items():
            most = 10_000 if name == "layers" else MOST
            if not least <= getattr(self, name) <= most:
                problems.append(
                    f"arch.{name}={getattr(self, name)} must be from {least} to {most}"
                )
        for name in ("norm_eps", "init_std"):
            if not 0 < getattr(self, name) < 1e3:
                problems.append(
                    f"arch.{name}={getattr(self, name)}: a small number > 0"
                )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"arch.{name}={getattr(self, name)} must be in [0, 1)")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                problems.append(unknown(f"arch.{name}", getattr(self, name), choices))
        problems = problems or self.clashes()
        if problems:
            raise InputError("\n".join(problems))

    def clashes(self) -> list[str]:
        """Fields that are right by themselves and wrong together."""
        problems: list[str] = []

        def clash(is_wrong, pair: tuple[str, str], what: str) -> None:
            a, b = (f"arch.{name}={getattr(self, name)!r}" for name in pair)
            problems.extend([f"{a} {what} {b}"] if is_wrong else [])

        runs, copies = self.layers // self.group_layers, self.groups * self.group_layers
        learned, xl = self.position == "learned", self.position == "xl"
        functional, window = self.position == "functional", self.attention == "window"
        clash(self.width % self.heads, ("width", "heads"), "is not a multiple of")
        no_row = self.max_positions <= self.position_offset
        clash(no_row, ("max_positions", "position_offset"), "must be more than")
        rest = self.layers % self.group_layers
        clash(rest, ("layers", "group_layers"), "is not a multiple of")
        clash(self.groups > runs, ("groups", "layers"), "is too many for")
        unused = self.share == "none" and copies > 1
        clash(unused, ("groups", "share"), "(and group_layers) is of no use with")
        alone = self.streams == 1 or (self.streams == 2 and xl)
        clash(not alone, ("streams", "position"), "must be 1, or 2 with 'xl', not with")
        relative = self.type_scheme == "relative"
        clash(relative and not xl, ("type_scheme", "position"), "needs 'xl', not")
        clash(window and not learned, ("attention", "position"), "needs 'learned', not")
        flash = self.attention == "flash" and functional
        clash(flash, ("attention", "position"), "needs 'learned' or 'xl', not")
        clash(window and self.window % 2, ("window", "attention"), "must be even for")
        near = functional and not self.max_distance
        clash(near, ("max_distance", "position"), "must be at least 1 for")
        odd = functional and self.head_size % 2
        clash(odd, ("heads", "position"), "makes heads of odd size for")
        clash(xl and self.width % 2, ("width", "position"), "must be even for")
        straight = self.lm_head != "transform" and self.table_width != self.width
        clash(straight, ("lm_head", "embed_width"), "scores states, which do not fit")
        stack_is_known = re.fullmatch(r"loop|scan(:[1-9][0-9]*)?", self.stack)
        if not stack_is_known:
            problems.append(
                f"arch.stack={self.stack!r} must be loop, scan or scan:k "
                "(k layers a trip)"
            )
        elif self.layers % self.trip:
            problems.append(
                f"arch.stack={self.stack!r} needs arch.layers={self.layers} to be a "
                f"multiple of {self.trip}"
            )
        return problems

    @property
    def trip(self) -> int:
        """Layers in one trip of the scan."""
        return int(self.stack.partition(":")[2] or 1)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def table_width(self) -> int:
        """E: the width of the embedding tables."""
        return self.embed_width or self.width

    @property
    def padded_vocab(self) -> int:
        """Rows the vocabulary tables are stored with; the surplus rows are zero."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def max_length(self) -> int | None:
        """The most tokens an example may have; None where positions are relative."""
        if self.position != "learned":
            return None
        return self.max_positions - self.position_offset

    def copies(self, part: str) -> list[int]:
        """Which stored copy of a layer's part each of the N layers uses.

        ALBERT: application l of L belongs to group ⌊l / (L / G)⌋, in floating point as
        in its release, and runs the group's layers one after the other.
        """
        if part == "position" and self.position_biases == "shared":
            return [0] * self.layers
        side = "ffn" if part.startswith("ffn") else "attention"
        if self.share not in ("all", side):
            return list(range(self.layers))
        inner = self.group_layers
        runs = self.layers // inner
        return [
            int(n // inner / (runs / self.groups)) * inner + n % inner
            for n in range(self.layers)
        ]

    @property
    def definition(self) -> "Arch":
        """The same function, by dense attention where flash attention computes it."""
        fast = self.attention in ("flash", "auto")
        return self.but(attention="dense") if fast else self

    def but(self, **changes) -> "Arch":
        """The same architecture with some fields changed."""
        return dataclasses.replace(self, **changes)
