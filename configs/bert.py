"""BERT (Devlin et al. 2019, arXiv:1810.04805, appendix A.2).

    bert_jax train --config bert:bert-base-uncased --workdir runs/bert \
        --config.data=corpus

One million steps of 256 rows: 900,000 of them with 128 tokens a row, the rest with 512,
under one line of the learning rate. The published BERT-base reaches F1 88.41 and exact
match 81.25 on SQuAD 1.1 dev, BERT-large 90.87 and 84.39 (google-research/bert, README).
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "bert-base-uncased"):
    config = pretrain.get_config(arg)  # its optimizer and its rate
    config.batch = 256
    config.steps = 1_000_000
    config.optim.warmup = 10_000.0
    config.stages = (
        {"steps": 900_000, "length": 128},
        {"steps": 100_000, "length": 512},
    )
    return config
