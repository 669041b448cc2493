"""The bake-off: several objectives, one corpus, equal FLOPs, one evaluation.

    bert_jax compare --config compare --workdir DIR

Every entry is a preset with changes. The number of its steps is what the budget of
FLOPs buys of its own steps, generator and heads included (flops.py). What is asked is
what transfers: linear probes along the way, probes and short finetuning at the end, for
each of several seeds.

    DIR/comparison.json            what is compared, with what a step takes and a hash
                                   of the tasks; another one is refused
    DIR/tokenizer, DIR/corpus      made once, from raw text
    DIR/runs/ENTRY/seed-N          a workdir of `bert_jax train`
    DIR/scores/ENTRY/seed-N/*.json one evaluation each, whole or not at all
    DIR/logs/ENTRY/seed-N.log      what it said, where several work side by side
    DIR/results.json, table.md, curves.png, report.html

Killed at any moment, the same command goes on; results.json is the same, bit for bit
(with as many workers: sums over fewer cores are added up in another order, which is
told).
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from bert_jax.comparison import Comparison, Entry
from bert_jax.config import Run, flatten, load_config, override, resolve
from bert_jax.course import course_of
from bert_jax.data.corpus import Corpus, open_corpus
from bert_jax.data.labelled import Labelled
from bert_jax.data.prepare import prepare
from bert_jax.data.tasks import TASKS, Task, read_task
from bert_jax.data.text import documents, find_sources
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer, train_wordpiece
from bert_jax.errors import InputError
from bert_jax.flops import step_flops
from bert_jax.lane import make_lane
from bert_jax.model_dir import load
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.objectives.base import Objective
from bert_jax.report import write_report
from bert_jax.sharding import make_mesh
from bert_jax.side_by_side import share_cores, side_by_side
from bert_jax.train import compute_dtype, fit_vocabulary, train
from bert_jax.whole import locked, whole_folder, write_text
from bert_jax.workdir import last_scores

Parts = tuple[Task, Labelled, Labelled]  # a task, its training and its dev part
CORPUS = ("text", "held_out", "vocab_size", "lowercase")  # what it is made of
OFF = 0.02  # of the budget may an entry spend more or less, since steps are whole


@dataclasses.dataclass(frozen=True)
class Plan:
    """An entry with what follows from the corpus and the budget."""

    entry: Entry
    run: Run  # of seed 0
    model: Model
    objective: Objective
    step_flops: float
    seeds: range
    real: float  # share of the places in a row that hold a token

    @property
    def steps(self) -> int:
        return self.run.steps if self.entry.trained else 0

    def points(self, count: int) -> list[int]:
        """Steps at which it is probed: the last, its half, its quarter, ..."""
        if not self.entry.trained:
            return [0]
        return [self.steps >> n for n in reversed(range(count))]

    def describe(self) -> dict:
        model, arch = self.model, self.model.arch
        shape = dict(heads=self.objective.heads, towers=model.towers)
        return {
            "name": self.entry.name,
            "preset": self.entry.preset,
            "objective": self.objective.name if self.entry.trained else "none",
            "changes": self.entry.changes,
            "parameters": count_params(arch, **shape),
            "parameters_kept": count_params(arch, heads=()),
            "step_flops": self.step_flops,
            "steps": self.steps,
            "flops": self.step_flops * self.steps,
            "rows": self.run.rows,
            "tokens": round(self.steps * self.run.batch * self.run.length * self.real),
        }


def compare(
    comparison: Comparison,
    workdir: str | Path,
    *,
    command: str,
    workers: int = 1,
    progress: bool = True,
) -> dict | None:
    """Compares, or goes on comparing. Returns the results, or None if interrupted."""
    if workers != 1:
        share_cores(workers)  # or raises
    workdir = Path(workdir)
    runs = [entry_run(comparison, entry, "-") for entry in comparison.entries]
    inputs = [str(Path(comparison.data) / name) for name in comparison.text]
    find_sources([*inputs, *(f"{comparison.data}/{n}" for n in comparison.held_out)])
    check_layers(comparison, runs)
    with locked(workdir):
        told = {**dataclasses.asdict(comparison), "workers": workers}
        claim(workdir, told)
        tokenizer = make_tokenizer(comparison, inputs, workdir / "tokenizer")
        tasks = read_tasks(comparison, tokenizer)
        corpus = make_corpora(
            comparison, tokenizer, workdir / "corpus", progress=progress
        )
        plans = [make_plan(comparison, e, corpus) for e in comparison.entries]
        check_budget(comparison, plans)
        claim(workdir, {**told, "made": made(plans, tasks)})
        for plan in plans:
            print(
                f"{plan.entry.name}: {plan.steps:,} steps of {plan.step_flops:.3g} "
                f"FLOPs, {plan.steps * plan.step_flops:.4g} in all"
            )
        most = max(plan.seeds.stop for plan in plans)
        benches = [
            Bench(comparison, plan, seed, workdir)
            for seed in range(most)
            for plan in plans
            if seed in plan.seeds
        ]
        left = [bench for bench in benches if not bench.finished]
        print(f"{len(left)} runs of {len(benches)} are left")
        for bench in work_through(left, tasks, workers=workers, progress=progress):
            gather(comparison, plans, workdir, command)  # what there is so far
            count = sum(each.finished for each in benches)
            print(f"[{count}/{len(benches)}] {bench.title}: done", flush=True)
        if not all(bench.finished for bench in benches):
            print("stopped; the same command goes on from there")
            return None
        return gather(comparison, plans, workdir, command)


def claim(workdir: Path, told: dict) -> None:
    """Writes what is compared; from then on it must be the same. What is `made` of it
    is known later; until then only that which the corpus is made of may not change, so
    that a budget that was refused can be mended."""
    path = workdir / "comparison.json"
    now = json.loads(json.dumps(told))
    if not path.is_file():
        if [p for p in workdir.iterdir() if p.name != ".lock"]:
            raise InputError(f"{workdir} holds something else: use another --workdir")
        write_text(path, json.dumps(now, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    begun = "made" in before or (workdir / "runs").is_dir()
    if begun and "made" in now and "made" not in before:
        raise InputError(
            f"{path} does not say what steps take and which tasks were read: it is of "
            "an older version; use another --workdir"
        )
    names = {*before, *now} - {"data"} if begun else {*CORPUS}  # data may have moved
    names.discard("workers")  # which change last digits alone
    if "made" not in now:
        names.discard("made")
        had, have = (side.get("workers") for side in (before, now))
        if begun and had and have and had != have:
            print(
                f"begun with --workers {had}, now it is {have}: sums over another "
                "number of cores differ in their last digits, and so may results"
            )
    a, b = (
        dict(flatten({name: side[name] for name in sorted(names & {*side})}))
        for side in (by_name(before), by_name(now))
    )
    problems = [
        f"{name}: {a.get(name)!r} in the workdir, {b.get(name)!r} now"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]
    if problems:
        changed = any(problem.startswith("made.") for problem in problems)
        why = "the code counts FLOPs or reads tasks otherwise, or the tasks changed; "
        raise InputError(
            f"{workdir} belongs to another comparison; {why * changed}use the same "
            "values or another --workdir:\n" + "\n".join(problems)
        )
    if not begun:
        write_text(path, json.dumps(now, indent=1) + "\n")


def by_name(told: dict) -> dict:
    return {**told, "entries": {entry["name"]: entry for entry in told["entries"]}}


def made(plans: list[Plan], tasks: dict[str, Parts]) -> dict:
    """What code and files make of a comparison: were it otherwise after a resume, what
    is compared would be unlike."""
    return {
        "entries": {
            plan.entry.name: {"step_flops": plan.step_flops, "steps": plan.steps}
            for plan in plans
        },
        "tasks": {
            name: {"train": train.content, "dev": dev.content}
            for name, (_, train, dev) in tasks.items()
        },
    }


def check_layers(comparison: Comparison, runs: list[Run]) -> None:
    wanted = comparison.probe.layers
    problems = [
        f"config.probe.layers={wanted}: entry {entry.name!r} has {run.arch.layers}"
        for entry, run in zip(comparison.entries, runs, strict=True)
        if run.arch.layers < wanted
    ]
    if problems:
        raise InputError("\n".join(problems))


def check_budget(comparison: Comparison, plans: list[Plan]) -> None:
    """Steps are whole, and a multiple of 2^(points - 1): a small budget is missed."""
    parts = 1 << (comparison.points - 1)
    trained = [plan for plan in plans if plan.entry.trained]
    problems = [
        f"entry {plan.entry.name!r}: {plan.steps} steps of {plan.step_flops:.3g} are "
        f"{plan.steps * plan.step_flops:.3g} FLOPs, {share:.1%} of the budget"
        for plan in trained
        for share in [plan.steps * plan.step_flops / comparison.flops]
        if abs(share - 1) > OFF
    ]
    if problems:
        # Half of `parts` steps is the most that rounding takes off or puts on.
        enough = max(plan.step_flops for plan in trained) * parts / 2 / OFF
        raise InputError(
            f"config.flops={comparison.flops:.3g} is too little for steps in multiples "
            f"of {parts} (config.points={comparison.points}) to come within {OFF:.0%} "
            f"of it; from config.flops={enough:.3g} on they always do:\n"
            + "\n".join(problems)
        )


# --- what all entries share ----------------------------------------------------------


def make_tokenizer(
    comparison: Comparison, inputs: list[str], folder: Path
) -> Tokenizer:
    if not folder.is_dir():
        print(f"a WordPiece vocabulary of {comparison.vocab_size} pieces")
        with whole_folder(folder) as scratch:
            train_wordpiece(
                (document.text for document in documents(inputs)),
                vocab_size=comparison.vocab_size,
                lowercase=comparison.lowercase == "yes",
                progress=sys.stderr.isatty(),
            ).save(scratch)
    return load_tokenizer(folder)


def read_tasks(comparison: Comparison, tokenizer: Tokenizer) -> dict[str, Parts]:
    runs = (entry_run(comparison, entry, "-") for entry in comparison.entries)
    how = dict(tokenizer=tokenizer, length=min(run.length for run in runs))
    return {name: read_task(name, comparison.data, **how) for name in comparison.tasks}


def make_corpora(
    comparison: Comparison, tokenizer: Tokenizer, folder: Path, *, progress: bool
) -> Corpus:
    """The corpus to learn from; that of held-out text is beside it."""
    for part in ("text", "held_out"):
        if not (folder / part / "corpus.json").is_file():
            inputs = [f"{comparison.data}/{name}" for name in getattr(comparison, part)]
            prepare(inputs, tokenizer=tokenizer, out=folder / part, progress=progress)
    return open_corpus(folder / "text")


def entry_run(comparison: Comparison, entry: Entry, data: str, **changes) -> Run:
    """The entry's config, as `bert_jax train` would be told it."""
    config = load_config(f"pretrain:{entry.preset}")
    told = {**comparison.shared, **entry.changes, "data": data, **changes}
    try:
        override(config, told)
        return resolve(config)
    except InputError as error:
        raise InputError(f"entry {entry.name!r}: {error}") from None


