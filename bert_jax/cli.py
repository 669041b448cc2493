"""The `bert_jax` command: sub-commands parse and call, nothing else."""

import argparse
import contextlib
import json
import os
import shlex
import sys
import warnings
from pathlib import Path

from bert_jax.errors import InputError, InputWarning, fail
from bert_jax.tpu import with_deep_stacks

# name: (one line, example); add_NAME and run_NAME are below.
COMMANDS = {
    "tokenizer": (
        "train a vocabulary",
        "bert_jax tokenizer --kind wordpiece --vocab_size 8000 --out tok 'books/*.txt'"
        "\n  bert_jax tokenizer --kind bpe --style roberta --vocab_size 50265 \\\n"
        "      --out tok 'books/*.txt'"
        "\n  bert_jax tokenizer --kind unigram --style t5 --vocab_size 32100 \\\n"
        "      --out tok 'books/*.txt'"
        "\n  bert_jax tokenizer --kind chars --out tok chinese.txt",
    ),
    "prepare": (
        "tokenise text into a corpus on disk",
        "bert_jax prepare --tokenizer tok --out corpus 'books/*.txt.gz' pydocs",
    ),
    "similar": (
        "make a table of similar words, for MacBERT",
        "bert_jax similar --tokenizer tok --words spaces --out similar chinese.txt"
        "\n  bert_jax prepare --tokenizer tok --words similar --out corpus chinese.txt"
        "\n  bert_jax similar --tokenizer tok --out similar --vectors glove.txt",
    ),
    "train": (
        "pretrain; the same command again resumes",
        "bert_jax train --config pretrain:bert-tiny --workdir runs/tiny \\\n"
        "      --config.data=corpus --config.steps=1000 --config.batch=32",
    ),
    "eval": (
        "score a model on held-out text",
        "bert_jax eval runs/tiny --data held_out --json",
    ),
    "fill": (
        "fill the blanks of a text",
        'bert_jax fill runs/tiny "the [MASK] of a function" --top 5',
    ),
    "generate": (
        "go on with a text, or write another for it (GPT, Transformer-XL, UniLM)",
        'bert_jax generate runs/gpt2 "Once upon a time" --temperature 0.8 --top_p 0.95',
    ),
    "export": (
        "write a Hugging Face directory, checked against PyTorch",
        "bert_jax export runs/tiny exported --step 1000",
    ),
    "compile": (
        "tell whether a run fits a TPU pod, and how fast it may be, without a TPU",
        "bert_jax compile --config pretrain:bert-large-uncased --topology v5e:4x4 \\\n"
        "      --config.batch=512 --config.arch.stack=scan"
        "\n  bert_jax compile --config pretrain:gpt2 --topology v4:2x2x2 --find-batch",
    ),
    "presets": (
        "list the family, or show one member",
        "bert_jax presets bert-base-uncased --json",
    ),
    "compare": (
        "pretrain several objectives with equal FLOPs and compare what transfers",
        "BERT_JAX_DATA=DATA bert_jax compare --config compare --workdir runs/compare",
    ),
    "demo": (
        "the whole road in five minutes, on the built-in corpus",
        "bert_jax demo --workdir runs/demo",
    ),
}
MORE = {
    "train": """

Any field of the config is set by --config.FIELD=VALUE:
  data        corpus made by `bert_jax prepare`           (needed)
  steps, batch, length, seed
  rows        how text is laid out: full | doc | stream | sentences, in two parts
              pair | order | sentence-pair | electra | distance   (full: no next
              sentence); in config.tasks also labelled, a file of labelled pairs
  across      attend | block: attention across documents in a row
  direction   forward | both: half of the batch of a stream goes backwards
  alpha       inputs of the corpus are sampled by share ** alpha (languages: 0.7)
  init        model to go on from: workdir or Hugging Face directory
  dtype       auto | float32 | bfloat16
  accumulate  parts in which a batch is scored, one after the other: less memory
  copies      0: what is hidden is drawn anew at every step; k: k fixed ways a row
  nonfinite   stop | skip: what a gradient that is no number does
  spike       say | stop | skip: what a loss far above those before it does
  stall_after seconds without a batch, or on several hosts without a finished step,
              that end the run with the code 75; 0: never. More than it takes to
              compile a step and to read or write a checkpoint
  stages      lengths, rates and objectives one after the other, each for its steps:
              "({'steps': 900, 'length': 128}, {'steps': 100, 'length': 512}),"
  tasks       what stages may mix: bert_jax/course.py
  optim.*     name (bert_adamw, adamw, lamb, adafactor), variant (of lamb: paper,
              nvidia, google, albert, optax), lr, schedule (bert, linear, polynomial,
              cosine, rsqrt, constant), warmup (below 1 a share of the steps), power,
              decay, beta1, beta2, eps, clip, layer_decay, layer_form;
              decay_rules, rate_rules: "(('^embed/', 0.0), ('.*', 1.0))", 0 freezes
  objective.* name (the preset's, or another one), and its hyper-parameters, which
              stand in bert_jax/objectives/NAME.py and in `bert_jax presets PRESET`
  arch.*      layers, width, heads, inner, dropout, stack, remat, ...
  mesh.*      data (rows), fsdp (rows, and parameters split), tensor (heads, inner
              units, vocabulary): devices along each, -1: all that are left; slices
  eval.*      data (held-out corpus), every (0: at the end only), rows (spread over
              the corpus; 0: all)
  log_every, save_every, keep (checkpoints; they are written while training goes on)
Ctrl-C and SIGTERM save and exit, with the code 130 and 75; the same command goes on
from there.

On several hosts (a TPU pod) start the same command on each, with its own --host, and
with a --workdir in a folder that all share:
  bert_jax train ... --hosts a,b,c --host 0     on a; --host 1 on b, --host 2 on c
They first meet at --port of host 0. A host that does not come, that has other
versions, another config or other data ends the run on all of them, with a text that
names it. A signal to one stops all after the same step; if one dies the others end with
the code 75: start the same command again on all of them.""",
    "compile": """

Compiles the very step that `bert_jax train` would run with the same --config and
--config.FIELD=VALUE, by the TPU compiler, which needs no TPU (pip install
'bert_jax[tpu]'). Tells the bytes of a chip's memory that it takes, or by how much it
does not fit (then the exit code is 1), FLOPs, what chips tell each other, and by the
compiler's own estimates, which are not measurements, how long it takes and in which
modules. No array is made and no corpus is needed: without config.data the vocabulary
is the preset's. dtype auto is bfloat16, as on a TPU. A deep model compiles much
faster with --config.arch.stack=scan.""",
    "compare": """

One command makes a vocabulary and a corpus from raw text, pretrains each entry of the
config with the same FLOPs and several seeds, and asks by linear probes and short
finetuning on labelled tasks what transfers. It writes results.json, table.md,
curves.png and report.html after every run. Any field of the config is set by
--config.FIELD=VALUE:
  data         folder of the text and of the tasks   (default: $BERT_JAX_DATA)
  flops        budget of each run; points: how often it is probed; seeds
  tasks        "('sst2', 'cola', 'rte', 'wnut17')", or some of them
  probe.*      layers, examples, sentences
  finetune.*   steps, batch, lr, warmup, dropout
  shared.*     what all entries are told, as of `bert_jax train`: shared.length, ...
Entries are in the config file. Killed, the same command goes on.""",
}
NOTHING_TO_CACHE = ("tokenizer", "prepare", "similar", "presets", "compile")
TAKE_MORE = ("train", "prepare", "compare", "compile")  # arguments that they read
INPUT = (
    "text file or glob (.txt, .jsonl, also .gz and .xz; a blank line between "
    "documents, or one JSON object with `text` a line), tfds:NAME[/CONFIG][:SPLIT], "
    "or pydocs[:SPLIT]"
)
WORDS = (
    "where words begin: as the tokenizer's pieces say (default); for Chinese set apart "
    "by spaces, with tags (word/POS), or found by jieba"
)
CONFIG = "pretrain:PRESET, or a config file, configs/pretrain.py:PRESET"
MODEL = "training workdir or Hugging Face directory"


