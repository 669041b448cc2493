"""`pydocs`: real English which every installation already carries.

The text is `pydoc_data.topics` and the docstrings of the standard library, numpy, jax,
flax, optax and tensorflow, read from the source files with `ast`, so nothing is
imported, downloaded or kept in this repository. A document is a module, and modules
with common text are on one side of the split. TFDS writes the corpus once per set of
installed sources and reads it from then on.

Why modules: of the 13-word shingles of valid, 25 % occur in train too if a document is
a function, 10 % if it is a module and a Jaccard index over 0.5 keeps two together, and
2 % with the stricter rule used here (measured with numpy 2.4, jax 0.10, TF 2.21).
"""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import io
import itertools
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from bert_jax.data.duplicates import shingles, words_of
from bert_jax.data.text import Document
from bert_jax.errors import InputError, unknown
from bert_jax.whole import cache_folder

PACKAGES = ("numpy", "jax", "flax", "optax", "tensorflow")
SPLITS = ("train", "valid")
VALID_SHARE = 0.05
SHORTEST = 200  # characters; below are namespace modules with one line
# Documents which share this part of the smaller one's shingles stay on one side. It
# implies the usual rule: a Jaccard index over 0.5 means that more than half is shared.
SHARED = 0.1

Roots = Sequence[tuple[str, Path]]

_TOPICS = "pydoc_data.topics"
_SKIPPED_FOLDER = re.compile(r"site-packages|dist-packages|__pycache__|(.*_)?tests?")
_SKIPPED_FILE = re.compile(r"test_.*|.*_test|conftest")

_RULE = re.compile(r"[\s=\-~^*#_+.`'\"|:<>]+")
# List items, notes, `name: text`, `name (type): text` and `:param name: text`.
_BULLET = re.compile(
    r"[-*+•]\s|\(?(\d{1,2}|[a-z])[.)]\s|\[\w+\]\s|[`*]*[\w.]+`*( \(.*?\))?: "
    r"|:[a-z]+( [\w*]+)*: "
)
# Doctests, directives, comments, grammar, and columns (three blanks inside the line).
_VERBATIM = re.compile(r">>>|\.\.|[|$#@]|.*::=|.*\S {3}\s*\S")
_WRAPPED = 40  # characters; a shorter line was broken on purpose


def installed() -> Roots:
    """(prefix, folder) of the standard library and of every package that is there."""
    found = [("", Path(sysconfig.get_path("stdlib")))]
    for name in PACKAGES:
        # For a name without a dot, find_spec looks the folder up and runs nothing.
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found.append((f"{name}.", Path(spec.submodule_search_locations[0])))
    return found


def sources(roots: Roots) -> Iterator[tuple[str, Path]]:
    """(module name, file) of every source file but the tests, in a fixed order."""
    for prefix, root in roots:
        for folder, folders, files in os.walk(root):
            # Changing the list in place is how os.walk is told where not to go.
            folders[:] = sorted(f for f in folders if not _SKIPPED_FOLDER.fullmatch(f))
            for file in sorted(files):
                path = Path(folder, file)
                if path.suffix != ".py" or _SKIPPED_FILE.fullmatch(path.stem):
                    continue
                if path.is_file():  # not a link to nowhere
                    parts = path.relative_to(root).with_suffix("").parts
                    name = prefix + ".".join(p for p in parts if p != "__init__")
                    yield name.rstrip(".") or "__init__", path


def fingerprint(roots: Roots) -> str:
    """A name for exactly these sources: another version of a package gives another."""
    listed = "\n".join(f"{n} {p.stat().st_size}" for n, p in sources(roots))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def collect(roots: Roots) -> list[Document]:
    """The documents of all sources, without short ones and exact repetitions."""
    found: dict[str, Document] = {}
    for module, path in sources(roots):
        for name, pieces in _pieces(module, path):
            text = "\n".join(filter(None, map(unwrap, pieces)))
            if len(text) >= SHORTEST:
                found.setdefault(text, Document(name, text))
    return list(found.values())


def _pieces(module: str, path: Path) -> Iterator[tuple[str, Iterable[str]]]:
    """(document name, its docstrings) of one file; none if Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are their authors' affair
            tree = ast.parse(path.read_bytes())
        if module == _TOPICS:
            for node in ast.walk(tree):
                if isinstance(node, ast.Dict):
                    for topic, text in ast.literal_eval(node).items():
                        yield f"{module}.{topic}", [text]
        else:
            yield module, list(_docstrings(tree))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions, in source order."""
    if isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
        yield ast.get_docstring(node, clean=False) or ""
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            if hasattr(child, "body"):  # simple statements hold no definition
                yield from _docstrings(child)


