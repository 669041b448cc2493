"""Reading a tokenizer from the files of a Hugging Face directory.

    spiece.model, sentencepiece.bpe.model
                              unigram (tokenizer.json cannot say all of it)
    tokenizer.json            wordpiece or bpe
    vocab.txt                 wordpiece
    vocab.json, merges.txt    bpe

The first that is there counts; tokenizer_config.json and config.json say how it is
used. What a file asks for and these kinds do not do is an error, never ignored, and so
are Transformer-XL's words (vocab.pkl, vocab.txt). No code of the directory is run.
"""

import json
import os
import tempfile
from collections.abc import Container, Iterable
from pathlib import Path

import tokenizers
from etils import epath

from bert_jax.bucket import download, is_bucket
from bert_jax.data.tokenizers import byte_bpe, unigram
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokenizers.byte_bpe import ByteBPE
from bert_jax.data.tokenizers.sentencepiece_file import read_model_file
from bert_jax.data.tokenizers.unigram import Unigram
from bert_jax.data.tokenizers.word_bpe import STYLE, SUFFIX, UNKNOWN, WordBPE
from bert_jax.data.tokenizers.wordpiece import PREFIX, SPECIALS, WordPiece
from bert_jax.errors import InputError, unknown

FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.json", "vocab.txt")
FILES += ("vocab.json",)
# What a tokenizer.json must say for its ids to be ours.
SETTINGS = {
    "WordPiece": {
        "normalizer.type": ("BertNormalizer",),
        "normalizer.clean_text": (True,),
        "pre_tokenizer.type": ("BertPreTokenizer",),
        "model.unk_token": ("[UNK]",),
        "model.continuing_subword_prefix": (PREFIX,),
        "model.max_input_chars_per_word": (100,),
    },
    "BPE": {
        "normalizer.type": (None,),
        "pre_tokenizer.type": ("ByteLevel",),
        "pre_tokenizer.add_prefix_space": (False,),
        "pre_tokenizer.use_regex": (True,),
        "model.dropout": (None,),
        "model.continuing_subword_prefix": (None, ""),
        "model.end_of_word_suffix": (None, ""),
        "model.byte_fallback": (False,),
        "model.ignore_merges": (False,),
    },
    "BPE with </w>": {
        "normalizer.type": ("BertNormalizer",),
        "normalizer.clean_text": (True,),
        "normalizer.handle_chinese_chars": (True,),
        "normalizer.strip_accents": (None, True),
        "normalizer.lowercase": (True,),
        "pre_tokenizer.type": ("BertPreTokenizer",),
        "model.dropout": (None,),
        "model.unk_token": (UNKNOWN,),
        "model.fuse_unk": (False,),
        "model.continuing_subword_prefix": (None, ""),
        "model.byte_fallback": (False,),
        "model.ignore_merges": (False,),
    },
}
# What is read of a tokenizer_config.json.
CONFIG = {
    "added_tokens_decoder": dict,
    "do_lower_case": bool,
    "strip_accents": bool | None,
    "tokenize_chinese_chars": bool,
    "keep_accents": bool,
    "add_prefix_space": bool | None,
    "tokenizer_class": str | None,
}
# Both the class of the tokenizer and the type of the model tell the style.
STYLES = {
    "roberta": "roberta",
    "gpt2": "gpt2",
    "openai-gpt": STYLE,
    "albert": "albert",
    "xlnet": "xlnet",
    "t5": "t5",
    "xlm-roberta": "xlm-roberta",
    "camembert": "camembert",
    "XLMRobertaTokenizer": "xlm-roberta",
    "CamembertTokenizer": "camembert",
    "RobertaTokenizer": "roberta",
    "GPT2Tokenizer": "gpt2",
    "OpenAIGPTTokenizer": STYLE,
    "AlbertTokenizer": "albert",
    "XLNetTokenizer": "xlnet",
    "T5Tokenizer": "t5",
}


