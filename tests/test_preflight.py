"""The step that `train` would run, compiled for TPUs that are not here."""

import json
import re
import sys

import jax
import pytest

from bert_jax import preflight as module
from bert_jax import tpu
from bert_jax.cli import main
from bert_jax.config import load_config, override, resolve
from bert_jax.errors import InputError
from bert_jax.estimate import Estimate
from bert_jax.lane import Lane
from bert_jax.preflight import (
    GIB,
    NO_DATA,
    Memory,
    Report,
    find_batch,
    out_of_memory,
    steps_of,
)
from bert_jax.preflight_text import describe
from bert_jax.sharding import make_mesh
from bert_jax.tpu import CHIPS, Topology
from bert_jax.train import train
from tests import tiny
from tests.tpu import run_compile, run_for_tpu

SMALL = {
    **{"arch.layers": "1", "arch.width": "64", "arch.heads": "2", "arch.inner": "96"},
    **{"arch.max_positions": "34", "arch.vocab_size": "300", "length": "32"},
    **{"batch": "16"},
}
# An objective each, with what it needs; those of labels are trained on real data.
OBJECTIVES = {
    "masked_lm": ("bert-tiny", {}),
    "replaced_token": ("electra-small-discriminator", {}),
    "permuted_lm": ("xlnet-base-cased", {"objective.memory": "8"}),
    "causal_lm": ("gpt2", {}),
    "unilm": ("unilm-base-cased", {}),
    "capitalisation": ("ernie-2.0-base-en", {"rows": "doc"}),
    "token_document": ("ernie-2.0-base-en", {"rows": "doc"}),
    "sentence_reordering": ("ernie-2.0-base-en", {"rows": "doc"}),
    "sentence_distance": ("ernie-2.0-base-en", {"rows": "distance"}),
    "discourse_relation": ("ernie-2.0-base-en", {"rows": "labelled"}),
    "ir_relevance": ("ernie-2.0-base-en", {"rows": "labelled"}),
    "classify": ("bert-tiny", {"rows": "labelled"}),
    "tag": ("bert-tiny", {"rows": "labelled"}),
}


def small_run(preset: str = "bert-tiny", **changes: str):
    config = load_config(f"pretrain:{preset}")
    config.data = NO_DATA
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    name = changes.get("objective.name", config.objective.name)
    override(config, {"objective.name": name} | SMALL | changes)
    return resolve(config)


def run_of(objective: str, **more: str):
    preset, changes = OBJECTIVES[objective]
    return small_run(preset, **({"objective.name": objective} | changes | more))


def test_topologies():
    pod = Topology.parse("v5e:4x8")
    assert (pod.chips, str(pod), pod.chip) == (32, "v5e:4x8", CHIPS["v5e"])
    assert pod.environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-32"
    assert Topology.parse("v4:2x2x4").chips == 16
    for kind, clock in {"v4": 1.049, "v5e": 1.503, "v5p": 1.751, "v6e": 1.751}.items():
        assert CHIPS[kind].clock / 1e9 == pytest.approx(clock, abs=1e-3)


def test_flags_of_the_compiler_are_kept(monkeypatch):
    """Its threads get deep stacks, and keep what else is said; said twice it is once
    there, else a process would never find itself to be one that can compile."""
    pod = Topology.parse("v5e:2x2")
    for given in ("", "--xla_jf_dump_llo_text=true"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        flags = pod.environment["LIBTPU_INIT_ARGS"]
        deep = "--fibers_default_thread_stack_size=1048576"
        assert flags.split() == [*given.split(), deep]
        monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
        assert pod.environment["LIBTPU_INIT_ARGS"] == flags


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("v5:4x4", "Did you mean v5p or v5e"),
        ("v5e", "give it as v5e:4x4"),
        ("v5e:16", "give it as v5e:4x4"),
        ("v5e:2x2x2", "chips along each of the 2 dimensions"),
        ("v4:4x4", "give it as v4:2x2x2"),
        ("v5e:3x3", "1 or even, and at most 16"),
        ("v6e:16x32", "at most 16"),
        ("v5e:4x4 ", "give it as"),
    ],
)
def test_what_is_no_topology(text, what):
    with pytest.raises(InputError) as error:
        Topology.parse(text)
    assert what in str(error.value)


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    words = ["compile", "--config", "pretrain:bert-tiny", "--topology", "v5e:2x2"]
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert "needs no TPU: pip install 'bert_jax[tpu]'" in said


