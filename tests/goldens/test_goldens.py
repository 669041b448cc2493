"""The stored numbers are what make.py says, and plain numpy computes the same.

The functions here are written from the definitions (a gather by distance, no shifting
of matrices), so an error would have to be made twice to pass.
"""

import json
import math

import numpy as np
import pytest

from tests import goldens

NEZHA, XL = goldens.load("nezha"), goldens.load("transfo_xl")
UNILM, BOUNDARY = (goldens.load(name)["tiny"] for name in ("unilm", "boundary"))
XL_CLASSIFY = goldens.load("transfo_xl_classify")
SIZES = {"nezha": NEZHA.pop("sizes"), "transfo_xl": XL.pop("sizes")}
ALL = [(f"nezha {n}", a) for n, a in NEZHA.items()]
ALL += [(f"transfo_xl {n}", a) for n, a in XL.items()]
ALL += [(f"transfo_xl_classify {n}", a) for n, a in XL_CLASSIFY.items()]
ALL += [("unilm", UNILM), ("boundary", BOUNDARY)]
FORMS = ("bidirectional", "left_to_right", "right_to_left", "seq2seq")
SIDES, PIECES = ("right", "left"), ("first", "second")
CLOSE, WRONG = 1e-6, 1e-3  # rounding to f32; the effect of a planted error
every_configuration = pytest.mark.parametrize(
    "arrays", [a for _, a in ALL], ids=[n for n, _ in ALL]
)


def settings_of(arrays: dict, kind: str) -> dict:
    return json.loads(str(arrays[f"config/{kind}"]))


def linear(x, tensors: dict, name: str):
    weight = tensors[f"{name}.weight"].astype(np.float64)
    return x @ weight.T + tensors.get(f"{name}.bias", 0)


def norm(x, tensors: dict, name: str, eps: float):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def heads_of(x, heads: int):
    return x.reshape(*x.shape[:-1], heads, -1)  # [B, S, H, K]


