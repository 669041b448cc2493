"""bf16 keeps 8 bits: the states and logits of every member agree with f32 to 2 %, with
sharp attention too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.model import Model
from bert_jax.models.tokens import remember
from bert_jax.parity import random_rows, sharp_params, tiny
from bert_jax.presets import preset
from tests.models.made import quick_jit

MEMBERS = [
    "bert-tiny",
    "roberta-base",
    "albert-base-v2",
    "electra-small-discriminator",
    "distilbert-base-uncased",
    "ernie-2.0-base-en",
    "nezha-cn-base",
    "xlnet-base-cased",
    "transfo-xl-wt103",
    "openai-gpt",
    "gpt2",
    "unilm-base-cased",
    "longformer-base-4096",
]
AGREES = 2e-2  # max|a-b| <= AGREES max|b|


@pytest.mark.parametrize("name", MEMBERS)
def test_bf16_agrees(name: str):
    arch = tiny(preset(name).arch).but(stack="scan")
    rows = random_rows(arch, [24, 17], 24)
    tokens = rows.tokens(arch)
    asks = dict(capture=("hidden",), heads=("lm",))
    if arch.streams == 2:
        where = jnp.array([[1, 7, 20], [16, 0, 3]])
        asks |= dict(capture=("hidden", "query"), streams=2, where=where)

    @quick_jit
    def compute(params):
        results = {}
        for dtype in (jnp.float32, jnp.bfloat16):
            call = partial(Model(arch, dtype=dtype).apply, {"params": params}, tokens)
            out = call(**asks)
            if arch.position == "xl":  # the same text, read on
                memory = remember(tokens, out["hidden"], length=24)
                after = call(**asks, memory=memory)
                out |= {f"{name} after": leaf for name, leaf in after.items()}
            results[dtype.__name__] = out
        return results

    results = jax.device_get(compute(sharp_params(arch, heads=("lm",))))
    exact, half = results["float32"], results["bfloat16"]
    assert exact.keys() == half.keys()
    for output in exact:
        logits = output.startswith("lm")
        assert half[output].dtype == (jnp.float32 if logits else jnp.bfloat16)
        a, b = half[output].astype(np.float32), exact[output]
        if output.startswith("hidden"):
            a, b = a[:, rows.real], b[:, rows.real]
        if logits:
            a, b = (x[..., : arch.vocab_size] for x in (a, b))
        a, b = (x.reshape(len(x), -1) for x in (a, b))  # each layer by itself
        allowed = AGREES * np.abs(b).max(1)
        assert (np.abs(a - b).max(1) <= allowed).all(), output
    assert np.abs(exact["last"] - half["last"].astype(np.float32)).max() > 0
