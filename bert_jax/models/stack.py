"""The stack of layers.

The parameters of all layers are always stored stacked along a first axis; `arch.stack`
only says how they are walked, and `arch.copies` which layers use the same ones (ALBERT,
Lan et al. 2020, arXiv:1909.11942: all of them one).
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.models.blocks import Block
from bert_jax.models.dropout import Noise
from bert_jax.models.linear import KEPT, Part
from bert_jax.models.norm import norm
from bert_jax.models.tokens import Memory
from bert_jax.models.view import View
from bert_jax.placing import apart_by_rows

# What the backward pass finds saved, by name.
SAVED = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "kept": jax.checkpoint_policies.save_only_these_names(KEPT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Stack(Part):
    """N layers, one after the other, from parameters stacked along a first axis."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        view: View,
        noise: Noise | None,
        *,
        memory: Memory | None = None,
        query: tuple[jax.Array, View] | None = None,
        capture: tuple[str, ...] = (),
    ):
        """The last layer's output (and the query stream's), and each captured thing
        stacked along N."""
        arch, N = self.arch, self.arch.layers
        block = Block(arch, self.dtype, parent=None)
        past = memory and jax.lax.stop_gradient(memory.replace(tokens=None))
        inputs = (x, view, None, layer_of(past, 0), query)
        layers = self.param("layers", partial(self.init_layers, block, inputs))
        used = {part: arch.copies(part) for part in layers}

        def step(carry, layer):
            own, copy, number, memory = layer
            x, g = jax.tree.map(apart_by_rows, carry)
            params = own | {part: layer_of(layers[part], n) for part, n in copy.items()}
            asks = None if query is None else (g, query[1])
            there = noise and noise.at(number)
            carry, inside = block.apply(
                {"params": params}, x, view, there, memory, asks
            )
            return carry, {name: inside[name] for name in capture}

        if arch.remat != "none":
            # In a scan nothing can be merged with the forward pass anyway.
            apart = arch.stack == "loop"
            step = jax.checkpoint(step, policy=SAVED[arch.remat], prevent_cse=apart)

        numbers = jnp.arange(N, dtype=jnp.uint32)
        carry = (x, None if query is None else query[0])
        if arch.stack == "loop":
            stored = {
                part: unstack(layers[part], max(used[part]) + 1) for part in layers
            }
            captured = []
            for n in range(N):
                own = {part: stored[part][used[part][n]] for part in layers}
                carry, inside = step(carry, (own, {}, numbers[n], layer_of(past, n)))
                captured.append(inside)
            captured = jax.tree.map(lambda *parts: jnp.stack(parts), *captured)
        else:
            # What layers share stays whole beside the scan; the rest are its rows.
            copy = {
                part: jnp.asarray(copies)
                for part, copies in used.items()
                if copies != list(range(N))
            }
            own = {part: layers[part] for part in layers if part not in copy}
            carry, captured = jax.lax.scan(
                step, carry, (own, copy, numbers, past), unroll=arch.trip
            )
        x, g = jax.tree.map(apart_by_rows, carry)
        if arch.norm_place == "pre":
            final_norm = norm(arch, self.dtype, "final_norm")
            x, g = final_norm(x), None if g is None else final_norm(g)
        return x, g, captured

    def init_layers(self, block: Block, inputs: tuple, key) -> dict:
        """Fresh parameters: as many copies of each part as are stored."""

        def draw(key):
            return block.init(key, *inputs)["params"]

        keys = jax.random.split(key, self.arch.layers)
        parts = jax.eval_shape(draw, keys[0])
        stored = {part: max(self.arch.copies(part)) + 1 for part in parts}
        drawn = {count: jax.vmap(draw)(keys[:count]) for count in set(stored.values())}
        return {part: drawn[count][part] for part, count in stored.items()}


def layer_of(tree, n):
    """What layer n has of a tree that is stacked along N."""
    return jax.tree.map(lambda leaf: leaf[n], tree)


def unstack(tree, count: int) -> list:
    """A stacked tree as `count` trees.

    One `lax.split` a leaf: its gradient is one concatenation, where the gradient of
    `leaf[i]` would be a sum of `count` arrays as large as the whole stack.
    """
    leaves, treedef = jax.tree.flatten(tree)
    columns = [
        [part.squeeze(0) for part in jax.lax.split(leaf, [1] * count, axis=0)]
        for leaf in leaves
    ]
    return [treedef.unflatten(row) for row in zip(*columns, strict=True)]