def nezha_forward(arrays: dict, side: str, error: str = ""):
    """Hidden states [N+1, B, S, D] and attentions [N, B, H, S, S]."""
    settings = settings_of(arrays, "pretraining")
    tensors = goldens.tensors_of(arrays, "pretraining")
    rows = goldens.below(arrays, f"in/{side}")
    H, M = settings["num_attention_heads"], settings["max_relative_position"]
    eps = 1e-7 if error == "epsilon" else settings.get("layer_norm_eps", 1e-12)
    act = gelu_tanh if settings.get("hidden_act") == "gelu_new" else gelu
    if error == "activation":
        act = gelu if act is gelu_tanh else gelu_tanh
    S, K = rows["ids"].shape[1], settings["hidden_size"] // H

    # a[i, j]: the sinusoid of the clipped distance j - i, counted from M.
    distance = np.arange(S)[None, :] - np.arange(S)[:, None]
    if error != "no clipping":
        distance = np.clip(distance, -M, M)
    if error == "turned":
        distance = -distance
    index = distance + (0 if error == "signed" else M)
    angles = index[..., None] / 10000 ** (np.arange(0, K, 2) / K)
    a = np.stack([np.sin(angles), np.cos(angles)], -1)  # interleaved
    a = np.concatenate([a[..., 0], a[..., 1]], -1) if error == "halves" else a
    a = a.reshape(S, S, K)

    x = tensors["nezha.embeddings.word_embeddings.weight"][rows["ids"]].astype(float)
    x = x + tensors["nezha.embeddings.token_type_embeddings.weight"][rows["types"]]
    x = norm(x, tensors, "nezha.embeddings.LayerNorm", eps)
    hidden, attentions = [x], []
    for n in range(settings["num_hidden_layers"]):
        layer = f"nezha.encoder.layer.{n}"
        q, k, v = (
            heads_of(linear(x, tensors, f"{layer}.attention.self.{name}"), H)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bihk,bjhk->bhij", q, k)
        scores = scores + np.einsum("bihk,ijk->bhij", q, a)
        scores = np.where(rows["real"][:, None, None], scores / math.sqrt(K), -np.inf)
        p = softmax(scores)
        out = np.einsum("bhij,bjhk->bihk", p, v)
        if error != "values":
            out = out + np.einsum("bhij,ijk->bihk", p, a)
        out = linear(out.reshape(x.shape), tensors, f"{layer}.attention.output.dense")
        x = norm(x + out, tensors, f"{layer}.attention.output.LayerNorm", eps)
        out = act(linear(x, tensors, f"{layer}.intermediate.dense"))
        out = linear(out, tensors, f"{layer}.output.dense")
        x = norm(x + out, tensors, f"{layer}.output.LayerNorm", eps)
        hidden.append(x)
        attentions.append(p)
    return np.stack(hidden), np.stack(attentions)


def nezha_heads(arrays: dict, side: str, state) -> dict[str, np.ndarray]:
    """Outputs of all heads, from the last hidden state [B, S, D]."""
    settings = settings_of(arrays, "pretraining")
    real = arrays[f"in/{side}/real"]
    of = {
        kind: goldens.tensors_of(arrays, kind)
        for kind in ("pretraining", "classify", "tag", "span", "choice")
    }
    lm = linear(state, of["pretraining"], "cls.predictions.transform.dense")
    lm = gelu_tanh(lm) if settings.get("hidden_act") == "gelu_new" else gelu(lm)
    eps = settings.get("layer_norm_eps", 1e-12)
    lm = norm(lm, of["pretraining"], "cls.predictions.transform.LayerNorm", eps)
    table = of["pretraining"]["nezha.embeddings.word_embeddings.weight"]
    first = state[np.arange(len(state)), real.argmax(1)]
    pooled = np.tanh(linear(first, of["pretraining"], "nezha.pooler.dense"))
    return {
        "lm": lm @ table.T + of["pretraining"]["cls.predictions.bias"],
        "pooled": pooled,
        "nsp": linear(pooled, of["pretraining"], "cls.seq_relationship"),
        "classify": linear(pooled, of["classify"], "classifier"),
        "tag": linear(state, of["tag"], "classifier"),
        "span": linear(state, of["span"], "qa_outputs"),
        "choice": linear(pooled, of["choice"], "classifier").reshape(-1, 2),
    }


def cross_entropy(logits, labels) -> float:
    """The mean over labels that are not -100."""
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    scored = labels != -100
    chosen = softmax(logits)[scored, labels[scored]]
    return float(-np.log(chosen).mean())


def xl_forward(
    arrays: dict,
    piece: str,
    error: str = "",
    *,
    kind: str = "lm",
    window: int = 10**6,
):
    """Hidden states [N+1, B, S, D] and attentions [N, B, H, S, M+S]."""
    settings = settings_of(arrays, kind)
    tensors = goldens.tensors_of(arrays, kind)
    ids = arrays[f"in/{'first' if piece == 'zeros' else piece}/ids"]
    (B, S), H, D = ids.shape, settings["n_head"], settings["d_model"]
    N, K, eps = settings["n_layer"], D // H, settings["layer_norm_epsilon"]
    mems = np.zeros((N, B, 0, D))
    if piece == "zeros":
        mems = np.zeros((N, B, settings["mem_len"], D))
    if piece == "second" and "out/first/mems" in arrays:
        mems = arrays["out/first/mems"].astype(float)
    M = mems.shape[2]

    distance = np.arange(M, M + S)[:, None] - np.arange(M + S)[None, :]  # [S, M+S]
    visible = (distance >= 0) & (distance < window)
    clipped = np.maximum(distance, 0)
    if error != "no clamp":
        clipped = np.minimum(clipped, settings["clamp_len"])
    angles = clipped[..., None] / 10000 ** (np.arange(0, D, 2) / D)
    r = np.concatenate([np.sin(angles), np.cos(angles)], -1)  # halves
    if error == "interleaved":
        r = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(r.shape)

    x = tensors["transformer.word_emb.emb_layers.0.weight"][ids].astype(float)
    x = x if error == "scale" else x * math.sqrt(D)
    hidden, attentions = [x], []
    for n in range(N):
        layer = f"transformer.layers.{n}"
        where = f"{layer}.dec_attn" if settings["untie_r"] else "transformer"
        u, v = (tensors[f"{where}.{name}"] for name in ("r_w_bias", "r_r_bias"))
        if error == "u and v":
            u, v = v, u
        both = np.concatenate([mems[n], x], 1)
        q, k, value = np.split(linear(both, tensors, f"{layer}.dec_attn.qkv_net"), 3, 2)
        q, k, value = heads_of(q[:, M:], H), heads_of(k, H), heads_of(value, H)
        position = heads_of(linear(r, tensors, f"{layer}.dec_attn.r_net"), H)
        scores = np.einsum("bihk,bjhk->bhij", q + u, k)
        scores = scores + np.einsum("bihk,ijhk->bhij", q + v, position)
        p = softmax(np.where(visible, scores / math.sqrt(K), -np.inf))
        out = np.einsum("bhij,bjhk->bihk", p, value).reshape(B, S, D)
        out = linear(out, tensors, f"{layer}.dec_attn.o_net")
        x = norm(x + out, tensors, f"{layer}.dec_attn.layer_norm", eps)
        out = np.maximum(linear(x, tensors, f"{layer}.pos_ff.CoreNet.0"), 0)
        out = linear(out, tensors, f"{layer}.pos_ff.CoreNet.3")
        x = norm(x + out, tensors, f"{layer}.pos_ff.layer_norm", eps)
        hidden.append(x)
        attentions.append(p)
    return np.stack(hidden), np.stack(attentions)


def bert_forward(arrays: dict, kind: str, rows: dict, sees):
    """Hidden states [N+1, B, S, D] and attentions [N, B, H, S, S]; sees [B, S, S]."""
    settings, tensors = settings_of(arrays, kind), goldens.tensors_of(arrays, kind)
    H, eps = settings["num_attention_heads"], settings.get("layer_norm_eps", 1e-12)
    S, table = rows["ids"].shape[1], "bert.embeddings.{}_embeddings.weight"
    x = tensors[table.format("word")][rows["ids"]].astype(float)
    x = x + tensors[table.format("position")][:S]
    x = x + tensors[table.format("token_type")][rows["types"]]
    x = norm(x, tensors, "bert.embeddings.LayerNorm", eps)
    hidden, attentions = [x], []
    for n in range(settings["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{n}"
        q, k, v = (
            heads_of(linear(x, tensors, f"{layer}.attention.self.{name}"), H)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(q.shape[-1])
        p = softmax(np.where(sees[:, None], scores, -1e30))
        out = np.einsum("bhij,bjhk->bihk", p, v).reshape(x.shape)
        out = linear(out, tensors, f"{layer}.attention.output.dense")
        x = norm(x + out, tensors, f"{layer}.attention.output.LayerNorm", eps)
        out = gelu(linear(x, tensors, f"{layer}.intermediate.dense"))
        out = linear(out, tensors, f"{layer}.output.dense")
        x = norm(x + out, tensors, f"{layer}.output.LayerNorm", eps)
        hidden.append(x)
        attentions.append(p)
    lm = gelu(linear(x, tensors, "cls.predictions.transform.dense"))
    lm = norm(lm, tensors, "cls.predictions.transform.LayerNorm", eps)
    lm = lm @ tensors[table.format("word")].T + tensors["cls.predictions.bias"]
    return np.stack(hidden), np.stack(attentions), lm


def boundary_scores(state, pairs):
    """[B, Q, T, V] from the last hidden state [B, S, D], word by word."""
    start = "cls.pair_target_predictions."
    tensors = {
        name.removeprefix(start).replace("gamma", "weight").replace("beta", "bias"): t
        for name, t in goldens.tensors_of(BOUNDARY, "pretraining").items()
        if name.startswith(start)
    }
    table = goldens.tensors_of(BOUNDARY, "pretraining")
    table = table["bert.embeddings.word_embeddings.weight"]
    places = tensors["position_embeddings.weight"]
    scores = np.zeros((*pairs.shape[:2], len(places), len(table)))
    for b, n, t in np.ndindex(scores.shape[:3]):
        left, right = pairs[b, n]
        x = np.concatenate([state[b, left], state[b, right], places[t]])
        for number in "12":
            x = gelu(linear(x, tensors, f"mlp_layer_norm.linear{number}"))
            x = norm(x, tensors, f"mlp_layer_norm.layer_norm{number}", 1e-12)
        scores[b, n, t] = table @ x + tensors["bias"]
    return scores


def difference(a, b) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NEZHA)
def test_nezha_in_numpy(name, side):
    arrays = NEZHA[name]
    rows = goldens.below(arrays, f"in/{side}")
    out = goldens.below(arrays, f"out/{side}")
    hidden, attentions = nezha_forward(arrays, side)
    assert difference(hidden, out["hidden"]) < CLOSE
    assert difference(attentions, out["attentions"]) < CLOSE
    found = nezha_heads(arrays, side, hidden[-1])
    for head, value in found.items():
        assert difference(value, out[head]) < CLOSE, head
    start, end = np.where(
        rows["real"][None] > 0, found["span"].transpose(2, 0, 1), -1e9
    )
    losses = {
        head: cross_entropy(found[head], rows[f"{head}_labels"])
        for head in ("lm", "nsp", "classify", "tag", "choice")
    }
    losses["span"] = cross_entropy(start, rows["start_labels"]) / 2
    losses["span"] += cross_entropy(end, rows["end_labels"]) / 2
    for head, value in losses.items():
        assert value == pytest.approx(float(out[f"{head}_loss"]), abs=CLOSE), head


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("clipped", "no clipping"),
        ("clipped", "turned"),
        ("clipped", "signed"),
        ("clipped", "halves"),
        ("clipped", "values"),
        ("far", "signed"),
        ("far", "epsilon"),
    ],
)
def test_nezha_shows_an_error(name, error):
    hidden, _ = nezha_forward(NEZHA[name], "right", error)
    assert difference(hidden, NEZHA[name]["out/right/hidden"]) > WRONG


@pytest.mark.parametrize("name", NEZHA)
def test_nezha_shows_the_other_gelu(name):
    hidden, _ = nezha_forward(NEZHA[name], "right", "activation")
    # The two forms differ by less than 5e-4 anywhere; 1e-5 is what parity allows.
    assert difference(hidden, NEZHA[name]["out/right/hidden"]) > 1e-4


def test_nezha_does_not_clip_what_is_near():
    hidden, _ = nezha_forward(NEZHA["far"], "right", "no clipping")
    assert difference(hidden, NEZHA["far"]["out/right/hidden"]) < CLOSE


@pytest.mark.parametrize("piece", [*PIECES, "zeros"])
@pytest.mark.parametrize("name", XL)
def test_transformer_xl_in_numpy(name, piece):
    arrays = XL[name]
    out = goldens.below(arrays, f"out/{piece}")
    hidden, attentions = xl_forward(arrays, piece)
    assert difference(hidden, out["hidden"]) < CLOSE
    assert difference(attentions, out["attentions"]) < CLOSE
    if piece == "zeros":  # an empty memory is another thing
        assert difference(hidden, arrays["out/first/hidden"]) > WRONG
        return
    tensors = goldens.tensors_of(arrays, "lm")
    table = tensors["transformer.word_emb.emb_layers.0.weight"]
    logits = hidden[-1] @ table.T + tensors["crit.out_layers.0.bias"]
    log_probs = np.log(softmax(logits))
    assert difference(log_probs, out["log_probs"]) < CLOSE
    without = np.log(softmax(hidden[-1] @ table.T))  # the head does have a bias
    assert difference(without, out["log_probs"]) > WRONG

    labels = arrays[f"in/{piece}/labels"][:, 1:]
    scored = labels != -100
    chosen = np.take_along_axis(
        log_probs[:, :-1], np.where(scored, labels, 0)[..., None], -1
    )[..., 0]
    losses = np.where(scored, -chosen, 0)
    assert scored.all() == (piece == "first")
    assert difference(losses, out["losses"]) < CLOSE
    assert float(out["loss"]) == pytest.approx(losses.sum() / scored.sum(), abs=CLOSE)

    before = hidden[:-1][:, :, :0]
    if piece == "second":
        before = arrays["out/first/mems"]
    kept = np.concatenate([before, hidden[:-1]], 2)
    kept = kept[:, :, -settings_of(arrays, "lm")["mem_len"] :]
    assert difference(kept, out["mems"]) < CLOSE


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("clamped", "no clamp"),
        ("clamped", "interleaved"),
        ("clamped", "scale"),
        ("clamped", "u and v"),
        ("untied", "no clamp"),
        ("untied", "u and v"),
    ],
)
def test_transformer_xl_shows_an_error(name, error):
    hidden, _ = xl_forward(XL[name], "second", error)
    assert difference(hidden, XL[name]["out/second/hidden"]) > WRONG