def test_it_runs_again_in_a_process_that_can_compile(monkeypatch, capsys):
    """The same words, and what libtpu reads when it is loaded."""
    ran = []

    def run(command, env):
        ran.append((command, env))
        return tpu.subprocess.CompletedProcess(command, -6)

    monkeypatch.setattr(tpu, "check_compiler", lambda: None)
    monkeypatch.setattr(tpu.subprocess, "run", run)
    words = ["compile", "--config", "pretrain:bert-tiny", "--topology", "v6e:4x4"]
    with pytest.raises(SystemExit):
        main(words)
    [(command, env)] = ran
    assert command == [sys.executable, "-m", "bert_jax", *words]
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["TPU_ACCELERATOR_TYPE"] == "v6e-16"
    assert "died of signal 6" in capsys.readouterr().err


def test_refusals_of_the_compiler():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
        "HLO temporaries (512.00G) exceeds available HBM (15.75G)."
    )
    assert out_of_memory(said) == (512 * GIB, int(15.75 * GIB))
    said = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."
    )
    assert out_of_memory(said) == (int(20.5 * GIB), int(15.75 * GIB))
    with pytest.raises(InputError, match="gave up:\nUNIMPLEMENTED: no such thing"):
        out_of_memory("UNIMPLEMENTED: no such thing")


def report(batch: int = 64, *, needed: float = 8.0, fits: bool = True) -> Report:
    memory = Memory(*(int(size * GIB) for size in (2, 2, 2, needed - 2, 0)))
    found = Estimate(1_500_000, 1.5e9, 1e-3, 1e12, {"sort": 1e-3}, 0.0, (), ())
    return Report(
        preset="bert-tiny",
        step="masked_lm",
        topology="v5e:2x2",
        chips=4,
        mesh={"data": 4, "fsdp": 1, "tensor": 1},
        batch=batch,
        length=128,
        accumulate=1,
        dtype="bfloat16",
        parameters=1000,
        flops=2e9,
        tracing_seconds=1.0,
        compile_seconds=2.0,
        hbm=16 * GIB,
        needed=int(needed * GIB),
        memory=memory if fits else None,
        estimate=found if fits else None,
    )


def test_what_is_told():
    """Of a step that fits and of one that does not; as text and as JSON."""
    fits, not_so = report(), report(needed=20.5, fits=False)
    # 2e9 FLOPs on four chips of 1e12 a second: 0.5 ms.
    assert fits.share_of_peak == pytest.approx(0.5)
    assert fits.share_with_modelled == pytest.approx(0.25)
    said = describe(fits)
    assert "fits: a chip needs 8.00 of 16.00 GiB" in said
    assert "ESTIMATE" in said
    assert "1.50 M at 1.500 GHz = 1.00 ms: 0.50 of the peak of 1 TFLOP/s" in said
    said = describe(not_so)
    assert "DOES NOT FIT: a chip needs 20.50 GiB and has 16.00, 4.50 GiB too" in said
    assert "ESTIMATE" not in said
    told = json.loads(json.dumps([fits.as_dict(), not_so.as_dict()]))
    assert [one["fits"] for one in told] == [True, False]
    assert told[0]["share_of_peak"] == pytest.approx(0.5)
    assert told[0]["memory"]["aliased"] == 2 * GIB


@pytest.mark.parametrize("most", [1, 2, 7, 8, 37, 64])
def test_find_batch(monkeypatch, most):
    """In few steps, where a batch up to `most` rows a device fits."""
    devices = jax.devices()[:4]
    tried = []

    def compiled(run, topology, *, first, say):
        tried.append(run.batch)
        yield report(run.batch, fits=run.batch <= 4 * most)

    monkeypatch.setattr(Topology, "devices", lambda self, slices: devices)
    monkeypatch.setattr(module, "preflight", compiled)
    said = []
    run, pod = small_run(batch="32"), Topology.parse("v5e:2x2")
    found, too_many = find_batch(run, pod, say=said.append)
    assert (found.batch, too_many) == (4 * most, 4 * most + 4)
    assert len(tried) == len(set(tried)) == len(said) <= 12


def test_find_batch_of_streams_in_both_directions(monkeypatch):
    """A half of the batch each: it is even, also on one chip."""

    def compiled(run, topology, *, first, say):
        yield report(run.batch, fits=run.batch <= 7)

    monkeypatch.setattr(Topology, "devices", lambda self, slices: jax.devices()[:1])
    monkeypatch.setattr(module, "preflight", compiled)
    run = small_run(batch="2", rows="stream", direction="both")
    found, too_many = find_batch(run, Topology.parse("v5e:1x1"), say=print)
    assert (found.batch, too_many) == (6, 8)


def test_no_batch_fits(monkeypatch):
    nothing = iter([report(4, needed=20, fits=False)])
    devices = jax.devices()[:4]
    monkeypatch.setattr(Topology, "devices", lambda self, slices: devices)
    monkeypatch.setattr(module, "preflight", lambda *_, **options: nothing)
    with pytest.raises(InputError, match="no batch fits v5e:2x2: even 4 rows take 20"):
        find_batch(small_run(batch="4"), Topology.parse("v5e:2x2"), say=print)


