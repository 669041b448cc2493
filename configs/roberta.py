"""RoBERTa (Liu et al. 2019, arXiv:1907.11692, table 9).

    bert_jax train --config roberta:roberta-base --workdir runs/roberta \
        --config.data=corpus

Full rows of 512 tokens, batches of 8,192, no next sentence, no clipping, what is hidden
drawn anew at every step (--config.copies=10 is the static baseline of section 4.1: ten
copies of every row). The published GLUE dev scores of roberta-base: MNLI 87.6, QNLI
92.8, QQP 91.9, RTE 78.7, SST-2 94.8, MRPC 90.2, CoLA 63.6, STS-B 91.2.
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "roberta-base"):
    config = pretrain.get_config(arg)
    large = "large" in arg
    config.length = 512
    config.batch = 8192
    config.steps = 500_000
    config.optim.update(
        {
            "name": "adamw",
            "lr": 4e-4 if large else 6e-4,
            "warmup": 30_000.0 if large else 24_000.0,
            "schedule": "linear",
            "beta2": 0.98,
            "clip": 0.0,
        }
    )
    return config