def test_transformer_xl_does_not_clamp_what_is_near():
    hidden, _ = xl_forward(XL["unclamped"], "second", "no clamp")
    assert difference(hidden, XL["unclamped"]["out/second/hidden"]) < CLOSE


def test_same_length_is_a_window_of_mem_len():
    arrays = XL["untied"]
    window = settings_of(arrays, "lm")["mem_len"]
    hidden, attentions = xl_forward(arrays, "second", window=window)
    assert difference(hidden, arrays["out/same_length/hidden"]) < CLOSE
    assert difference(attentions, arrays["out/same_length/attentions"]) < CLOSE
    assert difference(hidden, arrays["out/second/hidden"]) > WRONG


@pytest.mark.parametrize("name", XL_CLASSIFY)
def test_transformer_xl_classifier_in_numpy(name):
    arrays = XL_CLASSIFY[name]
    ids, labels = (arrays[f"in/second/{field}"] for field in ("ids", "labels"))
    out = goldens.below(arrays, "out/second")
    hidden, attentions = xl_forward(arrays, "second", kind="classify")
    assert difference(hidden, out["hidden"]) < CLOSE
    assert difference(attentions, out["attentions"]) < CLOSE
    every, last = np.arange(len(ids)), (ids > 0).sum(1) - 1
    assert (last < ids.shape[1] - 1).any()
    assert (last == ids.shape[1] - 1).any()
    weight = goldens.tensors_of(arrays, "classify")["score.weight"]
    found = hidden[-1][every, last] @ weight.T
    assert difference(found, out["classify"]) < CLOSE
    assert cross_entropy(found, labels) == pytest.approx(float(out["loss"]), abs=CLOSE)
    for wrong in (hidden[-1][:, -1], hidden[-1][:, 0]):
        assert difference(wrong @ weight.T, out["classify"]) > WRONG


