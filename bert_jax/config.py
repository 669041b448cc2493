"""Preset + config file + overrides -> one frozen `Run`.

A config file has `get_config(arg)` and returns an ml_collections ConfigDict, the
convention of JAX research code. Every field can be overridden by
`--config.field=value`; an unknown field is an error that names the nearest ones.
"""

import ast
import dataclasses
import importlib.util
import json
from pathlib import Path

from ml_collections import ConfigDict

from bert_jax.data.order import DIRECTIONS
from bert_jax.data.pairs import RULES
from bert_jax.data.plans import ACROSS, KINDS
from bert_jax.errors import InputError, unknown
from bert_jax.models.arch import Arch
from bert_jax.objectives import OBJECTIVES
from bert_jax.optim import Optim
from bert_jax.presets import preset
from bert_jax.sharding import Axes

DTYPES = ("auto", "float32", "bfloat16")
NONFINITE = ("stop", "skip")
SPIKE = ("say", "stop", "skip")
# Fields of an objective that the tokenizer, the preset and the corpus decide.
DECIDED = ("vocab_size", "mask_id", "special_ids", "pair_head", "small", "table")
# Fields that change what a run reports or keeps, or where, never what it computes; and
# `spike`, since whoever saw spikes may want them skipped from there on.
FREE = (
    *("log_every", "save_every", "keep", "eval", "data", "init", "mesh"),
    *("spike", "stall_after"),
)


@dataclasses.dataclass(frozen=True)
class Eval:
    data: str = ""  # corpus of held-out text; "" = no evaluation
    every: int = 1000  # steps between evaluations; there is always one at the end
    rows: int = 1024  # rows scored, spread over the text; 0 = all


