"""TF1 checkpoints under the names of Google's releases, written here name by name."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import torch
import transformers

import bert_jax
from bert_jax.convert.tf1 import is_tf1, read_tf1
from bert_jax.errors import InputError

# A variable, the tensor of transformers, and T where it is transposed, S where one
# variable has all layers. They are the lists of the releases, not of the code.
EMBEDDINGS = """
{0}/embeddings/word_embeddings {1}.embeddings.word_embeddings.weight
{0}/embeddings/position_embeddings {1}.embeddings.position_embeddings.weight
{0}/embeddings/token_type_embeddings {1}.embeddings.token_type_embeddings.weight
{0}/embeddings/LayerNorm/gamma {1}.embeddings.LayerNorm.weight
{0}/embeddings/LayerNorm/beta {1}.embeddings.LayerNorm.bias
"""
LAYER = """
{0}/attention/self/query/kernel {1}.attention.self.query.weight T
{0}/attention/self/query/bias {1}.attention.self.query.bias
{0}/attention/self/key/kernel {1}.attention.self.key.weight T
{0}/attention/self/key/bias {1}.attention.self.key.bias
{0}/attention/self/value/kernel {1}.attention.self.value.weight T
{0}/attention/self/value/bias {1}.attention.self.value.bias
{0}/attention/output/dense/kernel {1}.attention.output.dense.weight T
{0}/attention/output/dense/bias {1}.attention.output.dense.bias
{0}/attention/output/LayerNorm/gamma {1}.attention.output.LayerNorm.weight
{0}/attention/output/LayerNorm/beta {1}.attention.output.LayerNorm.bias
{0}/intermediate/dense/kernel {1}.intermediate.dense.weight T
{0}/intermediate/dense/bias {1}.intermediate.dense.bias
{0}/output/dense/kernel {1}.output.dense.weight T
{0}/output/dense/bias {1}.output.dense.bias
{0}/output/LayerNorm/gamma {1}.output.LayerNorm.weight
{0}/output/LayerNorm/beta {1}.output.LayerNorm.bias
"""
BERT = """
bert/pooler/dense/kernel bert.pooler.dense.weight T
bert/pooler/dense/bias bert.pooler.dense.bias
cls/predictions/transform/dense/kernel cls.predictions.transform.dense.weight T
cls/predictions/transform/dense/bias cls.predictions.transform.dense.bias
cls/predictions/transform/LayerNorm/gamma cls.predictions.transform.LayerNorm.weight
cls/predictions/transform/LayerNorm/beta cls.predictions.transform.LayerNorm.bias
cls/predictions/output_bias cls.predictions.bias
cls/seq_relationship/output_weights cls.seq_relationship.weight
cls/seq_relationship/output_bias cls.seq_relationship.bias
"""
ALBERT = """
bert/encoder/embedding_hidden_mapping_in/kernel {in}.weight T
bert/encoder/embedding_hidden_mapping_in/bias {in}.bias
bert/pooler/dense/kernel albert.pooler.weight T
bert/pooler/dense/bias albert.pooler.bias
cls/predictions/transform/dense/kernel predictions.dense.weight T
cls/predictions/transform/dense/bias predictions.dense.bias
cls/predictions/transform/LayerNorm/gamma predictions.LayerNorm.weight
cls/predictions/transform/LayerNorm/beta predictions.LayerNorm.bias
cls/predictions/output_bias predictions.bias
cls/seq_relationship/output_weights sop_classifier.classifier.weight
cls/seq_relationship/output_bias sop_classifier.classifier.bias
""".replace("{in}", "albert.encoder.embedding_hidden_mapping_in")
ALBERT_BLOCK = """
{0}/attention_1/self/query/kernel {1}.attention.query.weight T
{0}/attention_1/self/query/bias {1}.attention.query.bias
{0}/attention_1/self/key/kernel {1}.attention.key.weight T
{0}/attention_1/self/key/bias {1}.attention.key.bias
{0}/attention_1/self/value/kernel {1}.attention.value.weight T
{0}/attention_1/self/value/bias {1}.attention.value.bias
{0}/attention_1/output/dense/kernel {1}.attention.dense.weight T
{0}/attention_1/output/dense/bias {1}.attention.dense.bias
{0}/LayerNorm/gamma {1}.attention.LayerNorm.weight
{0}/LayerNorm/beta {1}.attention.LayerNorm.bias
{0}/ffn_1/intermediate/dense/kernel {1}.ffn.weight T
{0}/ffn_1/intermediate/dense/bias {1}.ffn.bias
{0}/ffn_1/intermediate/output/dense/kernel {1}.ffn_output.weight T
{0}/ffn_1/intermediate/output/dense/bias {1}.ffn_output.bias
{0}/LayerNorm_1/gamma {1}.full_layer_layer_norm.weight
{0}/LayerNorm_1/beta {1}.full_layer_layer_norm.bias
"""
PROJECT = """
{0}/embeddings_project/kernel electra.embeddings_project.weight T
{0}/embeddings_project/bias electra.embeddings_project.bias
"""
DISCRIMINATOR = """
{0}/dense/kernel {0}.dense.weight T
{0}/dense/bias {0}.dense.bias
{0}/dense_1/kernel {0}.dense_prediction.weight T
{0}/dense_1/bias {0}.dense_prediction.bias
""".replace("{0}", "discriminator_predictions")
GENERATOR = """
generator_predictions/dense/kernel generator_predictions.dense.weight T
generator_predictions/dense/bias generator_predictions.dense.bias
generator_predictions/LayerNorm/gamma generator_predictions.LayerNorm.weight
generator_predictions/LayerNorm/beta generator_predictions.LayerNorm.bias
generator_predictions/output_bias generator_lm_head.bias
"""
XLNET = """
model/transformer/word_embedding/lookup_table transformer.word_embedding.weight
model/transformer/mask_emb/mask_emb transformer.mask_emb
model/transformer/r_w_bias transformer.layer.{}.rel_attn.r_w_bias S
model/transformer/r_r_bias transformer.layer.{}.rel_attn.r_r_bias S
model/transformer/r_s_bias transformer.layer.{}.rel_attn.r_s_bias S
model/transformer/seg_embed transformer.layer.{}.rel_attn.seg_embed S
model/lm_loss/bias lm_loss.bias
"""
XLNET_LAYER = """
{0}/rel_attn/q/kernel {1}.rel_attn.q
{0}/rel_attn/k/kernel {1}.rel_attn.k
{0}/rel_attn/v/kernel {1}.rel_attn.v
{0}/rel_attn/o/kernel {1}.rel_attn.o
{0}/rel_attn/r/kernel {1}.rel_attn.r
{0}/rel_attn/LayerNorm/gamma {1}.rel_attn.layer_norm.weight
{0}/rel_attn/LayerNorm/beta {1}.rel_attn.layer_norm.bias
{0}/ff/layer_1/kernel {1}.ff.layer_1.weight T
{0}/ff/layer_1/bias {1}.ff.layer_1.bias
{0}/ff/layer_2/kernel {1}.ff.layer_2.weight T
{0}/ff/layer_2/bias {1}.ff.layer_2.bias
{0}/ff/LayerNorm/gamma {1}.ff.layer_norm.weight
{0}/ff/LayerNorm/beta {1}.ff.layer_norm.bias
"""
LAYERS = 2
TIED = {
    *("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *("predictions.decoder.weight", "predictions.decoder.bias"),
    *("generator_lm_head.weight", "lm_loss.weight"),
}

BERT_JSON = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "initializer_range": 0.03,
}
ALBERT_JSON = BERT_JSON | {
    "num_hidden_layers": 4,
    "embedding_size": 8,
    "num_hidden_groups": 2,
    "inner_group_num": 2,
    "net_structure_type": 0,
    "down_scale_factor": 1,
}
XLNET_JSON = {
    "n_token": 31,
    "d_model": 12,
    "n_layer": LAYERS,
    "n_head": 3,
    "d_head": 4,
    "d_inner": 20,
    "ff_activation": "gelu",
    "untie_r": True,
}


def random_model(config) -> transformers.PreTrainedModel:
    """All parameters drawn, none at its first value."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(transformers, config.architectures[0])(config).eval()
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def tensors_of(model) -> dict[str, np.ndarray]:
    return {k: v.numpy() for k, v in model.state_dict().items() if k not in TIED}