def unilm_sees(form: str, rows: dict):
    """Who sees whom, [B, S, S], from UniLM's own matrices: 1 is seen."""
    real = rows["real"]
    S = real.shape[1]
    later, ones = np.tril(np.ones((S, S), bool)), np.ones((S, S), bool)
    blocks = []
    for start in rows["starts"]:
        block = {"left_to_right": later, "right_to_left": later.T}.get(form, ones)
        if form == "seq2seq":
            block = ones.copy()
            block[:start, start:] = False
            block[start:, start:] = later[start:, start:]
        blocks.append(block)
    return np.stack(blocks) & real[:, None] & real[:, :, None]


@pytest.mark.parametrize("form", FORMS)
def test_unilm_in_numpy(form):
    rows = goldens.below(UNILM, f"in/{form}")
    out = goldens.below(UNILM, f"out/{form}")
    real, sees = rows["real"], unilm_sees(form, rows)
    np.testing.assert_array_equal(rows["sees"], sees)
    assert real.all(1).any()
    assert not real[:, 0].all()
    assert not real[:, -1].all()
    # The types are those of the release, and say which objective it is.
    place = np.arange(real.shape[1])
    source, target = {"bidirectional": (0, 1), "seq2seq": (4, 5)}.get(
        form, (2, 2) if form == "left_to_right" else (3, 3)
    )
    types = np.where(place < rows["starts"][:, None], source, target)
    np.testing.assert_array_equal(rows["types"], types)
    # Something is asked for in the source and in the target.
    asked = rows["lm_labels"] >= 0
    assert not (asked & ~real).any()
    assert (asked & (place < rows["starts"][:, None])).any()
    assert (asked & (place >= rows["starts"][:, None])).any()

    hidden, attentions, lm = bert_forward(UNILM, "lm", rows, sees)
    assert difference(hidden[:, real], out["hidden"][:, real]) < CLOSE
    seen = attentions.swapaxes(2, 3)[:, real], out["attentions"].swapaxes(2, 3)[:, real]
    assert difference(*seen) < CLOSE
    assert difference(lm[real], out["lm"][real]) < CLOSE
    loss = cross_entropy(lm, rows["lm_labels"])
    assert loss == pytest.approx(float(out["loss"]), abs=CLOSE)
    # Seen the way of any other form, the states are others.
    for other in set(FORMS) - {form}:
        wrong = bert_forward(UNILM, "lm", rows, unilm_sees(other, rows))[0]
        assert difference(wrong[:, real], out["hidden"][:, real]) > WRONG