def test_find_batch_wants_one_stage():
    run = small_run(stages=({"steps": 999_000}, {"steps": 1000, "length": 16}))
    with pytest.raises(InputError, match="--find-batch takes a run of one stage"):
        find_batch(run, Topology.parse("v5e:2x2"))


def test_every_stage_has_its_step_once():
    stages = ({"steps": 900_000}, {"steps": 99_000, "length": 16})
    run = small_run(stages=(*stages, {"steps": 1000}))
    steps = steps_of(run, make_mesh(run.mesh, jax.devices()[:1]), say=lambda _: None)
    shapes = [step.batch["ids"].shape for step in steps]
    assert shapes == [(16, 32), (16, 16)]


class CompiledError(Exception):
    """Enough is seen."""


@pytest.mark.parametrize("spike", ["say", "skip"])
def test_it_is_the_step_that_train_runs(tiny_corpus, monkeypatch, tmp_path, spike):
    """The same program, to the letter, as the one that a training run compiles."""
    run = tiny.make_run(tiny_corpus, spike=spike)
    [step] = steps_of(run, make_mesh(run.mesh), say=lambda _: None)
    mine = step.lower().as_text()
    build, texts = Lane.build, []

    def watched(lane, *arguments):
        build(lane, *arguments)
        compiled = lane.step

        def lowered(*given):
            texts.append(compiled.lower(*given).as_text())
            raise CompiledError

        lane.step = lowered

    monkeypatch.setattr(Lane, "build", watched)
    with pytest.raises(CompiledError):
        train(run, tmp_path / "run", progress=False)
    assert texts == [mine]
    assert ("tensor<1x100xf32>" in mine) == (spike == "skip")  # the losses before


PROGRAM = """
import json
import jax
from bert_jax.preflight import preflight
from bert_jax.tpu import Topology
from tests.test_preflight import run_of, small_run

jax.config.update("jax_enable_compilation_cache", False)  # it cannot be read for TPUs

def compiled(run, topology):
    [report] = preflight(run, Topology.parse(topology), say=lambda _: None)
    return report.as_dict()

"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "chips"), [("v5e:1x1", 1), ("v5e:2x2", 4), ("v5e:4x4", 16)]
)
def test_every_objective_compiles(topology, chips):
    from bert_jax.objectives import OBJECTIVES as ALL

    assert OBJECTIVES.keys() == ALL.keys()
    program = f"""
found = {{name: compiled(run_of(name), "{topology}") for name in {[*OBJECTIVES]}}}
print(json.dumps(found))
"""
    found = run_for_tpu(PROGRAM + program)
    assert found.keys() == ALL.keys()
    for name, one in found.items():
        assert one["fits"]
        assert one["step"] == name
        assert (one["chips"], one["mesh"]["data"]) == (chips, chips)
        assert one["dtype"] == "bfloat16"
        told = {
            (each["kind"], *each["axes"]) for each in one["estimate"]["collectives"]
        }
        assert told == ({("all-reduce", "data")} if chips > 1 else set()), name
        assert one["estimate"]["cycles"] > 10_000
        assert 0 < one["share_with_modelled"] < one["share_of_peak"] < 1
        parameters = 4 * one["parameters"]  # and two moments of each
        assert one["memory"]["arguments"] > 3 * parameters
        assert one["memory"]["aliased"] > 0.95 * 3 * parameters
    one = found["masked_lm"]
    # Small arrays are padded to the tiles of the chip.
    assert one["memory"]["arguments"] < 8 * 4 * one["parameters"]
    assert one["memory"]["aliased"] > 0.95 * one["memory"]["arguments"]
    names = {module["name"] for module in one["estimate"]["modules"]}
    assert {"optimizer", "layers/ffn/inner", "layers/attention/q"} <= names


@pytest.mark.slow
def test_a_pod_of_256_chips():
    """BERT-large, all of it, with arch.stack=scan, as `bert_jax compile --help` has it:
    a layer is compiled once. The default, `loop`, has the compiler at work for minutes
    with 24 of them (docs/speed.md); on few layers the tests above compile it."""
    program = """
run = small_run("bert-large-uncased", batch="2048", arch__stack="scan",
                arch__layers="24", arch__width="1024", arch__heads="16",
                arch__inner="4096", arch__vocab_size="30522",
                arch__max_positions="512", length="128")
print(json.dumps(compiled(run, "v5e:16x16")))
"""
    found = run_for_tpu(PROGRAM + program)
    assert found["fits"]
    assert (found["chips"], found["mesh"]["data"]) == (256, 256)
    assert found["parameters"] > 3.3e8


@pytest.mark.slow
def test_two_slices():
    """In a slice chips tell each other what its mesh says; between slices goes what
    each chip keeps of the gradients, which has no time."""
    program = """