def variables_of(model, *tables: str) -> dict[str, np.ndarray]:
    """Its tensors under the names of a release; all of them must be in the tables."""
    tensors, variables = tensors_of(model), {}
    for line in "\n".join(tables).split("\n"):
        theirs, name, how = [*line.split(), "", "", ""][:3]
        if how == "S":
            parts = [tensors.pop(name.format(n)) for n in range(LAYERS)]
            variables[theirs] = np.stack(parts)
        elif theirs:
            tensor = tensors.pop(name)
            variables[theirs] = tensor.T if how == "T" else tensor
    assert not tensors
    return variables


def layers(theirs: str, name: str, table: str = LAYER) -> str:
    return "".join(table.format(f"{theirs}{n}", f"{name}.{n}") for n in range(LAYERS))


def with_training(variables: dict[str, np.ndarray], *slots: str) -> dict:
    state = {f"{name}/{s}": v * 0 + 1 for name, v in variables.items() for s in slots}
    return variables | state | {"global_step": np.int64(7)}


def save(path: Path, variables: dict[str, np.ndarray]) -> None:
    v1 = tf.compat.v1
    path.parent.mkdir(exist_ok=True)
    with tf.Graph().as_default(), v1.Session() as session:
        made = [v1.get_variable(n, initializer=v) for n, v in variables.items()]
        session.run(v1.global_variables_initializer())
        v1.train.Saver(made).save(session, str(path), write_meta_graph=False)
    (path.parent / "checkpoint").unlink()