def test_unilm_by_hand():
    """[CLS] a b [SEP] c [SEP], the smallest row there is, by hand."""
    rows = {"real": np.ones((1, 6), bool), "starts": np.array([4])}
    by_hand = ["111100"] * 4 + ["111110", "111111"]
    found = [
        "".join(map(str, row)) for row in unilm_sees("seq2seq", rows)[0].astype(int)
    ]
    assert found == by_hand


def test_boundary_in_numpy():
    rows = goldens.below(BOUNDARY, "in/mixed")
    out = goldens.below(BOUNDARY, "out/mixed")
    real = rows["real"]
    sees = np.broadcast_to(real[:, None], (*real.shape, real.shape[1]))
    hidden, attentions, lm = bert_forward(BOUNDARY, "pretraining", rows, sees)
    assert difference(hidden, out["hidden"]) < CLOSE
    assert difference(attentions, out["attentions"]) < CLOSE
    assert difference(lm, out["lm"]) < CLOSE
    pairs, labels = rows["pairs"], rows["sbo_labels"]
    sbo = boundary_scores(hidden[-1], pairs)
    assert difference(sbo, out["sbo"]) < CLOSE
    lm_loss, sbo_loss = (
        cross_entropy(lm, rows["lm_labels"]),
        cross_entropy(sbo, labels),
    )
    words = (labels >= 0).sum()
    sbo_loss *= words / (words + 1)
    assert lm_loss == pytest.approx(float(out["lm_loss"]), abs=CLOSE)
    assert sbo_loss == pytest.approx(float(out["sbo_loss"]), abs=CLOSE)
    assert float(out["loss"]) == pytest.approx(lm_loss + sbo_loss, abs=CLOSE)
    inside, left, right = (
        np.clip(pairs + np.array(by), 0, real.shape[1] - 1)
        for by in ((1, -1), (1, 0), (0, -1))
    )
    for wrong in (inside, left, right, pairs[..., ::-1]):
        found = boundary_scores(hidden[-1], wrong)
        assert difference(found, out["sbo"]) > WRONG