PARTS = {"arch": Arch, "optim": Optim, "eval": Eval, "mesh": Axes}


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything one training run is told."""

    preset: str
    arch: Arch
    objective: dict  # its name, and its hyper-parameters
    optim: Optim
    eval: Eval
    data: str  # corpus made by `bert_jax prepare`
    rows: str  # how text is laid out: a kind of data/plans.py
    across: str  # attend | block: whether attention crosses documents in a row
    direction: str  # forward | both: half of a stream's batch goes backwards
    alpha: float  # inputs of the corpus are sampled by share ** alpha; 1 = as they are
    length: int  # tokens in a row
    batch: int  # rows in a step, over all devices
    steps: int
    seed: int
    init: str  # model to start from; "" = random
    dtype: str  # of the computation: auto | float32 | bfloat16
    log_every: int
    save_every: int
    keep: int  # checkpoints kept
    accumulate: int = 1  # parts a batch is scored in, one after the other
    copies: int = 0  # ways a row is corrupted, always the same; 0 = anew at each step
    nonfinite: str = "stop"  # stop | skip: what follows a gradient that is no number
    spike: str = "say"  # say | stop | skip: after a loss that stands out (spikes.py)
    stages: tuple = ()  # course.py
    tasks: tuple = ()  # course.py
    mesh: Axes = dataclasses.field(default_factory=Axes)  # what lies on which devices
    stall_after: float = 1800.0  # seconds without a batch or a step; 0 = never

    def __post_init__(self):
        for field in ("stages", "tasks"):  # lists, where they come from JSON
            object.__setattr__(self, field, tuple(getattr(self, field)))
        problems = []
        if not self.data:
            problems.append(
                "config.data is not set: give a corpus made by `bert_jax prepare`, "
                "--config.data=DIR"
            )
        if self.dtype not in DTYPES:
            problems.append(unknown("config.dtype", self.dtype, DTYPES))
        counts = ("batch", "steps", "log_every", "save_every", "keep", "accumulate")
        for name in counts:
            if getattr(self, name) < 1:
                problems.append(f"config.{name}={getattr(self, name)}: at least 1")
        for name in ("every", "rows"):
            if getattr(self.eval, name) < 0:
                problems.append(f"config.eval.{name} is negative")
        if not 0 <= self.seed < 2**32:
            problems.append(f"config.seed={self.seed} must be in 0..{2**32 - 1}")
        if not self.stall_after >= 0:
            problems.append(f"config.stall_after={self.stall_after} is negative")
        if self.copies < 0:
            problems.append(f"config.copies={self.copies} is negative")
        if self.nonfinite not in NONFINITE:
            problems.append(unknown("config.nonfinite", self.nonfinite, NONFINITE))
        if self.spike not in SPIKE:
            problems.append(unknown("config.spike", self.spike, SPIKE))
        if self.accumulate > 1 and self.batch % self.accumulate:
            problems.append(
                f"config.batch={self.batch} does not divide into "
                f"config.accumulate={self.accumulate} parts"
            )
        kinds = (*KINDS, "labelled")  # data is a file of labelled pairs
        if self.rows not in kinds:
            problems.append(unknown("config.rows", self.rows, kinds))
        if self.across not in ACROSS:
            problems.append(unknown("config.across", self.across, ACROSS))
        if self.optim.warmup > self.steps:
            problems.append(
                f"config.optim.warmup={self.optim.warmup} is more than "
                f"config.steps={self.steps}: the rate would never reach its top"
            )
        if self.direction not in DIRECTIONS:
            problems.append(unknown("config.direction", self.direction, DIRECTIONS))
        if self.direction == "both" and (self.rows != "stream" or self.batch % 2):
            problems.append(
                f"config.direction=both takes config.rows=stream and an even "
                f"config.batch; got {self.rows} and {self.batch}"
            )
        if not 0 <= self.alpha <= 1:
            problems.append(f"config.alpha={self.alpha} must be in 0..1")
        if self.alpha != 1 and self.rows == "stream":
            problems.append("config.alpha must be 1 for config.rows=stream")
        if self.rows in RULES and self.arch.types == 1:
            problems.append(
                f"config.rows={self.rows} needs config.arch.types of at least 2"
            )
        longest = self.arch.max_length
        if longest is not None and self.length > longest:
            offset = self.arch.position_offset
            problems.append(
                f"config.length={self.length} is more than "
                f"config.arch.max_positions={self.arch.max_positions}"
                + (f" less config.arch.position_offset={offset}" if offset else "")
            )
        if problems:
            raise InputError("\n".join(problems))

    def as_dict(self) -> dict:
        """What is written into the workdir."""
        return dataclasses.asdict(self)


def from_preset(name: str) -> ConfigDict:
    """The part of a config that a preset decides: arch.*, objective.*, rows."""
    chosen = preset(name)
    return ConfigDict(
        {
            "preset": chosen.name,
            "rows": chosen.rows,
            "arch": dataclasses.asdict(chosen.arch),
            "objective": objective_fields(chosen.objective) | chosen.hyper,
            "accumulate": 1,
            "copies": 0,
            "nonfinite": "stop",
            "spike": "say",
            "stages": (),
            "tasks": (),
            "mesh": dataclasses.asdict(Axes()),
            "stall_after": 1800.0,
        }
    )


def objective_fields(name: str) -> dict:
    """An objective's name, and its hyper-parameters as they are if nobody says."""
    if name not in OBJECTIVES:
        raise InputError(unknown("config.objective.name", name, OBJECTIVES))
    return {"name": name} | {
        field.name: field.default
        for field in dataclasses.fields(OBJECTIVES[name])
        if field.name not in DECIDED
    }


def find_config(name: str) -> Path:
    """A config by path (configs/pretrain.py) or by name (pretrain)."""
    if Path(name).is_file():
        return Path(name)
    from bert_jax import configs

    folder = Path(next(iter(configs.__path__)))
    known = sorted(path.stem for path in folder.glob("[a-z]*.py"))
    if Path(name).stem in known and name in (Path(name).stem, f"configs/{name[8:]}"):
        return folder / f"{Path(name).stem}.py"
    raise InputError(unknown("config", name, known) + ", or the path of a file")


def load_config(argument: str) -> ConfigDict:
    """The config of `pretrain:PRESET` or `path/to/config.py:PRESET`."""
    name, _, rest = argument.partition(":")
    path = find_config(name)
    if path.suffix != ".py":
        raise InputError(f"{path} is not a Python file: a config ends in .py")
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise InputError(f"{path} has no function get_config(arg)")
    return module.get_config(rest) if rest else module.get_config()


