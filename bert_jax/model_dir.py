"""A model on disk: a training workdir or a Hugging Face directory.

Whatever takes a MODEL takes either. `load(path)` gives the preset, the parameters, the
tokenizer and a callable.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from bert_jax.checkpoint import MANIFEST, Checkpoints, sha256
from bert_jax.convert import hf, tf1
from bert_jax.convert.engine import reference_heads
from bert_jax.convert.files import read_json
from bert_jax.course import leg_at
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.heads import ON_POOLED, fits, heads_of
from bert_jax.models.model import Model, param_shapes
from bert_jax.models.tokens import Tokens, counted, plain
from bert_jax.presets import PRESETS, Preset, preset

# Sizes, and the tokenizer: which piece each row of a table is.
BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.index", "checkpoint")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters. Call it on ids [B, S]."""

    path: Path
    preset: Preset
    params: dict = dataclasses.field(repr=False)
    tokenizer_path: Path
    step: int | None = None  # of the checkpoint, for a workdir
    tokenizer_hash: str = ""  # of the data a workdir was trained on
    labels: tuple[str, ...] = ()  # their names, where the directory has any
    towers: tuple[tuple[str, Arch], ...] = ()  # beside the main one: a generator

    @property
    def arch(self) -> Arch:
        return self.preset.arch

    @property
    def heads(self) -> tuple[str, ...]:
        return heads_of(self.params, self.arch)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read on first use; raises then if there is none or it does not fit."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        if not fits(tokenizer.size, self.arch):
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
        self,
        input_ids,
        token_type_ids=None,
        attention_mask=None,
        attentions=False,
        *,
        task_type_ids=None,
        global_attention_mask=None,
    ) -> dict[str, jax.Array]:
        """What the saved class computes, without dropout.

        hidden [N+1, B, S, D] (the embedding output first), pooled [B, D], logits
        [B, S, V] of the language model, nsp_logits and so on for each other head that
        was saved ([B, labels] or [B, S, labels]), attentions [N, B, H, S, S] if asked
        for. Positions are 0..S-1, also where padding is on the left, except in members
        that count them from the first piece that is not padding's (RoBERTa), and the
        last token is pooled (XLNet, GPT) that is not padding; what
        stands at padding means nothing. Tasks are ERNIE's, global tokens Longformer's:
        without any, those that its class chooses.
        """
        tokens = self.tokens(
            input_ids,
            token_type_ids=token_type_ids,
            attention_mask=attention_mask,
            task_type_ids=task_type_ids,
            global_attention_mask=global_attention_mask,
        )
        capture = ("hidden", "attentions") if attentions else ("hidden",)
        out = self.forward(capture, slots_for(tokens))(self.params, tokens)
        named = {"hidden": out["hidden"]}
        named |= {name: value for name, value in out.items() if "answer" in name}
        for head in self.heads:
            if head not in out:
                continue
            logits = out[head][:, 0] if head in (*ON_POOLED, "pooler") else out[head]
            name = {"pooler": "pooled", "lm": "logits"}.get(head, f"{head}_logits")
            named[name] = logits[..., : self.arch.vocab_size]
        if attentions:
            named["attentions"] = out["attentions"]
        return named

    def generate(self, texts, **options) -> list[dict]:
        """What `bert_jax generate` gives: see bert_jax/generate.py."""
        from bert_jax.generate import generate

        return generate(self, texts, **options)

    def tokens(self, input_ids, **given) -> Tokens:
        """The arguments of a Hugging Face model as Tokens, checked."""
        try:
            ids = np.asarray(input_ids)
            given = {
                name: None if value is None else np.asarray(value)
                for name, value in given.items()
            }
        except ValueError:
            raise InputError(
                "input_ids: the rows differ in length; pad them and give attention_mask"
            ) from None
        self.check(ids, given)
        ids, given = jax.tree.map(np.int32, (ids, given))
        arch, real = self.arch, given.get("attention_mask")
        positions = None
        if arch.position_offset:  # RoBERTa's: padding is the piece before the offset
            positions = counted(ids != arch.position_offset - 1)
        tokens = plain(
            ids,
            types=given.get("token_type_ids"),
            real=None if real is None else real != 0,
            order=arch.order,
            positions=positions,
        )
        reach = given.get("global_attention_mask")
        if reach is None and arch.attention == "window":
            reach = self.usual_reach(ids)
        return tokens.replace(task=given.get("task_type_ids"), reach=reach)

    def usual_reach(self, ids: np.ndarray) -> np.ndarray | None:
        """The global tokens that Longformer's classes choose where none are given.

        The first token for a class, the question for a span, all that follows it for a
        choice; other heads have none.
        """
        place = np.arange(ids.shape[1])
        if "classify" in self.heads:
            return np.broadcast_to(place == 0, ids.shape).astype(np.int32)
        if not {"span", "choice"} & set(self.heads):
            return None
        ends = ids == self.tokenizer.sep_id
        if not (ends.sum(1) == 3).all():
            raise InputError(
                "global_attention_mask is not given, and the question cannot be found: "
                "rows are not <s> question </s></s> text </s>, with three </s>"
            )
        end = ends.argmax(1)[:, None]
        found = place < end if "span" in self.heads else place > end + 1
        return found.astype(np.int32)

    def forward(self, capture: tuple[str, ...], slots: int = 0) -> Callable:
        """The compiled model; jax keeps one compilation a shape. It has at least as
        many `slots` for global tokens."""
        kind = (capture, max(slots, self.arch.global_slots))
        if kind not in self._compiled:
            model = Model(self.arch.but(global_slots=kind[1]))
            heads = tuple(head for head in self.heads if head != "sbo")  # takes spans
            self._compiled[kind] = jax.jit(
                lambda params, tokens: model.apply(
                    {"params": params}, tokens, heads=heads, capture=capture
                )
            )
        return self._compiled[kind]

    @cached_property
    def _compiled(self) -> dict:
        return {}

    def check(self, ids: np.ndarray, given: dict) -> None:
        """Everything JAX would silently clamp or broadcast."""
        if ids.ndim != 2:
            raise InputError(f"input_ids must be [B, S], not of shape {ids.shape}")
        arch, problems = self.arch, []
        # Relative types are compared, not looked up; one type needs no telling.
        types = 2**31 if arch.type_scheme == "relative" else max(1, arch.types)
        limits = {
            "input_ids": arch.vocab_size,
            "token_type_ids": types,
            "task_type_ids": max(1, arch.task_types),
            "global_attention_mask": 2 if arch.attention == "window" else 1,
        }
        for name, array in {"input_ids": ids, **given}.items():
            if array is None:
                continue
            if array.dtype.kind not in "iubf" or (array != np.round(array)).any():
                problems.append(f"{name} must be whole numbers, not {array.dtype}")
                continue
            if array.shape != ids.shape:
                problems.append(
                    f"{name} has shape {array.shape}, input_ids {ids.shape}"
                )
            limit = limits.get(name)
            if limit and array.size and (array.min() < 0 or array.max() >= limit):
                problems.append(
                    f"{name} must be in 0..{limit - 1}, found {array.min()} to "
                    f"{array.max()}"
                )
        if arch.max_length is not None and ids.shape[1] > arch.max_length:
            problems.append(
                f"{ids.shape[1]} tokens in a row, the model has positions for "
                f"{arch.max_length}"
            )
        if problems:
            raise InputError("\n".join(problems))


