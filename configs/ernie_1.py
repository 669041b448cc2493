"""ERNIE 1.0 (Sun et al. 2019, arXiv:1904.09223): what is hidden grows by stages.

    bert_jax prepare --words tags --tokenizer ernie-1.0 --out corpus tagged.txt
    bert_jax train --config ernie_1:ernie-1.0-base-zh --workdir runs/ernie \
        --config.data=corpus

First single characters are hidden; then whole phrases, too; then also the names of
people, places and other entities: what a stage brings in, those after it keep. The text
must say where units begin (`prepare --words tags`). The paper does not give its steps
and rates: these are BERT's, a third of them for each kind of unit. Published: 78.4 % on
XNLI test, 95.4 % on ChnSentiCorp test (PaddlePaddle/ERNIE, README).
"""

from bert_jax.configs import pretrain

from bert_jax.continual import spread


def get_config(arg: str = "ernie-1.0-base-zh"):
    config = pretrain.get_config(arg)
    config.length = 512
    config.steps = 999_999
    config.optim.warmup = 10_000.0
    config.tasks = (
        ("characters", {"objective.choose": "token"}),
        ("phrases", {"objective.choose": "word", "objective.unit": "phrases"}),
        ("entities", {"objective.choose": "word", "objective.unit": "entities"}),
    )
    config.stages = spread({name: config.steps // 3 for name, _ in config.tasks})
    return config
