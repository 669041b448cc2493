"""Numbers of a run: to the terminal, metrics.jsonl, TensorBoard and loss.png."""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bert_jax.config import Run
from bert_jax.errors import InputError
from bert_jax.spikes import Spikes
from bert_jax.tpu import CHIPS
from bert_jax.whole import write_text

MOST_SKIPPED = 10  # steps one after the other without a finite gradient
IN_FLIGHT = 2  # steps dispatched ahead, so that the device never waits for the host
PEAK = {chip.name: chip.peak for chip in CHIPS.values()}  # bf16 FLOP/s of one chip


def peak_flops() -> float | None:
    """FLOP/s all devices together can reach; on a CPU measured by a matrix product."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        peak = PEAK.get(device.device_kind)
        return peak and peak * jax.device_count()
    n = 1024
    x = jax.device_put(np.ones((n, n), np.float32))  # nothing to compile
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


@jax.jit
def all_finite(tree) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


class LossError(InputError):
    """With such a loss the run does not go on."""


class NotFiniteError(LossError):
    """The loss is no number any more."""

    advice = "A lower optim.lr or a longer optim.warmup may help, in another --workdir."


class SpikeError(LossError):
    """The loss stands out from those before it."""

    advice = (
        "--config.spike=say goes on through it, --config.spike=skip leaves out such "
        "updates."
    )


def check_finite(params: dict, step: int) -> None:
    """The loss of a step is that of the parameters before it; this looks at the new."""
    if not all_finite(params):
        raise NotFiniteError(f"the parameters are not finite after step {step}.")


class Writers:
    """A progress bar, metrics.jsonl and TensorBoard events; process 0 writes."""

    def __init__(self, workdir: Path, *, start: int, steps: int, progress: bool):
        self.chief = jax.process_index() == 0
        self.path = workdir / "metrics.jsonl"
        self.workdir, self.start, self.steps = workdir, start, steps
        self.progress = progress and self.chief

    def __enter__(self) -> "Writers":
        if self.chief:
            keep = [row for row in read_metrics(self.path) if row["step"] <= self.start]
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in keep))
            self.file = open(self.path, "a", encoding="utf-8")
            self.events = tensorboard(self.workdir / "tensorboard")
        self.bar = tqdm(
            initial=self.start,
            total=self.steps,
            desc="train",
            unit="step",
            disable=not self.progress,
            dynamic_ncols=True,
            postfix="compiling the step",
        )
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
        if self.chief:
            try:
                self.file.close()
            except OSError as error:  # a full disk: what is lost is the last lines
                self.say(f"{self.path} could not be written to its end: {error}")

    def say(self, text: str) -> None:
        if self.chief:
            tqdm.write(text)

    def advance(self) -> None:
        if self.bar.n == self.start:
            self.bar.set_postfix_str("", refresh=False)  # no more compiling
        self.bar.update()

    def write(self, step: int, values: dict, *, kind: str) -> None:
        """One line of numbers; `kind` is train or eval."""
        if not self.chief:
            return
        line = json.dumps({"step": step, "kind": kind, **values}) + "\n"
        named = {f"{kind}/{name}": value for name, value in values.items()}
        try:
            self.file.write(line)
            self.file.flush()
            self.events(step, named)
        except OSError as error:  # a full disk is no reason to lose the training
            self.say(f"the metrics of step {step} could not be written: {error}")
        if kind == "train":
            shown = {"loss": f"{values['loss']:.3f}"}
            shown["tok/s"] = f"{values['tokens_per_second']:,.0f}"
            self.bar.set_postfix(shown, refresh=False)


class UnderWay:
    """Steps that were dispatched, and the sums since the last line of metrics."""

    def __init__(
        self,
        run: Run,
        rate: Callable[[int], float],
        writers: Writers,
        begun: Callable[[int], None] = lambda step: None,
    ):
        """`begun` is told the first step that is done."""
        self.run, self.rate, self.writers = run, rate, writers
        self.begun = begun
        self.pending = collections.deque()
        self.sums, self.count, self.flops = {}, 0, 0.0
        # The clock starts when the first step is done: compiling is not counted.
        self.clock, self.timed, self.seconds = None, 0, 0.0
        self.peak = peak_flops()
        self.waited = 0.0  # seconds for batches
        self.in_a_row = 0  # steps without a finite gradient, one after the other
        self.spikes, self.high = Spikes(), 0  # since the last line

    def tells(self, step: int) -> bool:
        """Whether a line of metrics is due after a step."""
        return step % self.run.log_every == 0 or step == self.run.steps

    def add(
        self,
        step: int,
        means: dict,
        batch,
        flops: float,
        waited: float = 0.0,
        lane: int = 0,
    ) -> None:
        """`batch` is what tells it from others, where a line is due; it was `waited`
        for so many seconds. Losses are compared with those of the same `lane`."""
        self.pending.append((step, means, batch, flops, waited, lane))
        if len(self.pending) > IN_FLIGHT:
            self.take()

    def finish(self) -> None:
        """Waits for all of them."""
        while self.pending:
            self.take()

    @contextlib.contextmanager
    def pause(self):
        """Stops the clock: what is done inside is not training."""
        if self.clock is not None:
            self.seconds += time.perf_counter() - self.clock
        yield
        self.clock = time.perf_counter()

    def take(self) -> None:
        """Waits for the oldest step; checks it; writes a line where one is due."""
        step, means, batch, flops, waited, lane = self.pending.popleft()
        means = jax.device_get(means)
        self.writers.advance()
        if self.clock is None:
            self.begun(step)
        if not math.isfinite(means["loss"].total + means["grad_norm"].total):
            raise NotFiniteError(f"the loss or gradient is not finite at step {step}.")
        self.watch(step, means, lane)
        for name, mean in means.items():
            self.sums[name] = self.sums[name] + mean if name in self.sums else mean
        self.count += 1
        self.flops += flops * (self.clock is not None)
        self.waited += waited * (self.clock is not None)
        self.timed += self.clock is not None
        # The clock goes on while lines are written: steps in flight do so too.
        now = time.perf_counter()
        if self.tells(step):
            if self.clock is not None:
                self.seconds += now - self.clock
            self.write(step, batch)
            self.sums, self.count, self.flops = {}, 0, 0.0
            self.timed, self.seconds, self.waited, self.high = 0, 0.0, 0.0, 0
            self.clock = now
        elif self.clock is None:
            self.clock = now

    def watch(self, step: int, means: dict, lane: int) -> None:
        """Reports a step that was skipped; too many without a finite gradient are the
        end."""
        skipped = "skipped" in means and means["skipped"].total > 0
        finite = means["loss"].count > 0  # else nothing of it is counted
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if not finite:
            self.writers.say(f"step {step} is skipped: its gradient is not finite")
        if self.in_a_row == MOST_SKIPPED:
            raise NotFiniteError(
                f"the gradients of {MOST_SKIPPED} steps, the last of them {step}, are "
                "not finite."
            )
        if finite:
            loss = float(means["loss"].value)
            if self.run.spike != "skip":
                self.spike(step, loss, self.spikes.usual(lane, loss))
            elif skipped:  # the step has judged by itself
                self.spike(step, loss, float(means["usual_loss"].value))

    def spike(self, step: int, loss: float, usual: float | None) -> None:
        """Reports a loss that stands out from what is usual, if that is told."""
        if usual is None:
            return
        self.high += 1
        text = (
            f"step {step}: a spike, its loss is {loss:.4g} where {usual:.4g} is usual"
        )
        if self.run.spike == "stop":
            raise SpikeError(f"{text}.")
        left_out = "; its update is left out" if self.run.spike == "skip" else ""
        self.writers.say(text + left_out)

    def write(self, step: int, batch: jax.Array) -> None:
        values = {name: float(mean.value) for name, mean in self.sums.items()}
        rate = self.timed / self.seconds if self.seconds else 0.0
        tokens = float(self.sums["real_tokens"].total) / self.count
        values |= {
            "lr": float(self.rate(step - 1)),
            "steps_per_second": rate,
            "tokens_per_second": rate * tokens,
            "input_wait": min(self.waited / self.seconds, 1.0) if self.seconds else 0.0,
            "spikes": float(self.high),
        }
        if self.peak:
            speed = self.flops / self.seconds if self.seconds else 0.0
            values["share_of_peak"] = speed / self.peak
        self.writers.write(step, {**values, "batch": f"{int(batch):08x}"}, kind="train")


def tensorboard(directory: Path):
    """A function that writes scalars. Plain tf.summary.scalar would need TensorBoard
    itself to be installed; the summary it writes does not."""
    import tensorflow as tf

    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    )
    writer = tf.summary.create_file_writer(str(directory))

    def write(step: int, values: dict) -> None:
        try:
            with writer.as_default():
                for name, value in values.items():
                    if isinstance(value, float):
                        tensor = tf.constant(value, tf.float32)
                        tf.summary.write(name, tensor, step=step, metadata=metadata)
                writer.flush()
        except tf.errors.OpError as error:
            raise OSError(f"{directory}: {error.message}") from error

    return write


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def draw_loss(workdir: Path, objectives: tuple[str, ...]) -> Path:
    """loss.png: loss and accuracy of each objective over the steps, in training and on
    held-out text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(workdir / "metrics.jsonl")
    size = dict(figsize=(10, 4 * len(objectives)), layout="constrained")
    figure, axes = pyplot.subplots(len(objectives), 2, squeeze=False, **size)
    drawn = [f"{name}_{what}" for name in objectives for what in ("loss", "accuracy")]
    for axis, name in zip(axes.flat, drawn, strict=True):
        for kind, style in (("train", "-"), ("eval", "o-")):
            found = [r for r in rows if r["kind"] == kind and name in r]
            if found:
                label = {"train": "training", "eval": "held-out text"}[kind]
                steps = [row["step"] for row in found]
                axis.plot(steps, [row[name] for row in found], style, label=label)
        axis.set(xlabel="step", title=name.replace("_", " "))
        axis.grid(alpha=0.3)
        if axis.lines:  # none, if the run was stopped at once
            axis.legend()
    path = workdir / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