def make_plan(comparison: Comparison, entry: Entry, corpus: Corpus) -> Plan:
    """Its steps are a multiple of 2^(points - 1), so that checkpoints halve them. What
    the entry lacks is told before any is trained."""
    quiet = lambda *_: None  # noqa: E731
    held_out = open_corpus(corpus.path.parent / "held_out")
    run = fit_vocabulary(entry_run(comparison, entry, str(corpus.path)), corpus, quiet)
    try:
        (leg,) = course_of(run).legs
        lane = make_lane(leg, corpus, held_out, make_mesh(), quiet)
    except InputError as error:
        raise InputError(f"entry {entry.name!r}: {error}") from None
    objective = lane.objective
    dtype = compute_dtype(run.dtype)
    model = Model(run.arch, dtype=dtype, towers=objective.towers(run.arch))
    each = step_flops(model, objective, batch=run.batch, length=run.length)
    parts = 1 << (comparison.points - 1)
    every = max(1, round(comparison.flops / each / parts))
    changes = dict(steps=every * parts, save_every=every, keep=parts)
    changes |= {"eval.data": str(held_out.path), "eval.every": 0}
    run = entry_run(comparison, entry, str(corpus.path), **changes)
    seeds = range(entry.seeds or comparison.seeds)
    return Plan(entry, run, model, objective, each, seeds, lane.rows.plan.real)