def change(folder: Path, pattern: str, new) -> None:
    (path,) = folder.glob(pattern)
    path.write_bytes(new(path.read_bytes()))


def bert_model():
    given = BERT_JSON | {"hidden_act": "gelu_new"}
    given["architectures"] = ["BertForPreTraining"]
    return random_model(transformers.BertConfig(**given))


def bert_variables(model) -> dict[str, np.ndarray]:
    blocks = layers("bert/encoder/layer_", "bert.encoder.layer")
    return variables_of(model, EMBEDDINGS.format("bert", "bert"), blocks, BERT)


def electra_model(name: str, *, hidden: int, embedded: int):
    config = transformers.ElectraConfig(
        vocab_size=31,
        embedding_size=embedded,
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        intermediate_size=40,
        max_position_embeddings=16,
        hidden_act="gelu",
        architectures=[name],
    )
    return random_model(config)


def xlnet_model():
    config = transformers.XLNetConfig(
        vocab_size=31,
        d_model=12,
        n_layer=LAYERS,
        n_head=3,
        d_inner=20,
        ff_activation="gelu_new",
        architectures=["XLNetLMHeadModel"],
    )
    return random_model(config)


def xlnet_variables(model) -> dict[str, np.ndarray]:
    blocks = layers("model/transformer/layer_", "transformer.layer", XLNET_LAYER)
    return variables_of(model, XLNET, blocks)


@pytest.fixture(scope="module")
def bert() -> dict[str, np.ndarray]:
    return bert_variables(bert_model())


@pytest.fixture
def folder(tmp_path: Path, bert) -> Path:
    """A release of BERT."""
    save(tmp_path / "bert/bert_model.ckpt", bert)
    (tmp_path / "bert/bert_config.json").write_text(json.dumps(BERT_JSON))
    return tmp_path / "bert"


def check(folder: Path, model, **options) -> dict:
    """What is read makes the same model: each tensor, and what it computes."""
    assert is_tf1(folder)
    config, tensors = read_tf1(folder, **options)
    expected = tensors_of(model)
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
        assert tensor.dtype == np.float32

    assert config["architectures"] == model.config.architectures
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    with torch.no_grad():
        made = getattr(transformers, config["architectures"][0])(
            kind.from_dict(config)
        ).eval()
        state = {name: torch.tensor(np.array(t)) for name, t in tensors.items()}
        lost = made.load_state_dict(state, strict=False)
        assert set(lost.missing_keys) <= TIED
        assert lost.unexpected_keys == []
        ids = torch.arange(14).reshape(2, 7)
        types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
        ours = made(input_ids=ids, token_type_ids=types)[0]
        theirs = model(input_ids=ids, token_type_ids=types)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    # And the whole way, into our own model.
    loaded = bert_jax.load(folder, **options)
    assert loaded.preset.layout == config["model_type"]
    named = loaded(ids.numpy(), token_type_ids=types.numpy())
    logits = named["rtd_logits" if "rtd" in loaded.heads else "logits"]
    largest = float(theirs.abs().max())
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-5 * max(1, largest))
    return config


