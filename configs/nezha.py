"""NEZHA (Wei et al. 2019, arXiv:1909.00204, section 3).

    bert_jax prepare --words jieba --tokenizer bert-base-chinese --out corpus text.txt
    bert_jax train --config nezha:nezha-cn-base --workdir runs/nezha \
        --config.data=corpus

Relative positions, whole words hidden, LAMB, bfloat16, rows of 128 tokens. The rate and
the batch are those of the LAMB paper's row for 4,096 rows (You et al. 2020), not the
report's own. Published: 94.75 % on ChnSenti for the base model with whole words hidden
(the TensorFlow release, in the README of lonePatient/NeZha_Chinese_PyTorch, which names
no split); the report's own table was not at hand to check it.
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "nezha-cn-base"):
    config = pretrain.get_config(arg)
    config.objective.choose = "word"
    config.length = 128
    config.batch = 4096
    config.steps = 125_000
    config.optim.update(
        {
            "name": "lamb",
            "variant": "nvidia",
            "lr": 1.768e-3,
            "warmup": 1 / 40,
            "schedule": "polynomial",
        }
    )
    return config