# --- one entry, one seed -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bench:
    """Pretraining and evaluation of one entry with one seed."""

    comparison: Comparison
    plan: Plan
    seed: int
    workdir: Path

    @property
    def place(self) -> str:
        return f"{self.plan.entry.folder}/seed-{self.seed}"

    @property
    def title(self) -> str:
        return f"{self.plan.entry.name}, seed {self.seed}"

    @property
    def run_folder(self) -> Path:
        return self.workdir / "runs" / self.place

    def wanted(self) -> Iterator[tuple[str, int, str]]:
        """(kind, step, task) of every evaluation."""
        points = self.plan.points(self.comparison.points)
        for step in points:
            for task in self.comparison.tasks:
                yield "probe", step, task
        for task in self.comparison.tasks:
            yield "finetune", points[-1], task

    def file(self, kind: str, step: int, task: str) -> Path:
        folder = self.workdir / "scores" / self.place
        return folder / f"{kind}-{task}-{step}.json"

    @property
    def finished(self) -> bool:
        return all(self.file(*what).is_file() for what in self.wanted())

    def work(self, tasks: dict[str, Parts], *, progress: bool) -> bool:
        """False if it was interrupted."""
        if not self.pretrain(progress=progress):
            return False
        self.evaluate(tasks, progress=progress)
        return True

    def pretrain(self, *, progress: bool) -> bool:
        """False if it was interrupted."""
        if not self.plan.entry.trained:
            return True
        run = dataclasses.replace(self.plan.run, seed=self.seed)
        return train(run, self.run_folder, progress=progress)["finished"]

    def params(self, step: int) -> dict:
        plan = self.plan
        if plan.entry.trained:
            return load(self.run_folder, step=step).params
        key = jax.random.key(self.seed)
        return init_params(plan.model, key, heads=plan.objective.heads)

    def evaluate(self, tasks: dict[str, Parts], *, progress: bool) -> None:
        """What has not been scored yet."""
        at, params = None, None
        for kind, step, name in self.wanted():
            path = self.file(kind, step, name)
            if path.is_file():
                continue
            if step != at:
                at, params = step, self.params(step)
            what = (self.plan.model, params, *tasks[name])
            if kind == "probe":
                found = self.comparison.probe.run(*what)
            else:
                shown = f"finetune {name}" if progress else ""
                recipe = self.comparison.finetune
                found = recipe.run(*what, seed=self.seed, progress=shown)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(found) + "\n")
            print(f"  step {step}: {kind} {name} {found['score']:.3f}", flush=True)

    def result(self) -> dict | None:
        """All of its scores; None if some are not there yet."""
        if not self.finished:
            return None
        found = {kind: [] for kind in ("probe", "finetune")}
        for kind, step, name in self.wanted():
            scores = json.loads(self.file(kind, step, name).read_text())
            flops = step * self.plan.step_flops
            found[kind].append({"task": name, "step": step, "flops": flops, **scores})
        own = {}
        if self.plan.entry.trained:
            scores = last_scores(self.run_folder)["eval"]
            own = {name: scores[name] for name in sorted({*scores} - {"step", "kind"})}
        return {"seed": self.seed, "held_out": own, **found}


