"""Chinese BERT with whole words hidden (Cui et al. 2021, arXiv:1906.08101).

    bert_jax prepare --words jieba --tokenizer bert-base-chinese --out corpus text.txt
    bert_jax train --config bert_wwm:chinese-bert-wwm --workdir runs/wwm \
        --config.data=corpus --config.init=bert-base-chinese

Goes on from BERT's Chinese weights: 100,000 steps of 2,560 rows of 128 tokens, then
100,000 of 384 rows of 512, with a line of the rate for each; it warms up for 1 % of the
steps, as BERT does, since the README gives no warm-up. Words are LTP's in the release,
jieba's here. Published: F1 85.6 at best, 84.7 on average, on CMRC 2018 dev
(ymcui/Chinese-BERT-wwm, README).
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "chinese-bert-wwm"):
    config = pretrain.get_config(arg)
    config.steps = 200_000
    config.optim.update({"name": "lamb", "variant": "google", "lr": 1e-4})
    config.stages = (
        {"steps": 100_000, "length": 128, "batch": 2560, "optim.lr": 1e-4},
        {"steps": 100_000, "length": 512, "batch": 384, "optim.lr": 1e-4},
    )
    return config
