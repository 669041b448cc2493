"""ELECTRA (Clark et al. 2020, arXiv:2003.10555, table 6).

    bert_jax train --config electra:electra-small-discriminator \
        --workdir runs/electra --config.data=corpus

A generator fills 15 % of the places (25 % in the large model), the model finds which
tokens it replaced. The published GLUE test averages: small 77.4, base 82.7, large 85.2
(google-research/electra, README).
"""

from bert_jax.configs import pretrain

SIZES = {  # rate, length, batch, steps
    "small": (5e-4, 128, 128, 1_000_000),
    "base": (2e-4, 512, 256, 766_000),
    "large": (2e-4, 512, 2048, 400_000),
}


def get_config(arg: str = "electra-small-discriminator"):
    config = pretrain.get_config(arg)
    size = next((size for size in SIZES if size in arg), "base")
    config.optim.lr, config.length, config.batch, config.steps = SIZES[size]
    config.optim.warmup = 10_000.0
    return config
