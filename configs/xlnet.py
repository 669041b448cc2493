"""XLNet (Yang et al. 2019, arXiv:1906.08237, appendix A.4).

    bert_jax train --config xlnet:xlnet-large-cased --workdir runs/xlnet \
        --config.data=corpus

The words of a row are predicted in a random order, one in six of them; the text before
the row is read from memory, and half of a batch runs backwards. Published scores of
xlnet-large (zihangdai/xlnet, README): MNLI dev 89.8, exact match 86.12 on SQuAD 2.0
dev, RACE test 81.75.
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "xlnet-large-cased"):
    config = pretrain.get_config(arg)
    config.direction = "both"
    config.length = 512
    config.batch = 8192
    config.steps = 500_000
    config.optim.update(
        {"name": "adamw", "lr": 4e-4, "warmup": 40_000.0, "schedule": "linear"}
    )
    return config
