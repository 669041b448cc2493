"""Documents from what a person names on the command line.

An INPUT is a text file or a glob (.txt: a blank line between documents; .jsonl: an
object with `text` a line; both also as .gz or .xz, here or in a bucket, gs://...),
`tfds:NAME[/CONFIG][:SPLIT]`, or the built-in `pydocs[:SPLIT]`. All inputs are checked
before the first is opened, and then read as a stream, so that memory depends on the
longest document only.
"""

import contextlib
import dataclasses
import glob
import gzip
import json
import lzma
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from etils import epath

from bert_jax.bucket import is_bucket, open_bucket
from bert_jax.errors import InputError, unknown

EXTENSIONS = tuple(f"{e}{z}" for e in (".txt", ".jsonl") for z in ("", ".gz", ".xz"))
# A .txt file without a single blank line must not end up in memory as a whole: from
# this many characters on, a document is handed out in parts.
LONGEST = 1 << 24
LONGEST_LINE = 1 << 28  # bytes; one JSON object, or one paragraph


class Document(NamedTuple):
    """A text with line breaks where sentences may not cross, and where it is from."""

    name: str
    text: str


@dataclasses.dataclass
class Source:
    """One file, or one split of a dataset."""

    name: str
    size: int | None  # bytes on disk; None if it is no file
    changed: float | str  # when the file was written; of a dataset its version
    start: "Callable[[Source], Iterator[Document]]"
    number: int = 0  # of the input it belongs to
    consumed: int = 0  # bytes read so far

    def read(self) -> Iterator[Document]:
        return self.start(self)


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources of all inputs, in the order given (a glob in sorted order).

    Raises `InputError` for all inputs that are not there or not understood.
    """
    if isinstance(inputs, str):
        raise TypeError(f"inputs is a sequence of strings, got {inputs!r}")
    found, problems = [], []
    for number, name in enumerate(inputs):
        try:
            sources = _sources(name)
        except InputError as error:
            problems.append(str(error))
        else:
            found += [dataclasses.replace(s, number=number) for s in sources]
    if problems:
        raise InputError("\n".join(problems))
    if not found:
        raise InputError("no input: give a .txt or .jsonl file, a glob, or pydocs")
    return found


def documents(inputs: Sequence[str]) -> Iterator[Document]:
    """All documents of all inputs, as a stream.

    Raises while reading for the first broken line, naming the file and the line.
    """
    sources = find_sources(inputs)
    return (document for source in sources for document in source.read())


def sampled(inputs: Sequence[str], *, alpha: float) -> Iterator[Document]:
    """Documents of which an input with a share p of the bytes has about p ** alpha.

    The input that is too small by most is taken whole, of the others a share, chosen
    by a hash of the documents' places and names. For a vocabulary of many languages.
    """
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha={alpha} must be in 0..1")
    sources = find_sources(inputs)
    unknown_size = [source.name for source in sources if source.size is None]
    if unknown_size and alpha != 1:
        raise InputError(f"alpha takes files; {', '.join(unknown_size)} has no size")
    sizes = [0] * len(inputs)
    for source in sources:
        sizes[source.number] += source.size or 0
    wanted = [max(size, 1) ** (alpha - 1) for size in sizes]  # (p ** alpha) / p
    for source in sources:
        share = wanted[source.number] / max(wanted)
        for place, document in enumerate(source.read()):
            # By its place too: titles need not differ.
            if zlib.crc32(f"{place} {document.name}".encode()) / 2**32 < share:
                yield document


def numbered_lines(path: str | os.PathLike) -> Iterator[tuple[int, str]]:
    """(number, line) of any text file, from 1 on, also packed as .gz or .xz."""
    path = epath.Path(path).expanduser()
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {what}, looked from {os.getcwd()}")
    return _lines(path, Source(str(path), None, 0.0, _read))


def _sources(name: str) -> list[Source]:
    kind, _, rest = name.partition(":")
    if kind in ("tfds", "pydocs"):
        version, read = _tfds(rest) if kind == "tfds" else _pydocs(rest or "train")
        return [Source(name, None, version, lambda source: _from_a_thread(read))]
    return [
        Source(str(path), stat.length, stat.mtime, _read)
        for path in _files(name)
        for stat in [path.stat()]
    ]


# --- files ---------------------------------------------------------------------------


def _files(name: str) -> list[epath.Path]:
    """The files of one path or glob, checked for existence and extension."""
    path = epath.Path(name).expanduser()
    if path.is_dir():
        raise InputError(f"{name} is a folder; give its files, e.g. {path}/**/*.txt")
    if path.exists():
        found = [path]  # also one with a bracket in its name
    elif glob.has_magic(name):
        found = sorted(match for match in _glob(path) if not match.is_dir())
        if not found:
            raise InputError(f"no file matches {name}, looked from {os.getcwd()}")
    else:
        raise InputError(f"{name}: no such file, looked from {os.getcwd()}")
    wrong = [str(path) for path in found if not path.name.endswith(EXTENSIONS)]
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise InputError(f"cannot read {shown}. Valid: {', '.join(EXTENSIONS)}")
    return found


def _glob(path: epath.Path) -> list[epath.Path]:
    if not is_bucket(path):
        return [epath.Path(p) for p in glob.glob(str(path), recursive=True)]
    plain = next(p for p in path.parents if not glob.has_magic(str(p)))
    try:
        return list(plain.glob(str(path.relative_to(plain))))
    except NotImplementedError:
        raise InputError(f"{path}: ** is not for buckets; use *") from None


def _read(source: Source) -> Iterator[Document]:
    """The documents of one file; at least one."""
    path = epath.Path(source.name)
    plain = path.name.removesuffix(".gz").removesuffix(".xz")
    parse = _parse_jsonl if plain.endswith(".jsonl") else _parse_txt
    empty = True
    for document in parse(path, _lines(path, source)):
        empty = False
        yield document
    if empty:
        raise InputError(f"{path} holds no document: it is empty, or only blank lines")


def _parse_txt(path: epath.Path, lines: Iterator) -> Iterator[Document]:
    """Blocks of lines between blank lines, named by the place of their first line."""
    block: list[str] = []
    first = size = 0
    for number, line in lines:
        if block and (not line or size >= LONGEST):
            yield Document(f"{path}:{first}", "\n".join(block))
            block, size = [], 0
        if line:
            first = first if block else number
            block.append(line)
            size += len(line)
    if block:
        yield Document(f"{path}:{first}", "\n".join(block))


def _parse_jsonl(path: epath.Path, lines: Iterator) -> Iterator[Document]:
    """One object a line; those with an empty text hold nothing and are left out."""
    for number, line in lines:
        if not line:
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
            raise InputError(f"{where}: not JSON: {error}. {line[:60]!r}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            got = f"a {type(record).__name__}"
            if isinstance(record, dict):
                got = f"the fields {', '.join(sorted(record)) or '(none)'}"
                if "text" in record:
                    got = f'a "text" of type {type(text).__name__}'
            raise InputError(
                f'{where}: expected an object with a string field "text", got {got}'
            )
        names = (record.get(field) for field in ("name", "id", "title"))
        name = next((str(n) for n in names if n not in (None, "")), where)
        try:
            text.encode()
            name.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: half a surrogate pair at character {error.start} of "
                f"{error.object[:40]!r}, which is no Unicode text; remove it"
            ) from error
        if text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def read_lines(path: str | os.PathLike) -> Iterator[tuple[int, str]]:
    """(number, line) of a text file that is no document, also packed or in a bucket."""
    return _lines(epath.Path(path), Source(str(path), None, "", _read))


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(name[-3:])
    return opener(file, "rb") if opener else file


def _lines(path: epath.Path, source: Source) -> Iterator[tuple[int, str]]:
    """(number, line) from 1 on, without line ends, trailing blanks, leading BOM."""
    number = 0
    source.consumed = 0
    try:
        opened = open_bucket(path) if is_bucket(path) else path.open("rb")
        with opened as raw, _unpacked(raw, path.name) as file:
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    raise InputError(
                        f"{path}:{number}: the line is longer than "
                        f"{LONGEST_LINE >> 20} MB; break it into lines or documents"
                    )
                if number % 1024 == 0:
                    source.consumed = raw.tell()
                # utf-8-sig removes the byte-order mark of Windows editors.
                coding = "utf-8-sig" if number == 1 else "utf-8"
                yield number, line.decode(coding).rstrip()
        source.consumed = source.size or 0
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


def _from_a_thread(read: Callable[[], Iterator[Document]]) -> Iterator[Document]:
    """The documents of `read`, which runs in a thread of its own.

    TensorFlow crashes where its iterators are asked by a thread that Python did not
    start, as the trainers of the library `tokenizers` do.
    """
    found: queue.Queue = queue.Queue(maxsize=64)
    given_up = threading.Event()

    def put(item) -> None:
        while not given_up.is_set():
            with contextlib.suppress(queue.Full):
                found.put(item, timeout=0.5)
                return

    def work() -> None:
        try:
            for document in read():
                put(document)
                if given_up.is_set():
                    return
            put(None)
        except Exception as error:  # of whatever kind: it belongs to the caller
            put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while (item := found.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        given_up.set()


def _pydocs(split: str) -> tuple[str, Callable[[], Iterator[Document]]]:
    from bert_jax.data import pydocs  # imports TFDS, which takes seconds

    if split not in pydocs.SPLITS:
        raise InputError(unknown("split of pydocs", split, pydocs.SPLITS))
    return pydocs.fingerprint(pydocs.installed()), lambda: pydocs.load(split)


def _tfds(name: str) -> tuple[str, Callable[[], Iterator[Document]]]:
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

    return str(builder.data_dir), read