def test_boundary_rows():
    """The words of a pair are those strictly between its borders, in their order."""
    rows = goldens.below(BOUNDARY, "in/mixed")
    T = rows["sbo_labels"].shape[2]
    lengths, inside = [], np.zeros_like(rows["real"])
    for b, n in np.ndindex(rows["pairs"].shape[:2]):
        (left, right), words = rows["pairs"][b, n], rows["sbo_labels"][b, n]
        if not right:
            assert (words == -100).all()
            continue
        assert rows["real"][b, [left, right]].all()
        between = rows["lm_labels"][b, left + 1 : right]
        assert (between >= 0).all()
        np.testing.assert_array_equal(words[: len(between)], between[:T])
        assert (words[len(between) :] == -100).all()
        inside[b, left + 1 : right] = True
        lengths.append(len(between))
    np.testing.assert_array_equal(inside, rows["lm_labels"] >= 0)
    assert max(lengths) > T
    assert min(lengths) == 1


@every_configuration
def test_attention_is_sharp(arrays):
    """Of every row in every layer, at real tokens that see five keys or more."""
    for name, attentions in goldens.below(arrays, "out").items():
        place, kind = name.split("/")
        if kind != "attentions" or place in ("zeros", "same_length"):
            continue
        S, K = attentions.shape[-2:]
        rows = goldens.below(arrays, f"in/{place}")
        if "sees" in rows:
            counted = rows["sees"].sum(2) >= 5
        elif "real" in rows:
            counted = rows["real"]
            assert counted.sum(1).min() >= 5
        else:
            counted = (np.arange(S) + 1 + K - S >= 5)[None]
            if "config/classify" in arrays:
                counted = counted & (rows["ids"] > 0)
        peaks = (attentions.max((2, 4)) * counted).max(-1)  # [N, B]
        assert peaks.min() > 0.5
        assert attentions.max(-1).mean() < 0.9, "nothing is left of the softmax"


