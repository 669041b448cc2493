"""The whole road on the built-in corpus: text, vocabulary, corpus, pretraining,
evaluation, blanks, picture, export, check. `make demo` runs it."""

import json
import sys
from pathlib import Path

from bert_jax.config import load_config, override, resolve
from bert_jax.convert.hf import check_export, export_model
from bert_jax.data.prepare import prepare
from bert_jax.data.text import documents
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer, train_wordpiece
from bert_jax.fill import fill
from bert_jax.model_dir import load
from bert_jax.train import train
from bert_jax.whole import whole_folder, write_text

VOCAB = 8192
SETTINGS = {
    # Three minutes are a few thousand steps of a small model. What makes it leave the
    # plateau of guessing frequent pieces early: short rows (each position is seen
    # often) and weights large enough for a width of 128 (0.02 is for 768).
    "arch.init_std": "0.06",
    "arch.max_positions": "32",
    "arch.dropout": "0",
    "arch.attention_dropout": "0",
    "rows": "full",
    "length": "32",
    "batch": "64",
    "steps": "1400",
    "optim.lr": "1e-3",
    "optim.warmup": "0.05",
    "log_every": "20",
    "save_every": "350",
    "eval.every": "350",
    "eval.rows": "1024",
}
BLANKS = (
    "the [MASK] of this function is a list of strings .",
    "raises a [MASK] if the file does not exist .",
    "returns [MASK] if the two arrays are equal .",
)


def demo(workdir: Path) -> None:
    report = workdir / "report.json"
    if report.is_file():
        print(f"the demo in {workdir} is finished")
        print(describe(json.loads(report.read_text()), workdir))
        return
    tokenizer, corpus = make_data(workdir)

    print("3. pretraining: masked LM; about three minutes on two cores")
    config = load_config("pretrain:bert-tiny")
    data = {"data": str(corpus / "train"), "eval.data": str(corpus / "valid")}
    override(config, {**SETTINGS, **data})
    result = train(resolve(config), workdir)
    if not result["finished"]:
        sys.exit(result["code"])

    print("4. blanks")
    model = load(workdir)
    blanks = {}
    for text in BLANKS:
        blanks[text] = [guess["piece"] for guess in fill(model, text, top=3)[0]]
        print(f"   {text.replace('[MASK]', '____')}  {' | '.join(blanks[text])}")

    print("5. export, checked against PyTorch")
    exported = workdir / "exported"
    if exported.exists():  # a demo that was stopped right after it
        difference = check_export(exported, model.params, model.arch, "bert")[0]
    else:
        done = export_model(exported, model.params, model.arch, tokenizer)
        difference = done.difference
    scores = {
        "steps": result["eval"]["step"],
        "final_loss": result["train"]["masked_lm_loss"],
        "eval_loss": result["eval"]["masked_lm_loss"],
        "eval_accuracy": result["eval"]["masked_lm_accuracy"],
        "unigram_accuracy": result["eval"]["unigram_accuracy"],
        "eval_predictions": result["eval"]["predictions"],
        "tokens_per_second": result["train"]["tokens_per_second"],
        "share_of_peak": result["train"].get("share_of_peak"),
        "vocab_size": tokenizer.size,
        "export_max_abs_diff": difference,
        "blanks": blanks,
    }
    write_text(report, json.dumps(scores, indent=2) + "\n")
    print(describe(scores, workdir))


def make_data(workdir: Path) -> tuple[Tokenizer, Path]:
    """The tokenizer, and the folder of the two corpora; what is there is kept."""
    tokenizer_dir, corpus = workdir / "tokenizer", workdir / "corpus"
    if not tokenizer_dir.is_dir():
        print("1. a WordPiece vocabulary from the documentation in this Python")
        with whole_folder(tokenizer_dir) as scratch:
            texts = (document.text for document in documents(["pydocs:train"]))
            bars = sys.stderr.isatty()  # elsewhere they are empty lines
            tokenizer = train_wordpiece(texts, vocab_size=VOCAB, progress=bars)
            tokenizer.save(scratch)
    tokenizer = load_tokenizer(tokenizer_dir)
    print("2. the corpus, tokenised once")
    for split in ("train", "valid"):
        if not (corpus / split).is_dir():
            prepare([f"pydocs:{split}"], tokenizer=tokenizer, out=corpus / split)
    return tokenizer, corpus


def describe(scores: dict, workdir: Path) -> str:
    ratio = scores["eval_accuracy"] / scores["unigram_accuracy"]
    difference = scores["export_max_abs_diff"]
    checked = "not checked" if difference is None else f"{difference:.1e}"
    return f"""
  {scores["steps"]} steps, final loss {scores["final_loss"]:.3f}
  held-out accuracy   {scores["eval_accuracy"]:.1%}, {ratio:.1f} times the {
        scores["unigram_accuracy"]:.1%} of always guessing the most frequent piece
  speed               {scores["tokens_per_second"]:,.0f} tokens/s
  PyTorch's logits    differ by at most {checked}
  the loss            {workdir}/loss.png
  all figures         {workdir}/report.json

what next:
  bert_jax fill {workdir} "the [MASK] of a list"
  bert_jax eval {workdir} --data {workdir}/corpus/valid
  bert_jax tokenizer --vocab_size 8000 --out tok YOUR.txt      your own text
  bert_jax train --help
in Python: transformers.AutoModelForMaskedLM.from_pretrained("{workdir}/exported")
(commands are in .venv/bin)"""