def unwrap(docstring: str) -> str:
    """The docstring with one paragraph a line, without underlines and empty lines.

    A line goes on with the next one if it is long and the next has the same indentation
    (or hangs under a list item); code, doctests and tables keep their lines.
    """
    # A docstring may hold half a surrogate pair, which no file can.
    docstring = docstring.encode("utf-8", "replace").decode()
    lines: list[str] = []
    fenced = False
    literal = None  # code deeper than this indentation
    last, depth, blank = "", 0, True  # the line before, its indentation, a gap since
    for line in inspect.cleandoc(docstring).split("\n"):
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if bare.startswith("```"):
            fenced, blank = not fenced, True
            continue
        if not bare or _RULE.fullmatch(bare):
            blank = True
            continue
        if literal is not None and indent <= literal:
            literal = None
        if literal is None and blank and indent > depth and _opens_code(last):
            literal = depth
        verbatim = fenced or literal is not None or _VERBATIM.match(bare)
        hangs = indent > depth and _BULLET.match(last)
        if (
            not (blank or verbatim or _BULLET.match(bare) or _VERBATIM.match(last))
            and (indent == depth or hangs)
            and len(last) >= _WRAPPED
        ):
            lines[-1] += f" {bare}"
        else:
            lines.append(bare)
        last, depth, blank = bare, indent, False
    return "\n".join(lines)


def _opens_code(line: str) -> bool:
    return line.endswith(":") or line.startswith("..")


def sides(documents: Sequence[Document]) -> list[str]:
    """`train` or `valid` for each document; those with common text get the same one.

    The side is drawn by a hash of the smallest name in the cluster, so that it changes
    as little as possible from one version of a package to the next.
    """
    clusters = _clusters([shingles(words_of(document.text)) for document in documents])
    smallest: dict[int, str] = {}
    for document, cluster in zip(documents, clusters, strict=True):
        smallest[cluster] = min(document.name, smallest.get(cluster, document.name))
    return [SPLITS[_draw(smallest[cluster]) < VALID_SHARE] for cluster in clusters]


def _draw(name: str) -> float:
    """A number in [0, 1) which depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _clusters(shingles: Sequence[np.ndarray]) -> list[int]:
    """The first member of each document's cluster, by an exact inverted index."""
    sizes = [len(s) for s in shingles]
    hashes = np.concatenate([np.empty(0, np.uint64), *shingles])
    order = np.argsort(hashes, kind="stable")
    owners = np.repeat(np.arange(len(sizes)), sizes)[order].tolist()
    edges = np.flatnonzero(np.diff(hashes[order])) + 1
    edges = np.concatenate([[0], edges, [len(owners)]])
    repeated = np.diff(edges) > 1
    # Boilerplate is many shingles with the same owners: count each such list once.
    lists = Counter(
        tuple(owners[start:stop])
        for start, stop in zip(edges[:-1][repeated], edges[1:][repeated], strict=True)
    )
    common: Counter[tuple[int, int]] = Counter()
    for run, count in lists.items():
        for pair in itertools.combinations(run, 2):
            common[pair] += count

    first = list(range(len(sizes)))

    def find(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = first[i]
        return i

    for (a, b), count in common.items():
        if count > SHARED * min(sizes[a], sizes[b]):
            a, b = sorted((find(a), find(b)))
            first[b] = a
    return [find(i) for i in range(len(sizes))]


class Pydocs(tfds.core.GeneratorBasedBuilder):
    """The corpus as a TFDS dataset, made from local files only."""

    VERSION = tfds.core.Version("1.0.0")  # raise it when the extraction changes

    def __init__(self, *, roots: Roots, **kwargs):
        self.roots = roots
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"name": tfds.features.Text(), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Documentation of Python and of installed packages.",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,  # modules stay beside their neighbours
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        parts: dict[str, list[Document]] = {split: [] for split in SPLITS}
        documents = collect(self.roots)
        for document, side in zip(documents, sides(documents), strict=True):
            parts[side].append(document)
        return {split: self._generate_examples(part) for split, part in parts.items()}

    def _generate_examples(self, documents: Iterable[Document]) -> Iterator:
        for number, document in enumerate(documents):
            yield number, {"name": document.name, "text": document.text}


def load(
    split: str = "train",
    *,
    cache: str | os.PathLike | None = None,
    roots: Roots | None = None,
) -> Iterator[Document]:
    """Documents of `train` or `valid`; the first call builds the corpus.

    It is kept in `cache` (the environment's BERT_JAX_CACHE, else ~/.cache/bert_jax).
    TFDS writes beside the final folder and renames it at the end, so a build which was
    killed is never read.
    """
    if split not in SPLITS:
        raise InputError(unknown("split of pydocs", split, SPLITS))
    roots = installed() if roots is None else roots
    folder = Path(cache or cache_folder()) / "pydocs" / fingerprint(roots)
    builder = Pydocs(roots=roots, data_dir=str(folder))
    if not builder.data_path.exists():
        _build(builder)
    return (
        Document(example["name"].decode(), example["text"].decode())
        for example in tfds.as_numpy(builder.as_dataset(split=split))
    )


def _build(builder: Pydocs) -> None:
    tfds.disable_progress_bar()
    try:
        # TFDS announces a download on stdout, which belongs to the caller's results.
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    except OSError as error:
        # Another process may have renamed its own copy first; that one is as good.
        if not builder.data_path.exists():
            raise InputError(
                f"cannot build the pydocs corpus in {builder.data_dir}: {error}. "
                "Set BERT_JAX_CACHE to a folder that can be written"
            ) from error
