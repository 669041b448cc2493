"""Pretraining with BERT's recipe (Devlin et al. 2019, appendix A.2).

    bert_jax train --config pretrain:bert-tiny --workdir runs/tiny \
        --config.data=corpus --config.steps=10000

The paper trains 1M steps of 256 rows: 90 % of them with length 128, the rest with
length 512: configs/bert.py has both as stages.
"""

from bert_jax.config import from_preset
from bert_jax.optim import ALL_ALIKE, DECAY


def get_config(arg: str = "bert-base-uncased"):
    config = from_preset(arg)  # preset, rows, arch.*, objective.*

    config.data = ""  # corpus made by `bert_jax prepare`
    config.across = "attend"  # or block: no attention across documents in a row
    config.direction = "forward"  # or both: half of a stream's batch goes backwards
    config.alpha = 1.0  # inputs are sampled by share ** alpha (languages: 0.7, 0.3)
    config.length = 128
    config.batch = 256
    config.steps = 1_000_000
    config.seed = 0
    config.init = ""  # workdir or Hugging Face directory to go on from
    config.dtype = "auto"  # bfloat16 on TPU, float32 elsewhere

    config.optim = {
        "name": "bert_adamw",  # or adamw, lamb, adafactor
        "variant": "google",  # of lamb: paper, nvidia, google, albert, optax
        "lr": 1e-4,
        "schedule": "bert",  # or linear, polynomial, cosine, rsqrt, constant
        "warmup": 0.01,  # 10,000 of 1M steps
        "power": 1.0,  # of the polynomial
        "decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "clip": 1.0,
        "layer_decay": 1.0,  # each layer learns that much slower than the one above
        "layer_form": "paper",  # or electra
        "decay_rules": DECAY,  # (regex, times decay), the first match decides
        "rate_rules": ALL_ALIKE,  # (regex, times lr); 0 is frozen
    }
    config.eval = {"data": "", "every": 1000, "rows": 1024}
    config.log_every = 50
    config.save_every = 1000
    config.keep = 3
    return config
