"""Documents from what a person names on the command line.

An INPUT is a text file or a glob (.txt: a blank line between documents; .jsonl: an
object with `text` a line; both also as .gz or .xz), `tfds:NAME[/CONFIG][:SPLIT]`, or
the built-in `pydocs[:SPLIT]`. All inputs are checked before the first is opened, and
then read as a stream, so that memory depends on the longest document only.
"""

import glob
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bert_jax.errors import InputError, unknown

EXTENSIONS = tuple(f"{e}{z}" for e in (".txt", ".jsonl") for z in ("", ".gz", ".xz"))
# A .txt file without a single blank line must not end up in memory as a whole: from
# this many characters on, a document is handed out in parts.
LONGEST = 1 << 24


class Document(NamedTuple):
    """A text with line breaks where sentences may not cross, and where it is from."""

    name: str
    text: str


Reader = Callable[[], Iterator[Document]]


def documents(inputs: Sequence[str]) -> Iterator[Document]:
    """All documents of all inputs, in the order given (a glob in sorted order).

    Raises `InputError` at once for every input that is not there or not understood, and
    while reading for the first broken line, naming the file and the line.
    """
    readers = _resolve(inputs, _reader)
    return (document for read in readers for document in read())


def byte_size(inputs: Sequence[str]) -> int | None:
    """Bytes of the inputs on disk, for a progress bar; None if not all are files."""
    if any(_is_dataset(name) for name in inputs):
        return None
    return sum(path.stat().st_size for path in _resolve(inputs, _files))


def _is_dataset(name: str) -> bool:
    return name.split(":")[0] in ("tfds", "pydocs")


def _resolve(inputs: Sequence[str], find: Callable[[str], list]) -> list:
    """`find` of every input, in one list; all that fail are reported together."""
    if isinstance(inputs, str):
        raise TypeError(f"inputs is a sequence of strings, got {inputs!r}")
    found, problems = [], []
    for name in inputs:
        try:
            found += find(name)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    if not found:
        raise InputError("no input: give a .txt or .jsonl file, a glob, or pydocs")
    return found


def _reader(name: str) -> list[Reader]:
    if not _is_dataset(name):
        return [lambda path=path: _read(path) for path in _files(name)]
    kind, _, rest = name.partition(":")
    return [_tfds(rest) if kind == "tfds" else _pydocs(rest or "train")]


# --- files ---------------------------------------------------------------------------


def _files(name: str) -> list[Path]:
    """The files of one path or glob, checked for existence and extension."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise InputError(f"{name} is a folder; give its files, e.g. {path}/**/*.txt")
    if path.is_file():
        found = [path]  # also one with a bracket in its name
    elif glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))
        found = [Path(match) for match in matches if os.path.isfile(match)]
        if not found:
            raise InputError(f"no file matches {name}, looked from {Path.cwd()}")
    else:
        raise InputError(f"{name}: no such file, looked from {Path.cwd()}")
    wrong = [str(path) for path in found if not path.name.endswith(EXTENSIONS)]
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise InputError(f"cannot read {shown}. Valid: {', '.join(EXTENSIONS)}")
    return found


def _read(path: Path) -> Iterator[Document]:
    """The documents of one file; at least one."""
    plain = path.name.removesuffix(".gz").removesuffix(".xz")
    parse = _parse_jsonl if plain.endswith(".jsonl") else _parse_txt
    empty = True
    for document in parse(path):
        empty = False
        yield document
    if empty:
        raise InputError(f"{path} holds no document: it is empty, or only blank lines")


def _parse_txt(path: Path) -> Iterator[Document]:
    """Blocks of lines between blank lines, named by the place of their first line."""
    block: list[str] = []
    first = size = 0
    for number, line in _lines(path):
        if block and (not line or size >= LONGEST):
            yield Document(f"{path}:{first}", "\n".join(block))
            block, size = [], 0
        if line:
            first = first if block else number
            block.append(line)
            size += len(line)
    if block:
        yield Document(f"{path}:{first}", "\n".join(block))


def _parse_jsonl(path: Path) -> Iterator[Document]:
    """One object a line; those with an empty text hold nothing and are left out."""
    for number, line in _lines(path):
        if not line:
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}. {line[:60]!r}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            got = (
                f"the fields {', '.join(sorted(record)) or '(none)'}"
                if isinstance(record, dict)
                else f"a {type(record).__name__}"
            )
            raise InputError(
                f'{where}: expected an object with a string field "text", got {got}'
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: half a surrogate pair at character {error.start} of the "
                "text, which is no Unicode text; remove it"
            ) from error
        names = (record.get(field) for field in ("name", "id", "title"))
        name = next((str(n) for n in names if n not in (None, "")), where)
        if text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _open(path: Path) -> BinaryIO:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    return opener(path, "rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) from 1 on, without line ends, trailing blanks, leading BOM."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                # utf-8-sig removes the byte-order mark of Windows editors.
                yield (
                    number,
                    line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip(),
                )
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}:{number}: not UTF-8 at byte {error.start} of the line "
            f"(0x{error.object[error.start]:02x}). Convert it with "
            f"iconv -f ENCODING -t UTF-8 {path} > new.txt, where ENCODING is what it "
            "was written in (often GB18030, LATIN1 or UTF-16)"
        ) from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: broken or cut off after line {number} ({error}). Copy it again; "
            "`gzip -t` or `xz -t` tests a file"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


# --- datasets ------------------------------------------------------------------------


def _pydocs(split: str) -> Reader:
    from bert_jax.data import pydocs  # imports TFDS, which takes seconds

    if split not in pydocs.SPLITS:
        raise InputError(unknown("split of pydocs", split, pydocs.SPLITS))
    return lambda: pydocs.load(split)


def _tfds(name: str) -> Reader:
    """A prepared TFDS dataset with a `text` feature; nothing is downloaded here."""
    import tensorflow_datasets as tfds

    dataset, _, split = name.partition(":")
    split = split or "train"
    try:
        builder = tfds.builder(dataset, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"tfds:{name}: TFDS has no dataset {dataset!r} ({reason}). Names are "
            "listed by tfds.list_builders(); for a dataset of yours set TFDS_DATA_DIR"
        ) from error
    if not builder.is_prepared():
        raise InputError(
            f"tfds:{name} is not prepared in {builder.data_dir}. Get it once with "
            f"`tfds build {dataset}` (it may be large), or set TFDS_DATA_DIR to the "
            "folder which has it"
        )
    features = builder.info.features
    if "text" not in features or not isinstance(features["text"], tfds.features.Text):
        raise InputError(
            f"tfds:{name} has no feature `text` of text; its features are "
            f"{', '.join(f'{k} ({type(f).__name__})' for k, f in features.items())}"
        )
    try:
        examples = builder.as_dataset(split=split)
    except ValueError as error:
        raise InputError(
            f"tfds:{name}: {unknown('split', split, builder.info.splits)}"
        ) from error
    label = next((n for n in ("name", "id", "title") if n in features), None)

    def read() -> Iterator[Document]:
        for number, example in enumerate(tfds.as_numpy(examples)):
            named = example[label] if label else f"{dataset}:{split}#{number}"
            named = named.decode() if isinstance(named, bytes) else str(named)
            yield Document(named, example["text"].decode())

    return read
