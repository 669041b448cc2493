"""The bake-off: eight objectives on one corpus with equal FLOPs.

    BERT_JAX_DATA=DATA bert_jax compare --config compare --workdir runs/compare

DATA holds the folders en_books, glue_sst2, glue_cola, glue_rte and wnut17. The command
makes a vocabulary and the corpus from raw text, pretrains each entry, evaluates it and
writes report.html; killed, the same command goes on.

Every entry is the same encoder: 4 layers of width 128, 0.8 M parameters and a table of
8,000 pieces, rows of 64 tokens, batches of 32 rows. 2e13 FLOPs are six to nine minutes
on two cores, and some million tokens: fewer where a step costs more (a generator, a
prediction at every token). The recipe is the same for all, and was tuned for none:
AdamW in BERT's form, 1e-3 after 5 % warm-up, then to zero, no dropout (no text is seen
twice), larger initial weights than BERT's (0.02 is for a width of 768).
"""

import os

from ml_collections import ConfigDict

SINGLE = {"rows": "full"}  # no pairs: no next sentence
# A causal model that is otherwise the same encoder.
AS_BERT = {"arch.embed_norm": "norm", "arch.lm_head": "transform"}
AS_BERT |= {"arch.pooler": "tanh", "arch.types": 2, "arch.activation": "gelu"}
AS_BERT |= {"arch.norm_eps": 1e-12}


def get_config():
    config = ConfigDict()
    config.data = os.environ.get("BERT_JAX_DATA", "../shared/data")
    config.text = ("en_books/train.txt.xz",)
    config.held_out = ("en_books/valid.txt.xz",)
    config.vocab_size = 8000
    config.lowercase = "no"  # names are capitalised, which wnut17 asks for
    config.flops = 2e13  # for each entry and seed
    config.points = 4  # probed at 1/8, 1/4, 1/2 and all of the budget
    config.seeds = 2
    config.tasks = ("sst2", "cola", "rte", "wnut17")
    config.probe = {"layers": 2, "examples": 2000, "sentences": 1000}
    config.finetune = {
        "steps": 300,
        "batch": 32,
        "lr": 5e-4,
        "warmup": 0.1,
        "dropout": 0.1,
    }
    config.shared = {
        "arch": {
            "layers": 4,
            "width": 128,
            "heads": 2,
            "inner": 512,
            "max_positions": 64,
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
    bert, span = "bert-base-uncased", {"choose": "span", "replace": "run"}
    span = {f"objective.{name}": value for name, value in span.items()}
    config.entries = (
        dict(name="token masking", preset=bert, changes=SINGLE, seeds=3),
        dict(
            name="whole word masking",
            preset=bert,
            changes={**SINGLE, "objective.choose": "word"},
        ),
        dict(
            name="spans + boundary",
            preset=bert,
            changes={**SINGLE, **span, "objective.boundary": 1.0},
        ),
        dict(
            name="replaced tokens",
            preset="electra-base-discriminator",
            changes={**SINGLE, "arch.pooler": "tanh", "objective.generator": 0.5},
            seeds=3,
        ),
        dict(name="causal", preset="openai-gpt", changes={**SINGLE, **AS_BERT}),
        dict(name="masking + NSP", preset=bert, changes={"rows": "pair"}),
        dict(
            name="masking + SOP",
            preset="albert-base-v1",
            changes={
                "rows": "order",
                "objective.choose": "token",
                "arch.share": "none",
                "arch.embed_width": 0,
                "arch.activation": "gelu",
            },
        ),
        dict(
            name="no pretraining", preset=bert, changes=SINGLE, trained=False, seeds=3
        ),
    )
    return config
