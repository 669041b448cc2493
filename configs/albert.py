"""ALBERT (Lan et al. 2020, arXiv:1909.11942, section 4.1).

    bert_jax train --config albert:albert-base-v2 --workdir runs/albert \
        --config.data=corpus

LAMB with a rate of 0.00176 and batches of 4,096; n-grams of up to three words are
hidden, and the model says which of two stretches of text came first. The published
averages over five tasks of version 2: base 82.3, large 85.7, xlarge 87.9, xxlarge 90.9
(google-research/albert, README).
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "albert-base-v2"):
    config = pretrain.get_config(arg)
    config.length = 512
    config.batch = 4096
    config.steps = 125_000
    config.optim.update(
        {
            "name": "lamb",
            "variant": "albert",
            "lr": 0.00176,
            "warmup": 3125.0,
            "schedule": "polynomial",
        }
    )
    return config
