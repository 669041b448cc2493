"""BERT in 76 minutes: LAMB with batches of 64k and 32k rows (You et al. 2020,
arXiv:1904.00962).

    bert_jax train --config lamb:bert-large-uncased --workdir runs/lamb \
        --config.data=corpus --config.accumulate=16

7,038 steps of 65,536 rows of 128 tokens, then 1,563 of 32,768 rows of 512, which warm
up again from 0. Rates, warm-up and the power of 0.5 are those of NVIDIA's release (Deep
LearningExamples, TensorFlow, BERT). The paper: F1 90.584 on SQuAD 1.1 dev after 8,599
steps, 76.19 minutes on 1,024 TPU chips; with Adam and 512 rows a batch 90.395, in 81.4
hours on 16.
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "bert-large-uncased"):
    config = pretrain.get_config(arg)
    config.batch = 65_536
    config.steps = 7038 + 1563
    config.optim.update(
        {"name": "lamb", "variant": "nvidia", "schedule": "polynomial", "power": 0.5}
    )
    config.stages = (
        {
            "steps": 7038,
            "length": 128,
            "batch": 65_536,
            "optim.lr": 6e-3,
            "optim.warmup": 0.2843,
        },
        {
            "steps": 1563,
            "length": 512,
            "batch": 32_768,
            "optim.lr": 4e-3,
            "optim.warmup": 0.128,
        },
    )
    return config
