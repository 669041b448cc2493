"""ERNIE 1.0 (Sun et al. 2019, arXiv:1904.09223): what is hidden grows by stages.

    bert_jax prepare --words tags --tokenizer ernie-1.0 --out corpus tagged.txt
    bert_jax train --config ernie_1:ernie-1.0-base-zh --workdir runs/ernie \
        --config.data=corpus

First single characters, then phrases, then the names of people, places and other
entities, each hidden as a whole; the text must say where they begin (`prepare --words
tags`). The paper does not give its steps and rates: these are BERT's, in three equal
parts. Published: 78.4 % on XNLI test, 95.4 % on ChnSentiCorp test.
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "ernie-1.0-base-zh"):
    config = pretrain.get_config(arg)
    config.length = 512
    config.steps = 999_999
    config.optim.warmup = 10_000.0
    third = config.steps // 3
    config.stages = (
        {"steps": third, "objective.choose": "token"},
        {"steps": third, "objective.choose": "word", "objective.unit": "phrases"},
        {"steps": third, "objective.choose": "word", "objective.unit": "entities"},
    )
    return config