def slots_for(tokens: Tokens) -> int:
    """Enough for the global tokens of any row; powers of two: few compilations."""
    if tokens.reach is None:
        return 0
    most = int((np.asarray(tokens.reach) > 0).sum(-1).max(initial=1))
    return 1 << (most - 1).bit_length()


def load(
    path: str | Path, *, step: int | None = None, tower: str = "discriminator"
) -> LoadedModel:
    """A model from a workdir (its newest whole checkpoint, or `step`), from a Hugging
    Face directory, or from a TensorFlow 1 release of BERT, ALBERT, XLNet or ELECTRA
    (whose `tower` may be the generator). The tokenizer is not read until it is used."""
    path = Path(path)
    if (path / "run.json").is_file():
        return load_workdir(path, step)
    if (path / "config.json").is_file() or tf1.is_tf1(path):
        if step is not None:
            raise InputError(f"{path} is no workdir: it has no steps")
        arch, params, layout = hf.import_model(path, tower=tower)
        heads = heads_of(params, arch)
        member = preset_of(arch, path.name, layout.model_type, heads)
        return LoadedModel(path, member, params, path, labels=label_names(path, arch))
    what = "does not exist: give a workdir or a"
    if path.exists():
        what = f"is {'neither' if path.is_dir() else 'a file, not'} a workdir nor a"
    raise InputError(
        f"MODEL {path} {what} Hugging Face directory (looked for run.json of a "
        "workdir, config.json, and a TensorFlow checkpoint)"
    )