def work_through(
    benches: list[Bench], tasks: dict[str, Parts], *, workers: int, progress: bool
) -> Iterator[Bench]:
    """Yields each that is finished; ends early where one was interrupted. Side by side
    each is a process of its own."""
    if workers == 1:
        for bench in benches:
            print(f"{bench.title} ...")
            if not bench.work(tasks, progress=progress):
                return
            yield bench
        return
    cache = jax.config.jax_compilation_cache_dir
    jobs = {
        bench.workdir / f"logs/{bench.place}.log": (
            *(bench.comparison, bench.plan.entry, bench.seed, bench.workdir),
            cache,
        )
        for bench in benches
    }
    of = dict(zip(jobs, benches, strict=True))
    for log in side_by_side(work_alone, jobs, workers=workers):
        yield of[log]


def work_alone(
    comparison: Comparison, entry: Entry, seed: int, workdir: Path, cache: str | None
) -> bool:
    """One entry with one seed, in a process of its own."""
    jax.config.update("jax_compilation_cache_dir", cache)
    tasks = read_tasks(comparison, load_tokenizer(workdir / "tokenizer"))
    plan = make_plan(comparison, entry, open_corpus(workdir / "corpus/text"))
    return Bench(comparison, plan, seed, workdir).work(tasks, progress=False)


def gather(
    comparison: Comparison, plans: list[Plan], workdir: Path, command: str
) -> dict:
    """Writes results.json and the report from what is scored."""
    entries = []
    for plan in plans:
        benches = [Bench(comparison, plan, s, workdir) for s in plan.seeds]
        runs = [run for bench in benches if (run := bench.result())]
        entries.append({**plan.describe(), "wanted": len(plan.seeds), "seeds": runs})
    results = {
        "config": json.loads(json.dumps(dataclasses.asdict(comparison))),
        "metrics": {name: TASKS[name].metric for name in comparison.tasks},
        "entries": entries,
    }
    del results["config"]["data"]  # where it lay is no result
    write_text(workdir / "results.json", json.dumps(results, indent=1) + "\n")
    write_report(results, workdir, command=command)
    return results
