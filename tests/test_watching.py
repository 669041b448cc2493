"""What is noticed while a run goes on: a loss that stands out, input that stalls."""

import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import input_watch, lane
from bert_jax.input_watch import InputWatch
from bert_jax.metrics import SpikeError, UnderWay, read_metrics
from bert_jax.objectives.base import Mean
from bert_jax.spikes import FEWEST, WINDOW, Spikes, judge, nothing_known, remember
from bert_jax.train import train
from tests import tiny


def falling(steps: int, seed: int = 0) -> np.ndarray:
    """Losses of an ordinary run: from 9 to about 3, with noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, steps)
    return 3 + 6 * np.exp(-np.arange(steps) / 100) + noise


def found(losses) -> list[int]:
    before = Spikes()
    return [n for n, loss in enumerate(losses) if before.usual(0, loss) is not None]


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_run_has_no_spikes(seed):
    assert found(falling(2000, seed)) == []


def test_losses_that_stand_out_are_found_also_one_after_the_other():
    losses = falling(600)
    losses[[10, 300, 301, 302, 450]] += 2.0
    assert found(losses) == [300, 301, 302, 450]  # at 10 nothing was known yet


def test_a_new_level_is_usual_after_a_while():
    losses = falling(600)
    losses[400:] += 3.0
    high = found(losses)
    assert high[0] == 400
    assert high[-1] < 400 + WINDOW
    assert found([2.0] * 200 + [3.0] * 200) == list(range(200, 200 + WINDOW // 2))


def test_a_loss_that_does_not_move_may_move_a_little():
    assert found([2.0] * 50 + [2.05]) == []
    assert found([2.0] * 50 + [2.2]) == [50]


def test_tasks_are_compared_with_themselves():
    before = Spikes()
    for step in range(4 * FEWEST):
        for number, level in enumerate((3.0, 0.3)):
            assert before.usual(number, level) is None, step
    assert before.usual(1, 3.0) == pytest.approx(0.3)


@jax.jit
def in_steps(losses):
    """What is usual at each of a series, and what stands out, on the device."""

    def step(known, loss):
        return remember(known, loss, jnp), judge(known, loss, jnp)

    return jax.lax.scan(step, nothing_known(1)[0], losses)[1]


@pytest.mark.parametrize("seed", range(5))
def test_host_and_device_agree_about_any_series(seed):
    rng = np.random.default_rng(seed)
    losses = falling(1500, seed).astype(np.float32)
    losses[rng.choice(1500, 60)] += rng.exponential(1.0, 60)
    losses[700:] += seed - 2  # another level
    losses[1100:] = np.round(losses[1100:], 1)  # many alike
    before, median, high = Spikes(), *jax.device_get(in_steps(losses))
    theirs = [before.usual(0, loss) for loss in losses]
    ours = zip(median.tolist(), high.tolist(), strict=True)
    assert [usual if stands_out else None for usual, stands_out in ours] == theirs
    assert 20 < sum(high) < 300
    assert np.isnan(median[:FEWEST]).all()
    assert np.isfinite(median[FEWEST:]).all()


def test_host_and_device_agree_to_the_last_bit():
    """On the least loss that stands out, and on the one just below it."""
    on_device = jax.jit(partial(judge, xp=jnp))
    rng = np.random.default_rng(0)
    for count in rng.integers(FEWEST, WINDOW + 1, 200):
        known = nothing_known(1)[0]
        known[WINDOW - count :] = rng.normal(3, 10 ** rng.uniform(-4, 0), count)
        low, high = np.nanmedian(known), np.float32(100)
        while np.nextafter(low, high) < high:
            middle = np.float32((low + high) / 2)
            low, high = (low, middle) if judge(known, middle)[1] else (middle, high)
        for loss, stands_out in ((low, False), (high, True)):
            usual, verdict = judge(known, loss)
            assert usual.dtype == np.float32
            assert usual == pytest.approx(np.nanmedian(known))
            assert verdict == stands_out
            assert jax.device_get(on_device(known, loss)) == (usual, stands_out)


def mean(x):
    return Mean(np.float32(x), np.float32(1))


def under_way_of(run) -> tuple[UnderWay, list[str], list[dict]]:
    """And what it says and writes."""
    said, written = [], []
    writers = SimpleNamespace(
        advance=lambda: None,
        say=said.append,
        write=lambda step, values, kind: written.append(values),
    )
    return UnderWay(run, lambda step: 0.1, writers), said, written


@pytest.mark.parametrize("spike", ["say", "stop"])
def test_a_spike_is_said_and_goes_on_or_ends_the_run(tiny_corpus, spike):
    run = tiny.make_run(tiny_corpus, spike=spike, steps=60, log_every=20)
    under_way, said, written = under_way_of(run)

    def steps():
        for step in range(1, 61):
            means = dict(loss=mean(9 if step in (50, 51) else 2), grad_norm=mean(1))
            under_way.add(step, means | dict(real_tokens=mean(1)), 0, flops=1.0)
        under_way.finish()

    text = "step 50: a spike, its loss is 9 where 2 is usual"
    if spike == "stop":
        with pytest.raises(SpikeError, match=text):
            steps()
    else:
        steps()
        assert said == [text, text.replace("50", "51")]
        assert [values["spikes"] for values in written] == [0.0, 0.0, 2.0]


def test_what_is_said_of_a_skip_goes_by_the_step(tiny_corpus):
    """It knows what was usual before a resume. Spikes one after the other, more than
    would end a run if they were no numbers, do not end it."""
    run = tiny.make_run(tiny_corpus, spike="skip", nonfinite="skip", steps=60)
    under_way, said, written = under_way_of(run)
    nothing = Mean(np.float32(0), np.float32(0))
    for step in range(1, 61):
        skipped = 3 < step <= 18
        means = dict(loss=mean(9 if skipped or step == 50 else 2), grad_norm=mean(1))
        means |= dict(real_tokens=mean(1), skipped=mean(skipped), usual_loss=mean(2.5))
        if step == 20:
            means |= dict(loss=nothing, grad_norm=nothing, skipped=mean(1))
        under_way.add(step, means, 0, flops=1.0)
    under_way.finish()
    text = "step {}: a spike, its loss is 9 where 2.5 is usual; its update is left out"
    last = "step 20 is skipped: its gradient is not finite"
    assert said == [*(text.format(step) for step in range(4, 19)), last]
    assert [values["spikes"] for values in written] == [
        3 < n < 19 for n in range(1, 61)
    ]
    assert sum(values["skipped"] for values in written) == 16


def test_a_run_that_stops_at_a_spike_says_how_to_go_on(
    tiny_corpus, tmp_path, monkeypatch
):
    """It keeps what was saved before, and the same steps are done when it goes on."""
    usual = Spikes.usual
    monkeypatch.setattr(
        Spikes,
        "usual",
        lambda self, *of: usual(self, *of) or (1.0 if third() else None),
    )
    losses = []

    def third() -> bool:
        losses.append(1)
        return len(losses) == 3

    run = tiny.make_run(tiny_corpus, spike="stop", steps=4)
    with pytest.raises(SpikeError) as caught:
        train(run, tmp_path / "run", progress=False)
    text = str(caught.value)
    assert text.startswith("step 3: a spike, its loss is ")
    assert "Stopped; step 2 is the last good checkpoint" in text
    assert "--config.spike=say goes on through it, --config.spike=skip" in text
    run = tiny.make_run(tiny_corpus, spike="say", steps=4)
    assert train(run, tmp_path / "run", progress=False)["finished"]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(input_watch.time, "monotonic", lambda: now[0])
    return now


def make_watch(stall_after: int):
    said, ended = [], []
    return InputWatch("corpus", stall_after, say=said.append, end=ended.append), (
        said,
        ended,
    )


def test_late_input_is_said_once_and_ends_the_process(clock, capsys):
    watch, (said, ended) = make_watch(1800)
    watch.look()  # nothing is waited for
    assert not watch.waiting()
    with watch.batch_of(812):
        assert watch.waiting()
        for clock[0] in (1, 59, 61, 62, 1799):
            watch.look()
        assert said == ["step 812 has waited 61 s for its batch (reading corpus)"]
        assert not ended
        clock[0] = 1801
        watch.look()
    assert ended == [75]
    told = capsys.readouterr().err
    assert told.startswith("\nerror: step 812 has waited 1801 s for its batch, longer ")
    assert "config.stall_after=1800: corpus cannot be read any more" in told
    assert watch.took == 1801
    watch.look()
    assert ended == [75]


def test_input_may_be_waited_for_for_ever(clock):
    watch, (said, ended) = make_watch(0)
    with watch.batch_of(1):
        clock[0] = 1e6
        watch.look()
    assert len(said) == 1
    assert not ended


def test_a_thread_looks_while_the_loop_waits(monkeypatch):
    watch, (said, ended) = make_watch(1)
    monkeypatch.setattr(input_watch, "SAID_AFTER", 0.5)
    with watch, watch.batch_of(3):
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ended
    assert said
    assert not watch.thread.is_alive()


def test_the_share_of_time_spent_waiting_is_told(tiny_corpus, tmp_path, monkeypatch):
    """One run whose batches take a while, one whose batches are there at once."""
    next_batch = lane.Lane.next_batch
    waits = {}
    for name, seconds in (("slow", 0.5), ("fast", 0.0)):

        def slow(self, *arguments, seconds=seconds):
            time.sleep(seconds)
            return next_batch(self, *arguments)

        monkeypatch.setattr(lane.Lane, "next_batch", slow)
        run = tiny.make_run(tiny_corpus, steps=8, log_every=8, save_every=8)
        train(run, tmp_path / name, progress=False)
        [row] = read_metrics(tmp_path / name / "metrics.jsonl")
        waits[name] = row["input_wait"]
    assert 0 <= waits["fast"] < waits["slow"] <= 1
    assert waits["slow"] > 0.3


def test_words_for_a_spike_are_checked(tiny_corpus):
    with pytest.raises(
        ValueError, match=r"unknown config.spike 'leap'.*say, skip, stop"
    ):
        tiny.make_run(tiny_corpus, spike="leap")
    with pytest.raises(ValueError, match="config.stall_after=-1.0 is negative"):
        tiny.make_run(tiny_corpus, stall_after=-1)