def content_of(path: str | Path) -> str:
    """A hash of what `load` reads there, without reading it as arrays. Of a workdir it
    is that of its newest checkpoint's manifest, which has a hash of each file."""
    path = Path(path)
    if (path / "run.json").is_file():
        checkpoints = Checkpoints(path, say=complain)
        whole = [step for step in checkpoints.steps() if checkpoints.is_finished(step)]
        if not whole:
            return "no checkpoint"
        manifest = checkpoints.root / str(whole[-1]) / MANIFEST
        return f"step {whole[-1]}, {sha256(manifest)[:16]}"
    kinds = ("*.safetensors", "*.bin", "*.data-*")  # the first that is there is read
    weights = next(filter(None, (sorted(path.glob(kind)) for kind in kinds)), [])
    beside = [file for kind in BESIDE_WEIGHTS for file in sorted(path.glob(kind))]
    told = "".join(f"{file.name} {sha256(file)}\n" for file in (*weights, *beside))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def label_names(directory: Path, arch: Arch) -> tuple[str, ...]:
    """What a config.json calls the labels; none if they are not just as many."""
    if not (directory / "config.json").is_file():
        return ()
    named = read_json(directory / "config.json").get("id2label") or {}
    numbers = [str(n) for n in range(arch.labels)]
    return tuple(str(named[n]) for n in numbers) if {*named} == {*numbers} else ()


def read_run(workdir: Path) -> dict:
    """What a workdir says of its run: config, heads, corpus."""
    path = workdir / "run.json"
    if not path.is_file():
        raise InputError(
            f"{workdir} has checkpoints, but no run.json that says of what: use "
            "another --workdir, or put it back"
        )
    about = read_json(path)
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
    towers = tuple((name, Arch(**a)) for name, a in about.get("towers", {}).items())
    shapes = param_shapes(arch, heads=tuple(about["heads"]), towers=towers)
    checkpoints = Checkpoints(path, about=about, say=complain)
    found, params = checkpoints.good_params(step, shapes)
    member = dataclasses.replace(preset(about["config"]["preset"]), arch=arch)
    run = leg_at(about["config"], found)
    hyper = dict(run.objective)
    name = hyper.pop("name", member.objective)
    member = dataclasses.replace(member, objective=name, hyper=hyper, rows=run.rows)
    digest = about["corpus"]["tokenizer"]["hash"]
    return LoadedModel(
        path, member, params, path / "tokenizer", found, digest, towers=towers
    )


def complain(text: str) -> None:
    print(text, file=sys.stderr)  # standard output may be JSON


def preset_of(arch: Arch, name: str, layout: str, heads: tuple[str, ...]) -> Preset:
    """The preset with this architecture, or an unnamed member of its kind.

    Of several the one that is called like the directory, or has the heads.
    """
    kind = [member for member in PRESETS.values() if member.layout == layout]
    same = [m for m in kind if m.arch == arch.but(labels=m.arch.labels)]
    same.sort(
        key=lambda m: (m.name != name, reference_heads(layout, m.reference) != heads)
    )
    if same:
        return dataclasses.replace(same[0], arch=arch)
    # UniLM is a bert by its layout; its six types tell it from the others.
    alike = [member for member in kind if member.arch.types == arch.types] or kind
    return dataclasses.replace(alike[0], name=name, arch=arch)
