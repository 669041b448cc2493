"""ELECTRA in two stages (Clark et al. 2020, arXiv:2003.10555, section 3.2).

    bert_jax train --config electra_two_stage --workdir runs/two_stage \
        --config.data=corpus

A generator as large as the model learns first, alone; then the model starts from its
weights and learns to find what it replaced, while the generator stays as it is, and so
do the tables that both read: moved for the model, they would undo what the generator
has learned. In the paper this falls behind training both together: it is a curve in
figure 3, without a number; both together reach 77.4 on GLUE test with the small model
(electra.py).
"""

from bert_jax.configs import electra


def get_config(arg: str = "electra-small-discriminator"):
    config = electra.get_config(arg)
    config.objective.generator = 1.0
    half = config.steps // 2
    begin = {"optim.lr": config.optim.lr, "moments": "reset"}
    # Decay would move what has no gradient.
    only_generator = (("^(generator|embed)/", 1.0), (".*", 0.0))
    all_else = (("^(generator|embed)/", 0.0), (".*", 1.0))
    config.stages = (
        begin
        | {"steps": half, "objective.phase": "generator"}
        | {"optim.rate_rules": only_generator},
        begin
        | {"steps": config.steps - half, "objective.phase": "discriminator"}
        | {"optim.rate_rules": all_else},
    )
    return config