def format_warning(message, category, *where, default=warnings.formatwarning, **more):
    """Ours in a line, without the code that gave it."""
    if category is InputWarning:
        return f"warning: {message}\n"
    return default(message, category, *where, **more)


def main(argv: list[str] | None = None) -> None:
    """Runs one command; an `InputError` is printed without a traceback."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # it announces itself
    os.environ["LIBTPU_INIT_ARGS"] = with_deep_stacks()  # read when jax is imported
    arguments, rest = parser().parse_known_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else argv
    warnings.formatwarning = format_warning
    try:
        arguments.rest = rest
        if rest and arguments.command not in TAKE_MORE:
            raise InputError(f"unknown arguments {' '.join(rest)}; see --help")
        if arguments.command not in NOTHING_TO_CACHE:
            use_compilation_cache()
        arguments.run(arguments)
    except InputError as error:
        fail(error)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "tensorflow_datasets"):
            raise
        fail(f"this command needs {error.name}: pip install 'bert_jax[data]'")
    except KeyboardInterrupt:
        if arguments.command == "prepare":
            print("interrupted: the same command goes on from there", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `bert_jax presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        # Of TensorFlow's file systems: a bucket that is not there, not allowed, ...
        if not type(error).__module__.endswith("framework.errors_impl"):
            raise
        fail(error.message)


def use_compilation_cache() -> None:
    """What was compiled once is not compiled again, also by the next process.

    JAX's own variables go before: JAX_COMPILATION_CACHE_DIR is another folder,
    JAX_ENABLE_COMPILATION_CACHE=false compiles all anew.
    """
    import jax

    from bert_jax.bucket import is_bucket
    from bert_jax.whole import cache_folder

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    # Unless told, JAX keeps only what took a second: not what is compiled by the dozen.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or is_bucket(folder):
        return
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", None)
        text = (
            f"{folder} cannot be written: the next start compiles all of this again. "
            "JAX_COMPILATION_CACHE_DIR may name another folder"
        )
        warnings.warn(text, InputWarning, stacklevel=2)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="bert_jax",
        description="The BERT family in JAX: from raw text to PyTorch weights.",
        epilog="example:\n  bert_jax train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (line, example) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.{MORE.get(name, '')}",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=globals()[f"run_{name}"])
        globals()[f"add_{name}"](command)
    return top


def add_tokenizer(options: argparse.ArgumentParser) -> None:
    options.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT)
    options.add_argument(
        "--kind",
        choices=["wordpiece", "bpe", "unigram", "chars"],
        default="wordpiece",
        help="default: wordpiece",
    )
    options.add_argument(
        "--style",
        choices=["roberta", "gpt2", "albert", "xlnet", "t5"],
        help="special tokens and rules: roberta (default) or gpt2 for bpe, albert "
        "(default), xlnet or t5 for unigram",
    )
    options.add_argument(
        "--vocab_size", type=int, help="default: 30522; chars: all characters"
    )
    options.add_argument("--out", required=True, help="folder to write")
    options.add_argument(
        "--lowercase", choices=["yes", "no"], help="default: yes; xlnet, t5, bpe: no"
    )
    options.add_argument(
        "--strip_accents",
        choices=["yes", "no"],
        help="default: as --lowercase; xlnet: yes",
    )
    options.add_argument(
        "--alpha",
        type=float,
        default=1.0,
        help="inputs (languages) count by share ** alpha; default: 1, as they are",
    )


def run_tokenizer(arguments) -> None:
    from bert_jax.data import tokenizers
    from bert_jax.data.text import sampled
    from bert_jax.whole import new_folder

    kind, options = arguments.kind, {}
    for name in ("lowercase", "strip_accents"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name) == "yes"
    if arguments.style is not None:
        options["style"] = arguments.style
    refused = {"bpe": ["lowercase", "strip_accents"], "unigram": []}.get(
        kind, ["style"]
    )
    wrong = [f"--{name}" for name in refused if name in options]
    if wrong:
        raise InputError(f"--kind {kind} has no {' and no '.join(wrong)}")
    if kind != "chars" or arguments.vocab_size is not None:
        size = arguments.vocab_size
        options["vocab_size"] = 30522 if size is None else size
    options["progress"] = sys.stderr.isatty()  # elsewhere its bars are empty lines
    train = getattr(tokenizers, f"train_{kind}")
    with new_folder(arguments.out) as scratch:
        found = sampled(arguments.inputs, alpha=arguments.alpha)
        tokenizer = train((document.text for document in found), **options)
        tokenizer.save(scratch)
    print(f"{tokenizer.size} pieces written to {arguments.out} (hash {tokenizer.hash})")


def add_prepare(options: argparse.ArgumentParser) -> None:
    options.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT)
    options.add_argument(
        "--tokenizer", required=True, help="folder of the tokenizer, or its vocabulary"
    )
    options.add_argument("--out", required=True, help="folder to write")
    options.add_argument(
        "--sentences",
        choices=["split", "line"],
        default="split",
        help="split lines into sentences by rule (default), or one sentence a line",
    )
    options.add_argument(
        "--words",
        default="pieces",
        help=f"{WORDS}; or a folder made by `bert_jax similar`: as it was told, and "
        "which word of the table each one is",
    )
    options.add_argument(
        "--duplicates",
        choices=["keep", "exact", "near"],
        default="keep",
        help="documents to drop: none (default), with the same words, nearly the same",
    )
    options.add_argument(
        "--shortest",
        type=int,
        default=0,
        metavar="N",
        help="drop documents of fewer than N characters",
    )
    options.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes; default: one a core; 0: no other",
    )
    options.add_argument(
        "--runner",
        help="prepare on Apache Beam: DirectRunner, DataflowRunner, FlinkRunner, "
        "SparkRunner; what else the runner is to be told follows as --beam.NAME=VALUE",
    )


def run_prepare(arguments) -> None:
    from bert_jax.data.prepare import Settings, prepare
    from bert_jax.data.tokenizers import load_tokenizer

    wrong = [word for word in arguments.rest if not word.startswith("--beam.")]
    if wrong:
        raise InputError(f"unknown arguments {' '.join(wrong)}; see --help")
    if arguments.rest and not arguments.runner:
        raise InputError(f"{arguments.rest[0]} is for Beam: it needs --runner")
    if arguments.runner and arguments.workers is not None:
        raise InputError("--workers is for this machine: --runner has its own options")
    if len(arguments.inputs) > 8:
        print(
            f"{len(arguments.inputs)} inputs: each argument is an input of its own, "
            "which a row does not cross (config.alpha weighs them). For one input of "
            "many files give a glob in quotes",
            file=sys.stderr,
        )
    what = {name: getattr(arguments, name) for name in Settings._fields}
    tokenizer = load_tokenizer(arguments.tokenizer)
    where = {"tokenizer": tokenizer, "out": arguments.out}
    if arguments.runner:
        from bert_jax.data.beam import prepare_with_beam

        corpus = prepare_with_beam(
            arguments.inputs,
            settings=Settings(**what),
            runner=arguments.runner,
            options=[word.replace("--beam.", "--", 1) for word in arguments.rest],
            **where,
        )
    else:
        corpus = prepare(arguments.inputs, workers=arguments.workers, **what, **where)
    about = corpus.about
    read = about["read"]
    print(
        f"{arguments.out}: {about['documents']:,} documents of {read['documents']:,} "
        f"({read['too_short']:,} too short, {read['duplicates']:,} duplicates), "
        f"{about['sentences']:,} sentences, {about['pieces']:,} pieces "
        f"({about['unknown']:,} unknown), "
        f"{sum(about['files'].values()) / 1e6:,.1f} MB"
    )
    share = about["unknown"] / about["pieces"]
    if share > 0.02:
        print(
            f"warning: {share:.0%} of the pieces are unknown: is it the right "
            "tokenizer?",
            file=sys.stderr,
        )


def add_similar(options: argparse.ArgumentParser) -> None:
    options.add_argument("inputs", nargs="*", metavar="INPUT", help=INPUT)
    options.add_argument(
        "--tokenizer", required=True, help="folder of the tokenizer, or its vocabulary"
    )
    options.add_argument("--out", required=True, help="folder to write")
    options.add_argument(
        "--vectors",
        metavar="FILE",
        help="vectors of words, as word2vec and GloVe write them as text; default: "
        "learnt from the INPUT (skip-gram)",
    )
    options.add_argument(
        "--words",
        choices=["pieces", "spaces", "tags", "jieba"],
        default="pieces",
        help=WORDS,
    )
    options.add_argument(
        "--neighbours", type=int, default=10, metavar="N", help="default: 10"
    )
    options.add_argument("--seed", type=int, default=0, help="of the vectors learnt")


def run_similar(arguments) -> None:
    from bert_jax.data.find_similar import similar_from_text, similar_from_vectors
    from bert_jax.data.tokenizers import load_tokenizer
    from bert_jax.whole import new_folder

    if bool(arguments.vectors) == bool(arguments.inputs):
        raise InputError("give either INPUT, text to learn vectors from, or --vectors")
    told = {"words": arguments.words, "neighbours": arguments.neighbours}
    told["tokenizer"] = load_tokenizer(arguments.tokenizer)
    with new_folder(arguments.out) as scratch:
        if arguments.vectors:
            table = similar_from_vectors(arguments.vectors, **told)
        else:
            table = similar_from_text(arguments.inputs, seed=arguments.seed, **told)
        table.save(scratch)
    some = int((table.near[1:] > 0).any(1).sum())
    print(f"{arguments.out}: {len(table):,} words, {some:,} of them with similar ones")
    for number in range(1, len(table) + 1, len(table) // 5 + 1):
        names = (table.names[n - 1] for n in table.near[number] if n)
        print(f"  {table.names[number - 1]}: {', '.join(names)}")
    print(f"next: bert_jax prepare --words {arguments.out} --tokenizer ...")


def add_train(options: argparse.ArgumentParser) -> None:
    options.add_argument("--config", required=True, metavar="NAME:PRESET", help=CONFIG)
    options.add_argument("--workdir", required=True, help="folder of the run")
    told = os.environ.get
    options.add_argument(
        "--hosts",
        default=told("BERT_JAX_HOSTS"),
        metavar="NAME0,NAME1,...",
        help="of a run on several hosts, or $BERT_JAX_HOSTS",
    )
    options.add_argument(
        "--host",
        default=told("BERT_JAX_HOST"),
        metavar="INDEX",
        help="which of them this one is, from 0, or $BERT_JAX_HOST",
    )
    options.add_argument(
        "--port",
        default=told("BERT_JAX_PORT"),
        help="of host 0, and the one after it, or $BERT_JAX_PORT; default: 8476",
    )
    options.add_argument(
        "--meet_within",
        default=told("BERT_JAX_MEET_WITHIN"),
        metavar="SECONDS",
        help="for the others, or $BERT_JAX_MEET_WITHIN; default: 300",
    )


def run_train(arguments) -> None:
    from bert_jax.config import load_config, override, resolve
    from bert_jax.meeting import excused
    from bert_jax.train import train

    hosts = read_hosts(arguments)
    with excused(hosts):
        config = load_config(arguments.config)
        override(config, read_overrides(arguments.rest))
        run = resolve(config)
    result = train(run, arguments.workdir, hosts=hosts)
    if result["finished"] and (hosts is None or hosts.index == 0):
        print(f"the last loss is {result['train']['loss']:.4g}; all are in ", end="")
        print(f"{arguments.workdir}/metrics.jsonl, drawn in loss.png")
        print(f"next: bert_jax export {arguments.workdir} OUT")
    if result["code"]:
        sys.exit(result["code"])


def read_hosts(arguments):
    """None where this process is the only one."""
    from bert_jax.meeting import Hosts

    if not arguments.hosts:
        if arguments.host:
            raise InputError("--host needs --hosts: the names of all hosts")
        return None
    if arguments.host is None:
        raise InputError("--hosts needs --host: which of them this one is, from 0")
    values, problems = {}, []
    for field, name, kind in (
        ("index", "host", int),
        ("port", "port", int),
        ("meet_within", "meet_within", float),
    ):
        text = getattr(arguments, name)
        try:
            values |= {} if text is None else {field: kind(text)}
        except ValueError:
            problems.append(f"--{name} {text} is no number")
    if problems:
        raise InputError("\n".join(problems))
    names = tuple(name.strip() for name in arguments.hosts.split(","))
    hosts = Hosts(names, **values)
    return hosts if len(names) > 1 else None


def add_compile(options: argparse.ArgumentParser) -> None:
    options.add_argument("--config", required=True, metavar="NAME:PRESET", help=CONFIG)
    options.add_argument(
        "--topology",
        required=True,
        metavar="KIND:SHAPE",
        help="v5e:4x4, v6e:16x16, v4:2x2x2, v5p:4x4x4, ...: kind of chip, and chips "
        "along each dimension of its network",
    )
    options.add_argument(
        "--find-batch",
        action="store_true",
        help="find the largest config.batch that fits, by compiling several",
    )
    options.add_argument(
        "--first",
        action="store_true",
        help="where stages or tasks have steps of their own: only the first one",
    )
    options.add_argument("--json", action="store_true", help="print JSON")


def run_compile(arguments) -> None:
    from bert_jax.tpu import Topology, check_compiler, in_own_process

    topology = Topology.parse(arguments.topology)
    check_compiler()
    if in_own_process(topology, arguments.argv):
        compile_step(arguments, topology)


def compile_step(arguments, topology) -> None:
    from bert_jax.config import load_config, override, resolve
    from bert_jax.preflight import NO_DATA, find_batch, preflight
    from bert_jax.preflight_text import describe, describe_batch

    config = load_config(arguments.config)
    config.data = config.data or NO_DATA
    override(config, read_overrides(arguments.rest))
    run = resolve(config)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if arguments.find_batch:
        report, too_many = find_batch(run, topology, say=say)
        found = report.as_dict() | {"does_not_fit": too_many}
        print(json.dumps(found) if arguments.json else describe_batch(report, too_many))
        return
    reports = []
    for report in preflight(run, topology, first=arguments.first, say=say):
        reports.append(report)
        if not arguments.json:
            print(describe(report), flush=True)
    if arguments.json:
        print(json.dumps([report.as_dict() for report in reports]))
    if not all(report.fits for report in reports):
        sys.exit(1)


def read_overrides(words: list[str]) -> dict[str, str]:
    """{"steps": "10"} from --config.steps=10 or --config.steps 10."""
    changes, words = {}, list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--config."):
            raise InputError(
                f"unknown argument {word}; fields are set by --config.FIELD=VALUE"
            )
        name, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not words:
                raise InputError(f"{word} lacks its value: {word}=VALUE")
            value = words.pop(0)
        changes[name] = value
    return changes


def add_eval(options: argparse.ArgumentParser) -> None:
    options.add_argument("model", metavar="MODEL", help=MODEL)
    options.add_argument("--data", required=True, help="prepared corpus")
    options.add_argument(
        "--rows", help="layout of rows: full, doc, ...; default: the run's, or full"
    )
    options.add_argument("--length", type=int, help="default: that of the run, or 128")
    options.add_argument("--batch", type=int, default=32)
    options.add_argument(
        "--count", type=int, help="rows to score, spread over the corpus; default: all"
    )
    options.add_argument("--json", action="store_true", help="print JSON")


def run_eval(arguments) -> None:
    from bert_jax.evaluate import evaluate

    scores = evaluate(
        arguments.model,
        data=arguments.data,
        rows=arguments.rows,
        length=arguments.length,
        batch=arguments.batch,
        count=arguments.count,
    )
    if arguments.json:
        print(json.dumps(scores))
    else:
        for name, value in scores.items():
            print(f"{name:24} {value:.4f}")


def add_fill(options: argparse.ArgumentParser) -> None:
    options.add_argument("model", metavar="MODEL", help=MODEL)
    options.add_argument("text", help="a text with one or more [MASK]")
    options.add_argument("--top", type=int, default=5, help="guesses for each blank")
    options.add_argument("--json", action="store_true", help="print JSON")


def run_fill(arguments) -> None:
    from bert_jax.fill import fill
    from bert_jax.model_dir import load

    blanks = fill(load(arguments.model), arguments.text, top=arguments.top)
    if arguments.json:
        print(json.dumps(blanks, ensure_ascii=False))
        return
    for number, guesses in enumerate(blanks, 1):
        shown = "  ".join(f"{g['piece']} {g['probability']:.1%}" for g in guesses)
        print(f"blank {number}: {shown}")


def add_generate(options: argparse.ArgumentParser) -> None:
    options.add_argument("model", metavar="MODEL", help=MODEL)
    options.add_argument("texts", nargs="+", metavar="TEXT", help="one or more")
    options.add_argument(
        "--length", type=int, default=40, help="the most new pieces; default: 40"
    )
    options.add_argument(
        "--temperature",
        type=float,
        help="draw from the probabilities, sharper below 1; without it, --top_k and "
        "--top_p: greedy, always the most probable piece",
    )
    options.add_argument("--top_k", type=int, help="draw from the K most probable")
    options.add_argument(
        "--top_p", type=float, help="draw from the most probable that have P together"
    )
    options.add_argument("--count", type=int, default=1, help="how many for each text")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", action="store_true", help="print JSON")


def run_generate(arguments) -> None:
    from bert_jax.generate import generate, order_of
    from bert_jax.model_dir import load

    names = ("length", "count", "temperature", "top_k", "top_p", "seed")
    options = {name: getattr(arguments, name) for name in names}
    model = load(arguments.model)
    found = generate(model, arguments.texts, **options)
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    goes_on = order_of(model.preset) == "causal"
    for number, one in enumerate(found, 1):
        if len(found) > 1:
            print(f"--- {number}")
        print(f"{one['prompt']}{one['text']}" if goes_on else one["text"])


def add_export(options: argparse.ArgumentParser) -> None:
    options.add_argument("model", metavar="WORKDIR", help=MODEL)
    options.add_argument("out", metavar="OUT", help="folder to write")
    options.add_argument("--step", type=int, help="default: the newest checkpoint")


def run_export(arguments) -> None:
    from bert_jax.convert.hf import TOLERANCE, export_model
    from bert_jax.model_dir import load

    model = load(arguments.model, step=arguments.step)
    done = export_model(
        arguments.out,
        model.params,
        model.arch,
        model.tokenizer,
        layout=model.preset.layout,
        labels=model.labels,
    )
    at = "" if model.step is None else f" step {model.step} of"
    print(f"wrote{at} {arguments.model} to {arguments.out} as {done.reference}", end="")
    if done.difference is None:
        print(f", NOT verified by PyTorch: {done.unverified}")
    else:
        print(
            f"; PyTorch's logits differ by at most {done.difference:.1e} "
            f"(allowed {TOLERANCE:.0e})"
        )
    if done.extra:
        print(
            f"in extra.safetensors, since {done.reference} has no place for them, not "
            "verified by PyTorch: " + ", ".join(done.extra)
        )


def add_presets(options: argparse.ArgumentParser) -> None:
    options.add_argument("name", nargs="?", help="one member")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument(
        "--check",
        action="store_true",
        help="measure how far each member is from its class in transformers, on the "
        "same weights (takes PyTorch; a few minutes for all)",
    )


def run_presets(arguments) -> None:
    from bert_jax.presets import PRESETS, preset

    chosen = [preset(arguments.name)] if arguments.name else list(PRESETS.values())
    if arguments.check:
        check_presets(chosen, as_json=arguments.json)
        return
    rows = [describe(member) for member in chosen]
    if arguments.json:
        print(json.dumps(rows[0] if arguments.name else rows, indent=2))
    elif arguments.name:
        for name, value in rows[0].items():
            print(f"{name:12} {value}")
    else:
        for row in rows:
            arch = row["arch"]
            print(
                f"{row['name']:34} {row['parameters']:>13,}  L{arch['layers']} "
                f"D{arch['width']} H{arch['heads']}  {row['paper']}"
            )


def describe(member) -> dict:
    import dataclasses

    from bert_jax.convert.engine import reference_heads
    from bert_jax.models.model import count_params

    heads = reference_heads(member.layout, member.reference)
    count = count_params(member.arch, heads=heads)
    return {**dataclasses.asdict(member), "parameters": count}


def check_presets(members: list, *, as_json: bool) -> None:
    """A table in Markdown, a row as soon as it is measured."""
    import dataclasses

    try:
        import transformers
    except ImportError:
        raise InputError(
            "--check takes PyTorch and transformers: pip install 'bert_jax[torch]'"
        ) from None
    from bert_jax.parity import check_members

    transformers.utils.logging.set_verbosity_error()
    rows = []
    if not as_json:
        print("| member | parameters | hidden | logits | gradients | round trip |")
        print("|---|---|---|---|---|---|")
    for row in check_members(members):
        rows.append(row)
        if as_json:
            continue
        name = f"{row.member} (and {row.also} more)" if row.also else row.member
        found = "compared with stored numbers, in the tests | | |"
        if row.share is not None:
            differences = (row.hidden, row.logits, row.gradients)
            found = " | ".join(f"{value:.1e}" for value in differences)
            found += f" | {row.round_trip}"
        print(f"| {name} | {row.parameters:,} | {found} |", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    wrong = [
        row.member
        for row in rows
        if row.share is not None and not (row.share <= 1 and row.round_trip == "exact")
    ]
    if wrong:
        raise InputError(f"not what transformers computes: {', '.join(wrong)}")


def add_compare(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--config",
        required=True,
        metavar="NAME",
        help="compare, or a config file like configs/compare.py",
    )
    options.add_argument("--workdir", required=True, help="folder of all runs")
    options.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="runs side by side, each with its share of the cores",
    )


def run_compare(arguments) -> None:
    from bert_jax.compare import compare
    from bert_jax.comparison import resolve_comparison
    from bert_jax.config import load_config, override

    config = load_config(arguments.config)
    override(config, read_overrides(arguments.rest))
    words = ["--config", arguments.config, "--workdir", arguments.workdir]
    if arguments.workers != 1:
        words += ["--workers", str(arguments.workers)]
    command = shlex.join(["bert_jax", "compare", *words, *arguments.rest])
    comparison = resolve_comparison(config)
    how = dict(command=command, workers=arguments.workers)
    if compare(comparison, arguments.workdir, **how) is not None:
        print(
            f"all numbers are in {arguments.workdir}/results.json, the findings in "
            f"{arguments.workdir}/report.html"
        )


def add_demo(options: argparse.ArgumentParser) -> None:
    options.add_argument("--workdir", default="runs/demo", help="folder of the run")


def run_demo(arguments) -> None:
    from bert_jax.demo import demo

    demo(Path(arguments.workdir))