# The four releases.


def test_bert(tmp_path):
    model = bert_model()
    variables = with_training(bert_variables(model), "adam_m", "adam_v")
    save(tmp_path / "bert_model.ckpt", variables)
    (tmp_path / "bert_config.json").write_text(
        json.dumps(BERT_JSON | {"directionality": "bidi"})
    )
    assert check(tmp_path, model) == BERT_JSON | {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-12,
    }


@pytest.mark.parametrize("scope", ["", "module/"])
def test_albert(tmp_path, scope):
    given = ALBERT_JSON | {"hidden_act": "gelu_new"}
    given["architectures"] = ["AlbertForPreTraining"]
    model = random_model(transformers.AlbertConfig(**given))
    blocks = [
        ALBERT_BLOCK.format(
            f"bert/encoder/transformer/group_{group}/inner_group_{inner}",
            f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}",
        )
        for group in range(2)
        for inner in range(2)
    ]
    embeddings = EMBEDDINGS.format("bert", "albert")
    variables = variables_of(model, embeddings, ALBERT, *blocks)
    slots = ["LAMB", "LAMB_1", "AdamWeightDecayOptimizer", "adam_m", "adam_v"]
    variables = with_training(variables, *slots)
    variables = {f"{scope}{name}": tensor for name, tensor in variables.items()}
    if scope:  # one module, as TF Hub has it, knows no step
        del variables["module/global_step"]
    save(tmp_path / "model.ckpt-best", variables)
    (tmp_path / "albert_config.json").write_text(json.dumps(ALBERT_JSON))
    config = check(tmp_path, model)
    assert config["hidden_act"] == "gelu_new"
    assert (config["num_hidden_groups"], config["inner_group_num"]) == (2, 2)


def electra_release(folder: Path, *, embedded: int, own: bool = False):
    """Both towers; `own` for a generator with embeddings of its own."""
    big = electra_model("ElectraForPreTraining", hidden=128, embedded=embedded)
    small = electra_model("ElectraForMaskedLM", hidden=64, embedded=embedded)
    if not own:
        small.electra.embeddings.load_state_dict(big.electra.embeddings.state_dict())
    tables = [layers("electra/encoder/layer_", "electra.encoder.layer"), DISCRIMINATOR]
    if embedded != 128:
        tables.append(PROJECT.format("electra"))
    variables = variables_of(big, EMBEDDINGS.format("electra", "electra"), *tables)
    embeddings = EMBEDDINGS.format("generator" if own else "electra", "electra")
    variables |= variables_of(
        small,
        embeddings,
        PROJECT.format("generator"),
        layers("generator/encoder/layer_", "electra.encoder.layer"),
        GENERATOR,
    )
    # The release has no ".ckpt" in its names.
    save(folder / "electra_small", with_training(variables, "adam_m", "adam_v"))
    return big, small


@pytest.mark.parametrize("embedded", [32, 128])
def test_electra(tmp_path, embedded):
    big, small = electra_release(tmp_path, embedded=embedded)
    config = check(tmp_path, big)
    assert config == {
        "model_type": "electra",
        "architectures": ["ElectraForPreTraining"],
        "vocab_size": 31,
        "embedding_size": embedded,
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
    }
    config = check(tmp_path, small, tower="generator")
    assert (config["hidden_size"], config["num_attention_heads"]) == (64, 1)


def test_electra_generator_with_its_own_embeddings(tmp_path):
    big, small = electra_release(tmp_path, embedded=32, own=True)
    check(tmp_path, big)
    check(tmp_path, small, tower="generator")


def test_electra_of_the_bert_objective(tmp_path):
    """One tower for both: the masked language model has the discriminator's names."""
    model = electra_model("ElectraForMaskedLM", hidden=64, embedded=64)
    blocks = layers("electra/encoder/layer_", "electra.encoder.layer")
    embeddings = EMBEDDINGS.format("electra", "electra")
    save(tmp_path / "model.ckpt-9", variables_of(model, embeddings, blocks, GENERATOR))
    check(tmp_path, model, tower="generator")