@every_configuration
def test_every_parameter_has_a_gradient(arrays):
    """A bias that is the same for all that a softmax compares has none."""
    flat = (".key.bias", "span:qa_outputs.bias", "choice:classifier.bias")
    params = goldens.below(arrays, "param")
    places = [f"grad/{side}" for side in SIDES if f"in/{side}/ids" in arrays]
    for place in places or ["grad"]:
        gradients = goldens.below(arrays, place)
        assert gradients.keys() == params.keys()
        for name, gradient in gradients.items():
            assert gradient.shape == params[name].shape
            largest = np.abs(gradient).max()
            if name.endswith(flat):
                assert largest < 1e-12, name
            else:
                assert largest > 5e-5, name
                # One token a row is classified: relu, and words that are not before it.
                few = any(arrays is each for each in XL_CLASSIFY.values())
                assert (gradient == 0).mean() < (0.5 if few else 0.1), name


@every_configuration
def test_parameters_are_moved(arrays):
    for name, tensor in goldens.below(arrays, "param").items():
        start = 1.0 if "orm.weight" in name or name.endswith("gamma") else 0.0
        assert (tensor != start).all(), name
        assert tensor.dtype == np.float32


@every_configuration
def test_names_cover_the_state_dict(arrays):
    """What is not stored is a copy of something stored, or a constant."""
    kinds = [n.removeprefix("names/") for n in arrays if n.startswith("names/")]
    used = set()
    for kind in kinds:
        found = goldens.tensors_of(arrays, kind)
        tied = set(arrays[f"names/{kind}"].tolist()) - found.keys()
        settings = settings_of(arrays, kind)
        if settings["model_type"] in ("nezha", "bert"):
            decoder = "cls.predictions.decoder"
            both = {f"{decoder}.weight", f"{decoder}.bias"}
            if arrays is BOUNDARY:
                both |= {"cls.pair_target_predictions.decoder.weight"}
            assert tied == (both if kind in ("pretraining", "lm") else set())
        else:
            shared = set()
            if not settings["untie_r"]:
                shared = {
                    f"transformer.layers.{n}.dec_attn.{name}"
                    for n in range(settings["n_layer"])
                    for name in ("r_w_bias", "r_r_bias")
                }
            same = {"transformer.pos_emb.inv_freq"}
            if kind == "lm":
                same |= {"crit.out_layers.0.weight"}
            assert tied == same | shared
        own = goldens.below(arrays, "param").keys()
        used |= {n if f"{kind}:{n}" not in own else f"{kind}:{n}" for n in found}
    assert used == goldens.below(arrays, "param").keys()