def override(config: ConfigDict, changes: dict) -> None:
    """Sets fields such as {"optim.lr": "1e-3"}; all problems are told at once. Values
    are text, or what a config file would write."""
    name = config.get("objective", {}).get("name")
    other = changes.get("objective.name", name)
    if other != name:  # it has hyper-parameters of its own
        config.objective = ConfigDict(objective_fields(other))
    fields = dict(flatten(config))
    problems = []
    for name, value in changes.items():
        if name not in fields:
            problems.append(unknown("config field", name, fields))
            continue
        if name == "preset":
            problems.append(f"the preset is part of --config: --config NAME:{value}")
            continue
        kind = type(fields[name])
        try:
            value = (
                parse(value, kind) if isinstance(value, str) else as_kind(value, kind)
            )
        except (ValueError, OverflowError, SyntaxError):
            problems.append(f"config.{name}={value!r} is not of type {kind.__name__}")
            continue
        *parents, last = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    if problems:
        raise InputError("\n".join(problems))


def as_kind(value, kind: type):
    """A value of a config file; a whole number may stand for a float."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if type(value) is not kind:
        raise ValueError(value)
    return value


def parse(text: str, kind: type):
    if kind is int:
        number = float(text)  # 1e6 is a number of steps as people write it
        if number != int(number):
            raise ValueError(text)
        return int(text) if text.lstrip("+-").isdigit() else int(number)
    if kind is tuple:
        value = ast.literal_eval(text)
        if not isinstance(value, tuple):
            raise ValueError(text)
        return value
    return kind(text)


def flatten(config, prefix: str = ""):
    for name, value in config.items():
        if isinstance(value, ConfigDict | dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def resolve(config: ConfigDict) -> Run:
    """Checks every field of a config and freezes it."""
    fields = {field.name for field in dataclasses.fields(Run)}
    given = config.to_dict()
    problems = [unknown("config field", name, fields) for name in {*given} - fields]
    missing = sorted(fields - set(given))
    if missing:
        problems.append(f"the config lacks the fields {', '.join(missing)}")
    for name, kind in PARTS.items():
        valid = {field.name for field in dataclasses.fields(kind)}
        problems += [
            unknown("config field", f"{name}.{field}", [f"{name}.{v}" for v in valid])
            for field in {*given.get(name, {})} - valid
        ]
    if problems:
        raise InputError("\n".join(problems))
    given |= {name: kind(**given[name]) for name, kind in PARTS.items()}
    return Run(**given)


def moved(config):
    """A config, or a part of it, without where its data lie: they may move."""
    if isinstance(config, dict):
        return {k: moved(value) for k, value in config.items() if k != "data"}
    return [moved(item) for item in config] if isinstance(config, list) else config


def run_of(config: dict) -> Run:
    """The run that a workdir tells of."""
    parts = {n: kind(**config[n]) for n, kind in PARTS.items() if n in config}
    return Run(**config | parts)


def differences(old: dict, new: dict) -> list[str]:
    """Fields in which a workdir's config and this one would compute otherwise."""
    parts = {"arch": Arch, "optim": Optim}  # an older one has fewer fields
    old = {**old, **{n: dataclasses.asdict(parts[n](**old[n])) for n in parts}}
    name = old["objective"].get("name", preset(old["preset"]).objective)
    defaults = objective_fields(name) if name in OBJECTIVES else {}
    old["objective"] = defaults | old["objective"]
    for field in dataclasses.fields(Run):
        if field.default is not dataclasses.MISSING:
            old.setdefault(field.name, field.default)
    old, new = ({k: v for k, v in c.items() if k not in FREE} for c in (old, new))
    old, new = (moved(json.loads(json.dumps(config))) for config in (old, new))
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        f"{name}: {before.get(name)!r} in the workdir, {after.get(name)!r} now"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def unlike(before: dict, about: dict) -> list[str]:
    """What one run.json says of another computation than this one."""
    problems = differences(before["config"], about["config"])
    same = before["corpus"] == about["corpus"]
    if not same or before.get("others", []) != about.get("others", []):
        problems.append(
            f"data: {before['config']['data']} then and {about['config']['data']} "
            "now hold other text or another tokenizer"
        )
    return problems
