"""The same training steps on PyTorch, built from the classes of `transformers`.

What is hidden, the order of a permutation and who sees whom in it are drawn before the
clock starts; what a generator says is sampled inside the step, as it must be.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.models.xlnet.modeling_xlnet import XLNetFeedForward

from benchmarks.sizes import (
    CLIP,
    DECAY,
    DROPOUT,
    EPS,
    HIDE,
    LR,
    MASK_ID,
    WEIGHT,
    S,
    Size,
)

LossFn = Callable[[], torch.Tensor]


class Drawn:
    """What is predicted of the tokens, chosen once."""

    def __init__(self, size: Size):
        self.ids = torch.from_numpy(size.clean_ids()).long()  # [B, S]
        B, P = size.batch, size.predicted
        self.where = torch.rand(B, S).argsort(1)[:, :P].sort(1).values  # [B, P]
        self.targets = self.ids.gather(1, self.where)
        self.flat_where = (self.where + S * torch.arange(B)[:, None]).flatten()
        self.flat_targets = self.targets.flatten()  # [B P]

    def shown(self, hide: float = 1.0) -> torch.Tensor:
        """The tokens with this share of the predicted ones as [MASK]."""
        hidden = torch.rand(self.targets.shape) < hide
        return self.ids.scatter(
            1, self.where, torch.where(hidden, MASK_ID, self.targets)
        )

    def gathered(self, states: torch.Tensor) -> torch.Tensor:
        """States [B, S, D] of the predicted positions: [B P, D]."""
        return states.flatten(0, 1).index_select(0, self.flat_where)


def masked_lm(size: Size, form: str) -> tuple[nn.Module, LossFn, str]:
    """The model, its loss, and the attention that `transformers` chose."""
    arch = size.arch
    config = BertConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        intermediate_size=arch.inner,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model = BertForMaskedLM(config)
    drawn = Drawn(size)
    shown = drawn.shown()
    labels = torch.full_like(shown, -100).scatter(1, drawn.where, drawn.targets)

    def loss_all():
        return model(shown, labels=labels).loss

    def loss_gathered():
        states = model.bert(shown).last_hidden_state
        return cross_entropy(model.cls(drawn.gathered(states)), drawn.flat_targets)

    loss_fn = {"all": loss_all, "gathered": loss_gathered}[form]
    return model, loss_fn, config._attn_implementation


def replaced_token(size: Size, form: str) -> tuple[nn.Module, LossFn, str]:
    """Both towers, on one module of embeddings. The piece is the one at which the
    probabilities so far reach a draw, as in our step: of the ways to sample on a CPU
    (torch.multinomial, noise and argmax) the fastest."""
    arch = size.arch

    def config_of(width: int) -> ElectraConfig:
        return ElectraConfig(
            vocab_size=arch.vocab_size,
            embedding_size=arch.table_width,
            hidden_size=width,
            num_hidden_layers=arch.layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
        )

    discriminator = ElectraForPreTraining(config_of(arch.width))
    generator = ElectraForMaskedLM(config_of(arch.width // 4))
    embeddings = discriminator.electra.embeddings
    generator.electra.embeddings = embeddings
    generator.generator_lm_head.weight = embeddings.word_embeddings.weight
    drawn = Drawn(size)
    shown = drawn.shown(HIDE)

    def loss_fn():
        states = drawn.gathered(generator.electra(shown).last_hidden_state)
        logits = generator.generator_lm_head(generator.generator_predictions(states))
        with torch.no_grad():
            so_far = logits.softmax(-1).cumsum(-1)  # [B P, V]
            draws = torch.rand(len(so_far), 1) * so_far[:, -1:]
            guesses = torch.searchsorted(so_far, draws).squeeze(1)
            guesses = guesses.clamp_max(arch.vocab_size - 1)
            given = drawn.ids.flatten().scatter(0, drawn.flat_where, guesses)
            given = given.view_as(drawn.ids)
        found = discriminator(given, labels=given != drawn.ids).loss
        return cross_entropy(logits, drawn.flat_targets) + WEIGHT * found

    towers = nn.ModuleList([discriminator, generator])
    return towers, loss_fn, discriminator.config._attn_implementation


def permuted_lm(size: Size, form: str) -> tuple[nn.Module, LossFn, str]:
    """Both streams; target_mapping asks for the predicted positions alone. No types are
    passed: all tokens have the same, which then changes nothing."""
    arch = size.arch
    config = XLNetConfig(
        vocab_size=arch.vocab_size,
        d_model=arch.width,
        n_layer=arch.layers,
        n_head=arch.heads,
        d_inner=arch.inner,
        dropout=DROPOUT,
    )
    model = XLNetLMHeadModel(config)
    drawn = Drawn(size)
    hidden = hidden_from(drawn.where)
    mapping = nn.functional.one_hot(drawn.where, S).float()  # [B, P, S]
    asked = dict(perm_mask=hidden, target_mapping=mapping, labels=drawn.targets)
    if form == "released":
        return model, lambda: model(drawn.ids, **asked).loss, "XLNet's own"

    body = model.transformer
    body.dropout = nn.Identity()  # on sinusoids, queries and the last states, too
    for layer in body.layer:
        lean = LeanFeedForward(config)
        lean.load_state_dict(layer.ff.state_dict())
        layer.ff = lean
    encode = body.relative_positional_encoding
    # One row of sinusoids for the batch instead of a copy, and a product, for each.
    body.relative_positional_encoding = lambda qlen, klen, bsz, device: encode(
        qlen, klen, device=device
    )

    def loss_lean():
        vectors = body.word_embedding(drawn.ids)
        vectors = nn.functional.dropout(vectors, DROPOUT)
        return model(inputs_embeds=vectors, **asked).loss

    return model, loss_lean, "XLNet's own"


class LeanFeedForward(XLNetFeedForward):
    """Without dropout between its two products."""

    def forward(self, inp):
        inner = self.activation_function(self.layer_1(inp))
        return self.layer_norm(self.dropout(self.layer_2(inner)) + inp)


def hidden_from(where: torch.Tensor) -> torch.Tensor:
    """A random order of the targets at `where` [B, P], as objectives/permute.py ranks
    them by halves: 1 where a token is not known to another, [B, S, S]."""
    R = S // 2
    target = torch.zeros(len(where), S, dtype=torch.bool).scatter(1, where, True)
    order = torch.cat([torch.rand(len(where), R).argsort(1) for _ in range(2)], 1)
    rank = torch.where(target, order, -1) + (R + 1) * (torch.arange(S) >= R)
    later = rank[:, None, :] > rank[:, :, None]
    itself = torch.eye(S, dtype=torch.bool) & target[:, None, :]
    return (later | itself).float()


BUILD = {
    "masked_lm": masked_lm,
    "replaced_token": replaced_token,
    "permuted_lm": permuted_lm,
}


def torch_step(
    size: Size, *, how: str, form: str, threads: int
) -> tuple[Callable[[], object], dict]:
    """A step as `ours.our_step` has it; `how` is eager or compile."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, loss_fn, attention = BUILD[size.objective](size, form)
    model.train()
    params = list(model.parameters())  # what is shared is there once
    optimizer = torch.optim.AdamW(params, LR, eps=EPS, weight_decay=DECAY, fused=True)
    if how == "compile":
        loss_fn = torch.compile(loss_fn)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        return loss.detach()

    return step, {
        "attention": attention,
        "parameters": sum(param.numel() for param in params),
    }