def load_tokenizer(
    path: str | os.PathLike,
    *,
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    style: str | None = None,
) -> Tokenizer:
    """Read a directory, or a vocabulary file itself: .txt, vocab.json, .model.

    Of the switches an argument counts first, then tokenizer_config.json, then
    tokenizer.json, then the default of transformers: uncased. The style of bpe and
    unigram is the argument, else what the directory's configs name, else what the
    special pieces show.
    """
    if is_bucket(path):
        options = {"lowercase": lowercase, "strip_accents": strip_accents}
        return _load_from_bucket(epath.Path(path), **options, style=style)
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a directory or a vocab.txt")
    source, config = _find_files(path)
    switches = {"lowercase": lowercase, "strip_accents": strip_accents}
    switches = {name: on for name, on in switches.items() if on is not None}
    asked = {"config": config, "switches": switches, "style": style}
    if source.suffix == ".model":
        return _load_unigram(source, **asked)
    if source.suffix == ".txt":
        return _load_wordpiece(source, vocab=_read_vocab(source), described={}, **asked)
    if source.name.endswith("vocab.json"):
        vocab, merges = _number(_read_json(source), where=source), _read_merges(source)
        return _load_bpe(source, vocab=vocab, merges=merges, **asked)
    described = _read_tokenizer_json(source)
    model, added = described["model"], [t["content"] for t in described["added_tokens"]]
    vocab = _number(model["vocab"], where=source)
    if model["type"] == "BPE":
        config["added"] += added
        if model["end_of_word_suffix"]:
            config["style"] = STYLE
        return _load_bpe(source, vocab=vocab, merges=model["merges"], **asked)
    _refuse_added(added, known=SPECIALS, where=source)
    normalizer = described["normalizer"]
    described = {
        "lowercase": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "split_chinese": normalizer["handle_chinese_chars"],
    }
    return _load_wordpiece(source, vocab=vocab, described=described, **asked)


def _load_from_bucket(path: epath.Path, **options) -> Tokenizer:
    if not path.exists():
        raise InputError(f"{path} does not exist; give a directory or a vocab.txt")
    with tempfile.TemporaryDirectory() as copy:
        download(path, Path(copy))
        here = Path(copy) if path.is_dir() else Path(copy) / path.name
        try:
            return load_tokenizer(here, **options)
        except InputError as error:  # by the name that the caller knows
            raise InputError(str(error).replace(str(here), str(path))) from None


def _find_files(path: Path) -> tuple[Path, dict]:
    """The file with the vocabulary, and what the configs beside it say."""
    if path.is_file():
        if not path.name.endswith((".txt", ".model", "vocab.json")):
            raise InputError(
                f"{path} is neither a directory nor a vocabulary (.txt, vocab.json, "
                f".model); give the directory that holds {', '.join(FILES)}"
            )
        return path, {"added": []}
    found = [path / name for name in FILES if (path / name).is_file()]
    models = sorted(path.glob("*.model"))  # ALBERT's release: 30k-clean.model
    if not found and len(models) == 1:
        found = models
    if not found and (path / "tokenizer").is_dir():  # a corpus or a workdir has one
        return _find_files(path / "tokenizer")
    files = (path / "tokenizer_config.json", path / "config.json")
    config, model = (_read_json(p) if p.is_file() else {} for p in files)
    _refuse_words(path, found, config.get("tokenizer_class"), model.get("model_type"))
    if not found:
        raise InputError(f"{path} has no tokenizer: looked for {', '.join(FILES)}")
    wrong = [
        f"{field} is {config[field]!r}"
        for field, kinds in CONFIG.items()
        if field in config and not isinstance(config[field], kinds)
    ]
    added = [] if wrong else config.get("added_tokens_decoder", {}).values()
    pieces = [token.get("content") for token in added if isinstance(token, dict)]
    if len(pieces) < len(added) or not all(isinstance(p, str) for p in pieces):
        wrong.append("added_tokens_decoder holds something else than tokens")
    if wrong:
        raise InputError(f"{files[0]} cannot be used: {'; '.join(wrong)}")
    about = {
        "model_type": model.get("model_type"),
        "model_class": model.get("tokenizer_class"),
        "where": files[0],
        "added": pieces,
    }
    return found[0], config | about