def test_xlnet(tmp_path):
    model = xlnet_model()
    variables = with_training(xlnet_variables(model), "Adam", "Adam_1")
    variables |= {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.99)}
    save(tmp_path / "xlnet_model.ckpt", variables)
    (tmp_path / "xlnet_config.json").write_text(json.dumps(XLNET_JSON))
    assert check(tmp_path, model) == {
        "model_type": "xlnet",
        "architectures": ["XLNetLMHeadModel"],
        "vocab_size": 31,
        "d_model": 12,
        "n_layer": LAYERS,
        "n_head": 3,
        "d_head": 4,
        "d_inner": 20,
        "ff_activation": "gelu_new",
        "untie_r": True,
        "layer_norm_eps": 1e-12,
    }


def test_xlnet_with_the_same_biases_in_all_layers(tmp_path):
    model = xlnet_model()
    first, *others = (block.rel_attn for block in model.transformer.layer)
    shared = ("r_w_bias", "r_r_bias", "r_s_bias")
    with torch.no_grad():
        for other in others:
            for name in shared:
                getattr(other, name).copy_(getattr(first, name))
    variables = xlnet_variables(model)
    for name in shared:
        variables[f"model/transformer/{name}"] = getattr(first, name).detach().numpy()
    save(tmp_path / "model.ckpt", variables)
    tied = XLNET_JSON | {"untie_r": False, "ff_activation": "relu"}
    (tmp_path / "xlnet_config.json").write_text(json.dumps(tied))
    model.config.ff_activation = "relu"
    remade = type(model)(model.config).eval()
    remade.load_state_dict(model.state_dict())
    assert check(tmp_path, remade)["untie_r"]  # each layer has its own copy


def test_xlnet_output_that_is_not_tied(tmp_path):
    output = np.full((31, 12), 3, np.float32)
    variables = xlnet_variables(xlnet_model()) | {"model/lm_loss/weight": output}
    save(tmp_path / "model.ckpt", variables)
    (tmp_path / "xlnet_config.json").write_text(json.dumps(XLNET_JSON))
    np.testing.assert_array_equal(read_tf1(tmp_path)[1]["lm_loss.weight"], output)


def test_bfloat16_is_read_as_float32(folder, bert):
    half = {k: v.astype(tf.bfloat16.as_numpy_dtype) for k, v in bert.items()}
    save(folder / "bert_model.ckpt", half)
    pooler = read_tf1(folder)[1]["bert.pooler.dense.weight"]
    assert pooler.dtype == np.float32
    expected = half["bert/pooler/dense/kernel"].astype(np.float32).T
    np.testing.assert_array_equal(pooler, expected)


# Which checkpoint.


def test_the_newest_of_several(folder, bert):
    newer = {name: tensor + 1 for name, tensor in bert.items()}
    save(folder / "model.ckpt-20", newer)
    (folder / "checkpoint").write_text(
        'model_checkpoint_path: "/gone/on/another/machine/model.ckpt-20"\n'
        'all_model_checkpoint_paths: "bert_model.ckpt"\n'
    )
    bias = read_tf1(folder)[1]["cls.predictions.bias"]
    np.testing.assert_array_equal(bias, newer["cls/predictions/output_bias"])


def test_several_without_a_checkpoint_file(folder, bert):
    save(folder / "model.ckpt-20", bert)
    with pytest.raises(InputError) as raised:
        read_tf1(folder)
    assert str(raised.value) == (
        f"{folder} holds several checkpoints and no file `checkpoint` that says which "
        "is the newest: bert_model.ckpt, model.ckpt-20. Leave only one of them there"
    )


def test_a_checkpoint_file_that_names_another(folder):
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-20"\n')
    with pytest.raises(InputError) as raised:
        read_tf1(folder)
    assert str(raised.value) == (
        f"{folder}/checkpoint names model.ckpt-20, but there is no model.ckpt-20.index "
        "(found: bert_model.ckpt). Remove that file if another is meant"
    )


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"nonsense {"])
def test_a_damaged_checkpoint_file(folder, content):
    (folder / "checkpoint").write_bytes(content)
    with pytest.raises(InputError, match="checkpoint is damaged: it has no model_che"):
        read_tf1(folder)


