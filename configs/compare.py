"""The bake-off: eight objectives on one corpus with equal FLOPs.

    BERT_JAX_DATA=DATA bert_jax compare --config compare --workdir runs/compare \
        --workers 2

DATA holds the folders en_books, glue_sst2, glue_cola, glue_rte and wnut17. The command
makes a vocabulary and the corpus from raw text, pretrains each entry, evaluates it and
writes report.html; killed, the same command goes on.

Every entry has the same encoder, of BERT-tiny's size: 2 layers of width 128, 0.4 M
parameters and a table of 8,000 pieces, rows of 64 tokens, batches of 32 rows. Two
differ in what the objective itself asks for: permutation learns the vector of a second
stream, and causal sees only what came before, so it pools the last token instead of the
first. Permutation needs relative positions, so all have them (Transformer-XL's), and
norms stand before the sub-layers: with BERT's learned positions and norms behind, token
masking hardly learned in the time. The recipe is the same for all: AdamW in BERT's
form, 1e-3 after 5 % warm-up, then to zero, no dropout (no text is seen twice), larger
initial weights than BERT's (0.02 is for a width of 768).

3e13 FLOPs are seven to eight minutes on one core of the machine that docs/compare.md
was measured on, and 3 to 10 million tokens: fewer where a step costs more (a generator,
a prediction at every token). No entry reads a row of en_books for the second time.

What was tuned was tuned on token masking alone, which may favour it, and on the dev
sets that are scored: positions, norms and the rate of pretraining by five short runs
with 4 layers; the rate, steps and dropout of finetuning by its scores, and those of no
pretraining, on sst2, cola and wnut17. An earlier form (4 layers, 120 steps of
finetuning) was given up after two runs, whose scores were near chance; of this one,
token masking with one seed and half of the budget was looked at before it was settled
on. The budget was then set by the clock; to time them, causal and permutation had been
run with 4e12 FLOPs, and some of the probes' scores of that were seen.
"""

import os

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.data = os.environ.get("BERT_JAX_DATA", "../shared/data")
    config.text = ("en_books/train.txt.xz",)
    config.held_out = ("en_books/valid.txt.xz",)
    config.vocab_size = 8000
    config.lowercase = "no"  # names are capitalised, which wnut17 asks for
    config.flops = 3e13  # for each entry and seed
    config.points = 3  # probed at 1/4, 1/2 and all of the budget
    config.seeds = 2
    config.tasks = ("sst2", "cola", "rte", "wnut17")
    config.probe = {"layers": 2, "examples": 2000, "sentences": 1000}
    config.finetune = {
        "steps": 300,
        "batch": 32,
        "lr": 1e-3,
        "warmup": 0.1,
        "dropout": 0.0,
    }
    config.shared = {
        "arch": {
            "layers": 2,
            "width": 128,
            "heads": 2,
            "inner": 512,
            "position": "xl",
            "type_scheme": "relative",
            "attention_bias": "none",
            "norm_place": "pre",
            "init_std": 0.06,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "length": 64,
        "batch": 32,
        "optim": {"lr": 1e-3, "warmup": 0.05},
        "log_every": 20,
        "eval": {"rows": 512},
    }
    bert, full = "bert-base-uncased", {"rows": "full"}  # no pairs: no next sentence
    config.entries = (
        dict(name="token masking", preset=bert, changes=full, seeds=3),
        dict(
            name="whole word masking",
            preset=bert,
            changes={**full, "objective.choose": "word"},
        ),
        dict(
            name="spans + boundary",
            preset=bert,
            changes={
                **full,
                "objective.choose": "span",
                "objective.replace": "run",
                "objective.boundary": 1.0,
            },
        ),
        dict(
            name="replaced tokens",
            preset=bert,
            changes={
                **full,
                "objective.name": "replaced_token",
                "objective.generator": 0.5,  # a quarter of 128 would hardly learn
            },
            seeds=3,
        ),
        dict(
            name="permutation",
            preset=bert,
            changes={
                **full,
                "objective.name": "permuted_lm",
                "arch.streams": 2,
            },
            seeds=3,
        ),
        dict(
            name="causal",
            preset=bert,
            changes={
                **full,
                "objective.name": "causal_lm",
                "arch.order": "causal",
                "arch.pool_from": "last",
            },
        ),
        dict(name="masking + NSP", preset=bert, changes={"rows": "pair"}),
        dict(name="masking + SOP", preset=bert, changes={"rows": "order"}),
        dict(name="no pretraining", preset=bert, changes=full, trained=False, seeds=3),
    )
    return config