def _refuse_words(path: Path, found: list[Path], name: object, model: object) -> None:
    """Transformer-XL's own vocabulary; the model may have been given another one."""
    named = str(name).startswith("TransfoXL") or (not name and model == "transfo-xl")
    own = [] if found else [p for p in [path / "vocab.pkl"] if p.is_file()]
    if named and found and found[0].name == "vocab.txt":
        own = [] if {*SPECIALS} <= {*_read_vocab(found[0])} else found
    if own:
        raise InputError(
            f"{own[0]} is Transformer-XL's own vocabulary of words, which is not read "
            f"(nor is a pickle ever run); prepare the text with another tokenizer"
        )


def _load_wordpiece(
    source: Path, *, vocab, described, config, switches, style
) -> WordPiece:
    if style is not None:
        raise InputError(f"{source}: a wordpiece tokenizer has no style, got {style!r}")
    _refuse_added(config["added"], known=SPECIALS, where=config.get("where"))
    fields = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "split_chinese",
    }
    configured = {ours: config[name] for name, ours in fields.items() if name in config}
    # Releases that say nothing: a vocabulary with capitals is a cased one.
    capitals = any("A" <= piece[:1] <= "Z" for piece in vocab)
    defaults = {"strip_accents": None, "split_chinese": True}
    defaults |= {"lowercase": not capitals}
    chosen = defaults | described | configured | switches
    return WordPiece(vocab, where=str(source), **chosen)


def _load_bpe(
    source: Path, *, vocab, merges, config, switches, style
) -> ByteBPE | WordBPE:
    choices = (*byte_bpe.STYLES, STYLE)
    style = style or _style(config, choices=choices)
    if style is None:
        known = set(vocab)
        style = next((s for s, ends in byte_bpe.LAST.items() if known >= {*ends}), None)
        # XLM, whose text is cut otherwise, has <unk> and </w> too, but also <s>.
        gpt = UNKNOWN in known and "<s>" not in known
        if gpt and any(piece.endswith(SUFFIX) for piece in vocab):
            style = STYLE
    if style is None:
        raise InputError(_no_style(source, choices))
    if style not in choices:
        raise InputError(unknown("style of a bpe tokenizer", style, choices))
    wrong = list(switches)
    if config.get("add_prefix_space"):
        wrong.append("add_prefix_space")
    if wrong:
        does = "leaves the text as it is"
        if style == STYLE:
            does = f"with {SUFFIX} lower-cases the text and strips accents"
        raise InputError(f"{source}: bpe {does}; {' and '.join(wrong)} cannot be used")
    if style == STYLE:
        loaded = WordBPE(vocab, merges, where=str(source))
    else:
        loaded = ByteBPE(vocab, merges, style=style, where=str(source))
    known = loaded.specials.values()
    _refuse_added(config["added"], known=known, where=source)
    return loaded


def _load_unigram(source: Path, *, config, switches, style) -> Unigram:
    content = source.read_bytes()
    pieces = read_model_file(content, where=str(source)).pieces
    style = style or _style(config, choices=unigram.STYLES)
    if style is None:
        known = set(pieces)
        if known >= {*unigram.STYLES["albert"].specials.values()}:
            style = "albert"
        elif known >= {*unigram.STYLES["xlnet"].specials.values()}:
            style = "xlnet"
        elif pieces[:3] == ["<pad>", "</s>", "<unk>"]:
            style = "t5"
        else:
            raise InputError(_no_style(source, unigram.STYLES))
    configured = {}
    if "do_lower_case" in config:
        configured["lowercase"] = config["do_lower_case"]
    if "keep_accents" in config:
        configured["strip_accents"] = not config["keep_accents"]
    loaded = Unigram(content, style=style, where=str(source), **(configured | switches))
    _refuse_added(config["added"], known=set(loaded.vocab), where=config.get("where"))
    return loaded