@pytest.mark.parametrize("name", NEZHA)
def test_nezha_rows(name):
    arrays = NEZHA[name]
    limit = settings_of(arrays, "pretraining")["max_relative_position"]
    for side in SIDES:
        rows = goldens.below(arrays, f"in/{side}")
        real = rows["real"]
        assert real[:, 0 if side == "right" else -1].all()
        assert not real.all()
        assert (rows["ids"] > 0).all()
        S = real.shape[1]
        assert (limit < S - 1) == (name == "clipped")
        assert (rows["lm_labels"][~real] == -100).all()
        assert (rows["tag_labels"][~real] == -100).all()
        every = np.arange(len(real))
        assert real[every, rows["start_labels"]].all()
        assert real[every, rows["end_labels"]].all()
        # Queries at padding are computed too, and see the real keys.
        attentions = arrays[f"out/{side}/attentions"]
        hidden_keys = np.broadcast_to(~real[:, None, None], attentions.shape[1:])
        assert (attentions[:, hidden_keys] == 0).all()


@pytest.mark.parametrize("name", XL)
def test_transformer_xl_settings(name):
    arrays = XL[name]
    settings = settings_of(arrays, "lm")
    assert settings["cutoffs"] == []
    assert settings["div_val"] == 1
    assert settings["d_embed"] == settings["d_model"]
    assert not settings["same_length"]
    assert settings["untie_r"] == (name == "untied")
    farthest = arrays["out/second/attentions"].shape[-1] - 1
    assert (settings["clamp_len"] < farthest) == (name != "unclamped")
    S = arrays["in/first/ids"].shape[1]
    assert (settings["mem_len"] < S) == (name != "unclamped")


def test_published_sizes():
    """The counts of the classes are those of the shapes."""

    def nezha(vocab, width, layers, *, heads):
        square = width * width
        layer = 4 * (square + width) + 8 * square + 4 * width + width + 4 * width
        body = vocab * width + 4 * width + layers * layer + square + width
        lm, nsp = square + width + 2 * width + vocab, 2 * width + 2
        return body + (lm + nsp if heads else 0)

    def xl(vocab, width, layers, *, biases, head):
        layer = 13 * width * width + 4 * width + width + 4 * width
        body = vocab * width + layers * layer + biases * 2 * width
        return body + (vocab if head else 0)

    base = dict(vocab=21128, width=768, layers=12)
    large = dict(vocab=21128, width=1024, layers=24)
    sizes = {n: int(a) for n, a in SIZES["nezha"].items()}
    assert sizes == {
        "nezha-cn-base/NezhaModel": nezha(**base, heads=False),
        "nezha-cn-base/NezhaForPreTraining": nezha(**base, heads=True),
        "nezha-cn-large/NezhaModel": nezha(**large, heads=False),
        "nezha-cn-large/NezhaForPreTraining": nezha(**large, heads=True),
    }
    assert sizes["nezha-cn-base/NezhaModel"] == 101_874_432

    plain = dict(vocab=267735, width=1024, layers=18)
    sizes = {n: int(a) for n, a in SIZES["transfo_xl"].items()}
    adaptive = {n: sizes.pop(f"wt103/TransfoXL{n}") for n in ("Model", "LMHeadModel")}
    assert sizes == {
        "wt103-plain/TransfoXLModel": xl(**plain, biases=18, head=False),
        "wt103-plain/TransfoXLLMHeadModel": xl(**plain, biases=18, head=True),
        "wt103-plain-tied/TransfoXLModel": xl(**plain, biases=1, head=False),
        "wt103-plain-tied/TransfoXLLMHeadModel": xl(**plain, biases=1, head=True),
    }
    # The published one: four clusters of width 1024, 256, 64 and 16, each projected.
    ends, widths = (0, 20000, 40000, 200000, 267735), (1024, 256, 64, 16)
    tables = sum(
        (end - start) * width + width * 1024
        for start, end, width in zip(ends, ends[1:], widths, strict=False)
    )
    body = tables + xl(0, 1024, 18, biases=18, head=False)
    head = 267735 + 1024 * 1024 + 3 * 1024 + 3  # the first projection is not tied
    assert adaptive == {"Model": body, "LMHeadModel": body + head}


def test_files_are_small():
    sizes = {path.stem: path.stat().st_size for path in goldens.FOLDER.glob("*.npz")}
    assert len(sizes) == 5
    for member, size in sizes.items():
        assert size < (600_000 if member in ("nezha", "transfo_xl") else 150_000)
