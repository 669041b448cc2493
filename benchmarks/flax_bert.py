"""A training step of Hugging Face's last models in Flax, compiled for a TPU pod.

    python flax_bert.py OUT --topology v5e:4x4 --rows 32 --length 128 --dropout rbg

For benchmarks/tpu_compile.py, which runs it in an environment that has transformers
4.57.6: the last release with models in Flax. BERT-large, or ELECTRA-large's generator
(a masked LM, too) or discriminator. Data parallel, bfloat16, AdamW with clipping, every
position scored, as its own example (run_mlm_flax.py) trains. Writes the compiled
program to OUT and its figures beside it.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import BertConfig, ElectraConfig
from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule
from transformers.models.electra.modeling_flax_electra import (
    FlaxElectraForMaskedLMModule,
    FlaxElectraForPreTrainingModule,
)

LARGE = dict(
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=4096,
    vocab_size=30592,  # as we pad it
)
QUARTER = dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024)
MODELS = {
    "bert": (FlaxBertForMaskedLMModule, BertConfig, LARGE),
    "generator": (
        FlaxElectraForMaskedLMModule,
        ElectraConfig,
        LARGE | QUARTER | dict(embedding_size=1024),
    ),
    "discriminator": (
        FlaxElectraForPreTrainingModule,
        ElectraConfig,
        LARGE | dict(embedding_size=1024),
    ),
}


def losses_of(logits, labels):
    """Of pieces [B, S, V], or of whether a token was replaced [B, S]."""
    logits, labels = logits.astype(jnp.float32), jnp.maximum(labels, 0)
    if logits.ndim == labels.ndim:
        return optax.sigmoid_binary_cross_entropy(logits, labels > 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def train_step(model, optimizer, params, opt_state, batch, seed):
    def loss_of(params):
        logits = model.apply(
            {"params": params},
            batch["ids"],
            batch["real"],
            jnp.zeros_like(batch["ids"]),
            jnp.broadcast_to(jnp.arange(batch["ids"].shape[1]), batch["ids"].shape),
            jnp.ones(
                (model.config.num_hidden_layers, model.config.num_attention_heads)
            ),
            deterministic=False,
            rngs={"dropout": jax.random.key(seed)},
        ).logits
        losses = losses_of(logits, batch["labels"])
        predicted = batch["labels"] >= 0
        return (losses * predicted).sum() / predicted.sum()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--rows", type=int, default=32, help="on each chip")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--model", choices=MODELS, default="bert")
    parser.add_argument("--dropout", choices=("threefry2x32", "rbg"), default="rbg")
    told = parser.parse_args()
    jax.config.update("jax_default_prng_impl", told.dropout)

    devices = topologies.get_topology_desc(told.topology, platform="tpu").devices
    mesh = Mesh(devices, ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    module, config_class, sizes = MODELS[told.model]
    config = config_class(num_hidden_layers=told.layers, **sizes)
    model = module(config, dtype=jnp.bfloat16)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01)
    )

    def fresh():
        ids = jnp.zeros((1, 2), jnp.int32)
        heads = jnp.ones((told.layers, config.num_attention_heads))
        params = model.init(jax.random.key(0), ids, ids, ids, ids, heads)["params"]
        return params, optimizer.init(params)

    def placed(leaf, place) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    state = jax.tree.map(lambda x: placed(x, everywhere), jax.eval_shape(fresh))
    rows = jax.ShapeDtypeStruct((told.rows * len(devices), told.length), jnp.int32)
    batch = {name: placed(rows, by_rows) for name in ("ids", "real", "labels")}
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=everywhere)

    def step(*arguments):
        return train_step(model, optimizer, *arguments)

    out = (everywhere, everywhere, everywhere)
    lowered = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(
        *state, batch, seed
    )
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    told_memory = compiled.memory_analysis()
    told.out.write_text(compiled.as_text())
    sizes = [
        told_memory.argument_size_in_bytes,
        told_memory.output_size_in_bytes - told_memory.alias_size_in_bytes,
        told_memory.temp_size_in_bytes,
        told_memory.generated_code_size_in_bytes,
    ]
    found = {"compile_seconds": seconds, "needed": sum(sizes)}
    told.out.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