def _style(config: dict, *, choices: Iterable[str]) -> str | None:
    """The first style that a config names and this kind has."""
    names = [
        config.get("style"),
        config.get("tokenizer_class"),
        config.get("model_class"),
        config.get("model_type"),
    ]
    styles = [STYLES.get(str(name).removesuffix("Fast")) for name in names if name]
    return next((style for style in styles if style in choices), None)


def _no_style(source: Path, choices: Iterable[str]) -> str:
    return (
        f"{source}: neither a config nor its special pieces tell its style; give "
        f"style={' | '.join(choices)}, or a tokenizer_config.json with tokenizer_class"
    )


def _read_vocab(path: Path) -> list[str]:
    # Not splitlines(): U+2028, which would end a line there, is a piece of
    # bert-base-chinese.
    return _read_text(path).removesuffix("\n").split("\n")


def _read_merges(vocab: Path) -> list[tuple[str, str]]:
    path = vocab.with_name(f"{vocab.name.removesuffix('vocab.json')}merges.txt")
    if not path.is_file():
        raise InputError(f"{vocab} needs its merges: {path.name} is not beside it")
    lines = _read_text(path).removesuffix("\n").split("\n")
    lines = lines[1:] if lines[0].startswith("#version") else lines
    pairs = [tuple(line.split(" ")) for line in lines if line]
    wrong = [i for i, pair in enumerate(pairs) if len(pair) != 2]
    if wrong:
        raise InputError(
            f"{path}: {len(wrong)} merges are not two pieces and a space, the first "
            f"{' '.join(pairs[wrong[0]])!r}; copy it again"
        )
    return pairs


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); convert it") from None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise InputError(
            f"{path} is not valid JSON ({error}); copy or save it again"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a JSON object; copy or save it again")
    return content


def _read_tokenizer_json(path: Path) -> dict:
    """Its content, where all that determines ids is as our kinds have it."""
    text = json.dumps(_read_json(path))
    try:
        # The library fills in what files of older versions leave out.
        described = json.loads(tokenizers.Tokenizer.from_str(text).to_str())
    except Exception as error:  # the library raises no narrower class
        raise InputError(
            f"{path} is not a file of the tokenizers library ({error}); copy or save "
            f"it again"
        ) from None
    name = described["model"]["type"]
    if name == "BPE" and described["model"]["end_of_word_suffix"] == SUFFIX:
        name = f"BPE with {SUFFIX}"
    if name == "Unigram":
        raise InputError(
            f"{path} is a unigram tokenizer, which is read from the spiece.model it "
            f"was made from: put that beside it"
        )
    if name not in SETTINGS:
        raise InputError(
            f"{path}: model type {name} is not supported; valid: {', '.join(SETTINGS)}"
        )
    wrong = []
    for setting, values in SETTINGS[name].items():
        part, field = setting.split(".")
        found = (described[part] or {}).get(field)
        if found not in values:
            wrong.append(f"{setting} is {found!r} (valid: {values[0]!r})")
    if wrong:
        whose = {"WordPiece": "BERT's WordPiece", "BPE": "byte-level BPE"}
        whose = whose.get(name, "GPT's BPE")
        raise InputError(f"{path} is not {whose}: {'; '.join(wrong)}")
    return described


def _number(ids: dict[str, int], *, where: Path) -> list[str]:
    """The pieces by id."""
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise InputError(
            f"{where}: the ids of its {len(ids)} pieces are not 0 to {len(ids) - 1}; "
            f"number them without gaps"
        )
    return sorted(ids, key=ids.get)


def _refuse_added(
    pieces: Iterable[str], *, known: Container[str], where: Path | None
) -> None:
    """Added tokens are found before words are, so ignoring them would change ids."""
    extra = [piece for piece in pieces if piece not in known]
    if extra:
        raise InputError(
            f"{where}: added tokens are not supported: {', '.join(extra)}; give them "
            f"the places of [unused] pieces in the vocabulary"
        )
