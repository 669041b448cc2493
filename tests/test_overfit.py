"""Every kind of member learns one batch by heart, through the one loop.

UniLM learns in three of its forms, as full rows have no part B, SpanBERT also from the
borders of its spans, XLNet and Transformer-XL without a memory, for which rows must go
on, and ELECTRA, which knows the rows by heart, finds what was replaced in them (the
share of all tokens that are as they were says nothing).
"""

import pytest

from bert_jax.config import load_config, override, resolve
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.parity import tiny as tiny_arch
from bert_jax.presets import preset
from bert_jax.train import train
from tests import tiny

MEMBERS = [
    *("bert-tiny", "roberta-base", "albert-base-v2", "electra-small-discriminator"),
    *("distilbert-base-uncased", "ernie-2.0-base-en", "nezha-cn-base", "gpt2"),
    *("xlnet-base-cased", "transfo-xl-wt103", "openai-gpt", "unilm-base-cased"),
    *("longformer-base-4096", "electra-small-generator", "ernie-1.0-base-zh"),
    *("transfo-xl-wt103-base", "spanbert-base-cased"),
]


@pytest.fixture(scope="module")
def few_words(tmp_path_factory):
    """A corpus of just one batch of rows."""
    folder = tmp_path_factory.mktemp("one-batch")
    text = tiny.write_text(folder / "text.txt", documents=1)
    tokenizer = tiny.make_tokenizer(folder=folder)
    corpus = prepare(
        [str(text)], tokenizer=tokenizer, out=folder / "corpus", progress=False
    )
    assert len(Rows(corpus, "full", 20, "attend", 0)) == 8
    return corpus


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_overfits_one_batch(few_words, tmp_path, name: str):
    member = preset(name)
    toy, two_towers = tiny_arch(member.arch), member.objective == "replaced_token"
    config = load_config(f"pretrain:{name}")
    sizes = ("width", "layers", "heads", "inner", "max_positions", "embed_width")
    sizes += ("window", "max_distance", "types", "task_types")
    override(
        config,
        {f"arch.{size}": str(getattr(toy, size)) for size in sizes}
        | {"arch.dropout": "0", "arch.attention_dropout": "0"}
        | {"arch.init_std": "0.1", "optim.lr": "5e-3", "optim.warmup": "0.1"}
        | {"data": str(few_words.path), "rows": "full", "length": "20", "batch": "8"}
        | {"steps": "1500" if two_towers else "500", "optim.name": "adamw"}
        | {"log_every": "100"}
        | ({"objective.memory": "0"} if "memory" in member.hyper else {}),
    )
    result = train(resolve(config), tmp_path / "run", progress=False)
    scores = result["train"]
    for kind in ("recall", "precision") if two_towers else ("accuracy",):
        score = scores[f"{member.objective}_{kind}"]
        print(name, kind, score, scores["loss"])
        assert score > 0.9