run = small_run(mesh__slices="2", mesh__fsdp="2")
print(json.dumps(compiled(run, "v5e:2x2")))
"""
    found = run_for_tpu(PROGRAM + program)
    assert (found["chips"], found["mesh"]["data"]) == (8, 4)
    told = found["estimate"]["collectives"]
    assert None not in [one["axes"] for one in told]  # no groups but those of the mesh
    [between] = [one for one in told if one["kind"] == "between slices"]
    assert (between["axes"], between["seconds"]) == (["data"], None)
    gradients = 4 * found["parameters"]  # bytes, a quarter of them on each chip
    assert gradients / 4 < between["bytes"] == between["sent"] < gradients
    inside = {(one["kind"], *one["axes"]) for one in told if one is not between}
    assert {("all-gather", "fsdp"), ("all-reduce", "data", "fsdp")} <= inside
    assert not {"send", "recv", "recv-done"} & {*found["estimate"]["modelled"]}


@pytest.mark.slow
def test_a_parameter_is_gathered_before_it_is_multiplied():
    """Not multiplied part by part, as the compiler has it of itself, while the parts go
    round by collective-permute."""
    program = """
run = small_run(mesh__data="1", mesh__fsdp="4", batch="64", length="128",
                arch__stack="scan", arch__max_positions="512",
                arch__width="256", arch__heads="4", arch__inner="1024")
print(json.dumps(compiled(run, "v5e:2x2")))
"""
    told = run_for_tpu(PROGRAM + program)["estimate"]["collectives"]
    kinds = {(one["kind"], *one["axes"]) for one in told}
    assert kinds == {("all-gather", "fsdp"), ("all-reduce", "fsdp")}


def words_of(preset: str, topology: str, **changes) -> list[str]:
    """`bert_jax compile` of a small run, as it is typed."""
    words = ["--config", f"pretrain:{preset}", "--topology", topology]
    return words + [
        f"--config.{name}={value}" for name, value in (SMALL | changes).items()
    ]


# Two rows of 512 tokens fill a chip; it takes no longer to compile than one layer.
MANY_LAYERS = {"arch.layers": 4000, "arch.stack": "scan", "arch.max_positions": 514}
STAGES = "({'steps': 999_000}, {'steps': 1000, 'length': 16})"


@pytest.mark.slow
def test_the_command_tells_of_the_first_step():
    """As text, for v5p."""
    words = words_of("bert-tiny", "v5p:2x2x2", stages=STAGES)
    done = run_compile(*words, "--first")
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout
    assert said.count("bert-tiny on v5p:2x2x2: 8 chips, mesh data 8, fsdp 1") == 1
    assert "step of masked_lm: 16 rows of 32 tokens, bfloat16" in said
    assert re.search(r"fits: a chip needs [\d.]+ of 95.74 GiB", said)
    assert "at 1.751 GHz" in said
    assert re.search(r"\n  all-reduce +data +\d+ +[\d.]+ +[\d.]+ ms\n", said)
    assert re.search(r"\n  optimizer( +[\d.]+){3} +[\d.]+%\n", said)


@pytest.mark.slow
def test_the_command_ends_with_1_where_a_step_does_not_fit():
    """As JSON, for v6e; the step of the first stage fits."""
    stages = "({'steps': 999_000}, {'steps': 1000, 'length': 512})"
    changes = MANY_LAYERS | {"batch": 8, "stages": stages}
    words = words_of("bert-tiny", "v6e:2x2", **changes)
    done = run_compile(*words, "--json")
    assert done.returncode == 1, done.stderr[-3000:]
    first, second = json.loads(done.stdout)
    assert [first["length"], second["length"]] == [32, 512]
    assert first["fits"]
    assert first["estimate"]["cycles"] > 10_000
    assert not second["fits"]
    assert second["needed"] > second["hbm"] == first["hbm"] == int(31.25 * GIB)


@pytest.mark.slow
def test_the_command_finds_the_largest_batch():
    """For v4."""
    changes = MANY_LAYERS | {"length": 512, "batch": 4}
    done = run_compile(*words_of("bert-tiny", "v4:2x2x1", **changes), "--find-batch")
    assert done.returncode == 0, done.stderr[-3000:]
    tried = re.findall(r"batch (\d+) .* of 30.75 GiB, (fits|does not fit)", done.stderr)
    assert tried == [("4", "fits"), ("8", "does not fit")]
    assert "bert-tiny on v4:2x2x1: 4 chips" in done.stdout
    said = "--config.batch=4 fits v4:2x2x1 (1 row for each chip), 8 does not"
    assert said in done.stdout
