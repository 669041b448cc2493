"""A model on disk: a training workdir or a Hugging Face directory.

Whatever takes a MODEL takes either. `load(path)` gives the preset, the parameters, the
tokenizer and a callable.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from bert_jax.checkpoint import Checkpoints
from bert_jax.convert import hf
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import HEADS, Model, param_shapes
from bert_jax.models.tokens import plain
from bert_jax.presets import PRESETS, Preset, preset


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters. Call it on ids [B, S]."""

    path: Path
    preset: Preset
    params: dict = dataclasses.field(repr=False)
    tokenizer_path: Path
    step: int | None = None  # of the checkpoint, for a workdir
    tokenizer_hash: str = ""  # of the data a workdir was trained on

    @property
    def arch(self) -> Arch:
        return self.preset.arch

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(head for head in HEADS if head in self.params)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read on first use; raises then if there is none or it does not fit."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        if tokenizer.size != self.arch.vocab_size:
            raise InputError(
                f"{self.tokenizer_path}: the tokenizer has {tokenizer.size} pieces, "
                f"the weights in {self.path} have {self.arch.vocab_size}"
            )
        if self.tokenizer_hash not in ("", tokenizer.hash):
            raise InputError(
                f"{self.tokenizer_path} is not the tokenizer that {self.path} was "
                f"trained with (hash {tokenizer.hash}, then {self.tokenizer_hash})"
            )
        return tokenizer

    def __call__(
        self, input_ids, token_type_ids=None, attention_mask=None, attentions=False
    ) -> dict[str, jax.Array]:
        """What the saved class computes, without dropout.

        hidden [N+1, B, S, D] (the embedding output first), pooled [B, D], logits
        [B, S, V], nsp_logits [B, 2], attentions [N, B, H, S, S] if asked for; a head
        that was not saved is left out. Positions are 0..S-1, also where padding is on
        the left; what stands at padding means nothing.
        """
        try:
            ids = np.asarray(input_ids)
        except ValueError:
            raise InputError(
                "input_ids: the rows differ in length; pad them and give attention_mask"
            ) from None
        types = None if token_type_ids is None else np.asarray(token_type_ids)
        real = None if attention_mask is None else np.asarray(attention_mask) != 0
        self.check(ids, types, real)
        capture = ("hidden", "attentions") if attentions else ("hidden",)
        out = self.forward(capture)(self.params, plain(ids, types=types, real=real))
        named = {"hidden": out["hidden"]}
        if "pooler" in self.params:
            named["pooled"] = out["pooler"][:, 0]
        if "lm" in self.params:
            named["logits"] = out["lm"][..., : self.arch.vocab_size]
        if "nsp" in self.params:
            named["nsp_logits"] = out["nsp"][:, 0]
        if attentions:
            named["attentions"] = out["attentions"]
        return named

    def forward(self, capture: tuple[str, ...]) -> Callable:
        """The compiled model; jax keeps one compilation a shape."""
        if capture not in self._compiled:
            model, heads = Model(self.arch), self.heads
            self._compiled[capture] = jax.jit(
                lambda params, tokens: model.apply(
                    {"params": params}, tokens, heads=heads, capture=capture
                )
            )
        return self._compiled[capture]

    @cached_property
    def _compiled(self) -> dict:
        return {}

    def check(self, ids, types, real) -> None:
        """Everything JAX would silently clamp or broadcast."""
        if ids.ndim != 2:
            raise InputError(f"input_ids must be [B, S], not of shape {ids.shape}")
        problems = []
        for name, array, limit in (
            ("input_ids", ids, self.arch.vocab_size),
            ("token_type_ids", types, self.arch.types),
        ):
            if array is None or not array.size:
                continue
            if array.min() < 0 or array.max() >= limit:
                problems.append(
                    f"{name} must be in 0..{limit - 1}, found {array.min()} to "
                    f"{array.max()}"
                )
        for name, array in (("token_type_ids", types), ("attention_mask", real)):
            if array is not None and array.shape != ids.shape:
                problems.append(
                    f"{name} has shape {array.shape}, input_ids {ids.shape}"
                )
        if ids.shape[1] > self.arch.max_positions:
            problems.append(
                f"{ids.shape[1]} tokens in a row, the model has positions for "
                f"{self.arch.max_positions}"
            )
        if problems:
            raise InputError("\n".join(problems))


def load(path: str | Path, *, step: int | None = None) -> LoadedModel:
    """A model from a workdir (its newest whole checkpoint, or `step`) or from a
    Hugging Face directory. The tokenizer is not needed until it is used."""
    path = Path(path)
    if (path / "run.json").is_file():
        return load_workdir(path, step)
    if (path / "config.json").is_file():
        if step is not None:
            raise InputError(f"{path} is a Hugging Face directory: it has no steps")
        arch, params = hf.import_model(path)
        return LoadedModel(path, preset_of(arch, path.name), params, path)
    what = "does not exist: give a workdir or a"
    if path.is_dir():
        what = "is neither a workdir nor a"
    raise InputError(
        f"MODEL {path} {what} Hugging Face directory (looked for run.json of a "
        "workdir and config.json)"
    )


def read_run(workdir: Path) -> dict:
    """What a workdir says of its run: config, heads, corpus."""
    path = workdir / "run.json"
    if not path.is_file():
        raise InputError(
            f"{workdir} has checkpoints, but no run.json that says of what: use "
            "another --workdir, or put it back"
        )
    about = hf.read_json(path)
    try:
        Arch(**about["config"]["arch"])
        _ = about["config"]["preset"], about["config"]["data"], tuple(about["heads"])
        _ = about["corpus"]["content"], about["corpus"]["tokenizer"]["hash"]
    except (KeyError, TypeError, InputError) as error:
        raise InputError(
            f"{path} is damaged, or of another version: {error!r}"
        ) from None
    return about


def load_workdir(path: Path, step: int | None) -> LoadedModel:
    about = read_run(path)
    arch = Arch(**about["config"]["arch"])
    shapes = param_shapes(arch, heads=tuple(about["heads"]))
    found, params = Checkpoints(path, keep=1, say=complain).good_params(step, shapes)
    member = dataclasses.replace(preset(about["config"]["preset"]), arch=arch)
    digest = about["corpus"]["tokenizer"]["hash"]
    return LoadedModel(path, member, params, path / "tokenizer", found, digest)


def complain(text: str) -> None:
    print(text, file=sys.stderr)  # standard output may be JSON


def preset_of(arch: Arch, name: str) -> Preset:
    """The preset with this architecture, or an unnamed BERT that has it."""
    for member in PRESETS.values():
        if member.arch == arch:
            return member
    return dataclasses.replace(PRESETS["bert-base-uncased"], name=name, arch=arch)