def test_which_folders_are_tf1(folder, tmp_path):
    assert is_tf1(folder)
    assert not is_tf1(tmp_path)
    assert not is_tf1(tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").touch()
    (tmp_path / "vectors.index").touch()
    assert not is_tf1(tmp_path)
    (tmp_path / "vectors.data-00000-of-00002").touch()
    assert is_tf1(tmp_path)
    (tmp_path / "vectors.index").unlink()
    with pytest.raises(InputError, match="holds no TensorFlow checkpoint"):
        read_tf1(tmp_path)


# Damage, and what is not of these models.


@pytest.mark.parametrize(
    ("pattern", "new", "said"),
    [
        ("*.data-*", lambda data: data[:-9], "Read less bytes than requested"),
        ("*.data-*", lambda data: data[:-1] + b"!", "Checksum does not match"),
        ("*.index", lambda data: data[:-9], "not an sstable"),
        ("*.index", lambda data: b"", "too short"),
    ],
)
def test_a_damaged_file(folder, pattern, new, said):
    change(folder, pattern, new)
    with pytest.raises(InputError) as raised:
        read_tf1(folder)
    text = str(raised.value)
    assert text.startswith(f"{folder}/bert_model.ckpt is damaged or incomplete: ")
    assert said in text


def test_a_missing_data_file(folder):
    next(folder.glob("*.data-*")).unlink()
    assert is_tf1(folder)  # an unfinished copy is still one
    with pytest.raises(InputError, match=r"is damaged or incomplete: .*No such file"):
        read_tf1(folder)


def test_all_variables_without_a_name_are_listed(folder, bert):
    more = {"output_weights": np.zeros(2), "bert/encoder/layer_0/extra/kernel": [0.0]}
    more["bert/encoder/layer_0/attention/self/query/gain"] = np.zeros(2)
    save(folder / "bert_model.ckpt", bert | more)
    with pytest.raises(InputError) as raised:
        read_tf1(folder)
    assert str(raised.value) == (
        f"{folder}/bert_model.ckpt: variables that bert does not have: "
        "bert/encoder/layer_0/attention/self/query/gain, "
        "bert/encoder/layer_0/extra/kernel, output_weights"
    )


def test_two_variables_for_one_tensor(folder, bert):
    save(folder / "bert_model.ckpt", bert | {"bert/pooler/dense/beta": np.zeros(12)})
    with pytest.raises(InputError, match="bias is another name of bert.pooler.dense.b"):
        read_tf1(folder)


def test_another_model(tmp_path):
    save(tmp_path / "model.ckpt", {f"decoder/w{n}": np.zeros(2) for n in range(12)})
    with pytest.raises(InputError) as raised:
        read_tf1(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}/model.ckpt: not one of bert, albert, electra, xlnet; its "
        "variables are decoder/w0, decoder/w1, decoder/w10, decoder/w11, decoder/w2, "
        "decoder/w3, decoder/w4, decoder/w5, decoder/w6, decoder/w7, ..."
    )


def test_a_missing_config(folder):
    (folder / "bert_config.json").unlink()
    with pytest.raises(
        InputError, match="bert_config.json is missing: it has the size"
    ):
        read_tf1(folder)


def test_a_config_that_lacks_sizes(folder):
    path = folder / "bert_config.json"
    path.write_text('{"vocab_size": 31, "hidden_size": 12, "hidden_act": "gelu"}')
    with pytest.raises(
        InputError, match="does not say: num_hidden_layers, num_attenti"
    ):
        read_tf1(folder)
    path.write_text("{")
    with pytest.raises(InputError, match="bert_config.json is damaged, not JSON"):
        read_tf1(folder)


def test_towers(folder, tmp_path):
    with pytest.raises(
        InputError, match="unknown tower 'generater'. Did you mean gene"
    ):
        read_tf1(folder, tower="generater")
    with pytest.raises(InputError, match="bert_model.ckpt: bert has no generator"):
        read_tf1(folder, tower="generator")
    save(tmp_path / "model.ckpt", {"electra/embeddings/LayerNorm/beta": np.zeros(2)})
    with pytest.raises(InputError, match="it has no generator .generator_predictions"):
        read_tf1(tmp_path, tower="generator")
    with pytest.raises(InputError, match="no variable for electra.embeddings.word_emb"):
        read_tf1(tmp_path)


def test_tensorflow_is_imported_only_to_read():
    code = "import sys, bert_jax.convert.tf1; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
