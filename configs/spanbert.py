"""SpanBERT (Joshi et al. 2020, arXiv:1907.10529, section 4.2 and appendix B).

    bert_jax train --config spanbert:spanbert-base-cased --workdir runs/spanbert \
        --config.data=corpus

Spans of whole words are hidden (3.8 words on average) and predicted twice: from their
own place, and from what stands before and after them. Rows hold one document. The
published spanbert-large reaches F1 94.6 on SQuAD 1.1 and 88.7 on 2.0 (test), the base
92.4 and 83.6 (dev; facebookresearch/SpanBERT, README).
"""

from bert_jax.configs import pretrain


def get_config(arg: str = "spanbert-base-cased"):
    config = pretrain.get_config(arg)
    config.length = 512
    config.batch = 256
    config.steps = 2_400_000
    config.optim.update(
        {
            "name": "adamw",
            "lr": 1e-4,
            "warmup": 10_000.0,
            "schedule": "linear",
            "eps": 1e-8,
        }
    )
    return config
