"""How the learning rate rises and falls: T steps, the first W of them warm-up.

    warm-up     η t / W                        while t < W; then one of
    bert        η (1 - t / T)                  the line through the start of training
    linear      η (T - t) / (T - W)            the line from the top
    polynomial  η (1 - t / T)^p                bert's line to a power; ALBERT's LAMB
    cosine      η (1 + cos(π (t - W) / (T - W))) / 2
    rsqrt       η √(W / t)                     Vaswani et al. 2017, section 5.3
    constant    η

BERT's release (Devlin et al. 2019, optimization.py) does not start its line anew after
warm-up: the rate drops a little there. The polynomial of google-research/albert does so
too.
"""

import jax.numpy as jnp
import optax

SCHEDULES = ("bert", "linear", "polynomial", "cosine", "rsqrt", "constant")


def warmup_steps(warmup: float, steps: int) -> int:
    """Below 1 `warmup` is a share of the steps, else a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def make_schedule(
    name: str, *, lr: float, warmup: float, power: float, steps: int
) -> optax.Schedule:
    """The rate of step t = 0, 1, ...; 0 from step T on, where the line ends there."""
    T, W = steps, warmup_steps(warmup, steps)

    def schedule(t):
        t = jnp.asarray(t, jnp.float32)
        line = jnp.maximum(0.0, 1 - t / T)
        after = jnp.clip((t - W) / max(T - W, 1), 0.0, 1.0)  # share of what follows W
        falls = {
            "bert": line,
            "linear": 1 - after,
            "polynomial": line**power,
            "cosine": (1 + jnp.cos(jnp.pi * after)) / 2,
            "rsqrt": jnp.sqrt(max(W, 1) / jnp.maximum(t, max(W, 1))),
            "constant": jnp.ones_like(t),
        }
        return lr * jnp.where(t < W, t / max(W, 1), falls[name])

    return schedule
