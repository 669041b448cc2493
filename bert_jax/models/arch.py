"""The architecture of a member on one page: sizes and named choices.

A member of the family is one value of `Arch`; `arch.but(width=256)` is another.
Letters in shape comments everywhere: B batch, S length, P predictions, D width,
H heads, K head size, F inner, V vocabulary, N layers.
"""

import dataclasses

from bert_jax.errors import InputError, unknown

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
REMATS = ("none", "dots", "full")
SIZES = (
    *("vocab_size", "width", "layers", "heads", "inner"),
    *("max_positions", "types", "vocab_multiple"),
)


@dataclasses.dataclass(frozen=True)
class Arch:
    """Everything that decides the function the model computes, and how it is run."""

    # Sizes.
    vocab_size: int = 30522  # V: pieces the tokenizer can produce
    width: int = 768  # D: hidden size
    layers: int = 12  # N
    heads: int = 12  # H
    inner: int = 3072  # F: width inside the feed-forward part
    max_positions: int = 512  # rows of the learned position table
    types: int = 2  # rows of the type table: sentence A, sentence B

    # Choices of the function.
    activation: str = "gelu"  # gelu is the exact erf form, gelu_tanh Google's
    norm_eps: float = 1e-12
    dropout: float = 0.1  # on embeddings and on the output of every sub-layer
    attention_dropout: float = 0.1  # on attention probabilities
    init_std: float = 0.02  # of a normal cut at two standard deviations

    # Choices of how it is run; none of them changes the result.
    vocab_multiple: int = 128  # tables are stored padded to a multiple of this
    stack: str = "loop"  # loop | scan | scan:k, k layers a trip
    remat: str = "none"  # what the backward pass computes again: none | dots | full

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
        for name in SIZES:
            if getattr(self, name) < 1:
                problems.append(f"arch.{name}={getattr(self, name)} must be at least 1")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"arch.{name}={getattr(self, name)} must be in [0, 1)")
        if self.heads >= 1 and self.width % self.heads:
            problems.append(
                f"arch.width={self.width} is not a multiple of arch.heads={self.heads}"
            )
        if self.activation not in ACTIVATIONS:
            problems.append(unknown("arch.activation", self.activation, ACTIVATIONS))
        if self.remat not in REMATS:
            problems.append(unknown("arch.remat", self.remat, REMATS))
        kind, _, trip = self.stack.partition(":")
        if kind not in ("loop", "scan") or (
            trip and (kind, trip.isdigit()) != ("scan", True)
        ):
            problems.append(
                f"arch.stack={self.stack!r} must be loop, scan or scan:k "
                "(k layers a trip)"
            )
        elif kind == "scan" and self.layers % self.trip:
            problems.append(
                f"arch.stack={self.stack!r} needs arch.layers={self.layers} to be a "
                f"multiple of {self.trip}"
            )
        if problems:
            raise InputError("\n".join(problems))

    @property
    def trip(self) -> int:
        """Layers in one trip of the scan."""
        return max(1, int(self.stack.partition(":")[2] or 1))

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows the vocabulary tables are stored with; the surplus rows are zero."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def but(self, **changes) -> "Arch":
        """The same architecture with some fields changed."""
        return dataclasses.replace(self, **changes)
