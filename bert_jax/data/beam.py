"""`prepare` on Apache Beam, for text that one machine would take too long for.

    bert_jax prepare --tokenizer DIR --out DIR --runner DirectRunner INPUT...

The same functions as in prepare.py, as a pipeline: groups of files are read and
tokenised wherever the runner likes, the sizes of all records decide which shard each
belongs to, and every shard is written by one worker. The corpus is that of a local
run, byte for byte.

    groups -> records --sizes--> shards -> parts of the index -> corpus

Documents that occur twice are found in a pass of their own, which keeps the first of
them, as the local run does.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from etils import epath

from bert_jax.bucket import is_bucket, upload
from bert_jax.data import prepare as local
from bert_jax.data import records
from bert_jax.data.corpus import Corpus, open_corpus, shard_name
from bert_jax.data.duplicates import digest, words_of
from bert_jax.data.records import Index, framed_size, open_shard, serialise
from bert_jax.data.similar import Similar
from bert_jax.data.text import find_sources
from bert_jax.data.tokenizers import Tokenizer, load_tokenizer
from bert_jax.errors import InputError
from bert_jax.whole import whole_folder

Key = tuple[int, int]  # number of the group, number in the group


class Told(NamedTuple):
    """What every worker is told."""

    tokenizer: tuple[tuple[str, bytes], ...]  # its files
    settings: local.Settings
    similar: Similar | None
    folder: str


def prepare_with_beam(
    inputs: Sequence[str],
    *,
    tokenizer: Tokenizer,
    out: str | os.PathLike,
    settings: local.Settings,
    runner: str = "DirectRunner",
    options: Sequence[str] = (),
) -> Corpus:
    """Writes the corpus, whole or not at all; `options` are flags of the runner."""
    try:
        import apache_beam as beam
    except ModuleNotFoundError:
        raise InputError(
            "--runner needs Apache Beam: pip install 'bert_jax[beam]'"
        ) from None
    settings, similar = local.find_similar(settings, tokenizer)
    local.check(settings)
    if settings.duplicates == "near":
        raise InputError(
            "duplicates=near compares each document with all before it, in order, "
            "which Beam does not keep; use duplicates=exact"
        )
    groups = [
        (number, (group[0].number, [source.name for source in group]))
        for number, group in enumerate(local.in_groups(find_sources(inputs)))
    ]
    with (
        folder_for(out) as folder,
        make_pipeline(runner, options) as pipeline,
    ):
        told = Told(files_of(tokenizer), settings, similar, str(folder))
        named = pipeline | "groups" >> beam.Create(groups) | beam.Reshuffle()
        repeated = pipeline | "none repeated" >> beam.Create([])
        if settings.duplicates == "exact":
            repeated = (
                named
                | "contents" >> beam.FlatMap(contents, told=told)
                | "same content" >> beam.GroupByKey()
                | "all but the first" >> beam.FlatMap(all_but_first)
            )
        made = (
            {"names": named, "repeated": repeated}
            | "per group" >> beam.CoGroupByKey()
            | "tokenise"
            >> beam.FlatMap(tokenise, told=told).with_outputs("counts", main="records")
        )
        shards = (
            made.records
            | "sizes" >> beam.Map(lambda record: (record[0], framed_size(record[1])))
            | "all sizes" >> beam.combiners.ToList()
            | "shards of all" >> beam.Map(shards_of)
        )
        parts = (
            made.records
            | "to shards" >> beam.Map(to_shard, shards=beam.pvalue.AsSingleton(shards))
            | "shards" >> beam.GroupByKey()
            | "write" >> beam.Map(write_shard, told=told)
        )
        _ = (
            pipeline
            | "once" >> beam.Create([list(inputs)])
            | "index"
            >> beam.Map(
                write_index,
                parts=beam.pvalue.AsList(parts),
                counts=beam.pvalue.AsList(made.counts),
                told=told,
            )
        )
    return open_corpus(out)


def make_pipeline(runner: str, flags: Sequence[str]):
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    options = PipelineOptions(list(flags))
    given = options.get_all_options(retain_unknown_options=True)
    extra = sorted({*given} - {*options.get_all_options()})
    if extra:
        raise InputError(f"Beam knows no option --beam.{', --beam.'.join(extra)}")
    try:
        return beam.Pipeline(runner, options)
    except ValueError as error:  # an unknown runner, or an option that it lacks
        raise InputError(f"--runner {runner}: {error}") from None


@contextlib.contextmanager
def folder_for(out: str | os.PathLike) -> Iterator[epath.Path]:
    """Where workers write: in a bucket, corpus.json comes last and makes it whole."""
    if is_bucket(out):
        local.check_no_corpus(epath.Path(out))
        yield epath.Path(out)
    else:
        with whole_folder(out) as scratch:
            yield epath.Path(scratch)


def files_of(tokenizer: Tokenizer) -> tuple[tuple[str, bytes], ...]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return tuple((p.name, p.read_bytes()) for p in sorted(Path(folder).iterdir()))


@lru_cache(maxsize=1)
def tokenizer_of(told: Told) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in told.tokenizer:
            (Path(folder) / name).write_bytes(data)
        return load_tokenizer(folder)


def contents(
    group: tuple[int, tuple[int, list[str]]], told: Told
) -> Iterator[tuple[int, Key]]:
    """(digest, key) of each document that is long enough."""
    number, (_, names) = group
    reader = local.Reader(
        find_sources(names), told.settings._replace(duplicates="keep")
    )
    for n, document in enumerate(reader.kept(reader.sources, lambda text: False)):
        yield digest(" ".join(words_of(document.text))), (number, n)


def all_but_first(same: tuple[int, Iterable[Key]]) -> list[Key]:
    return sorted(same[1])[1:]


def tokenise(group: tuple[int, dict], told: Told) -> Iterator:
    """(key, record) of each batch of a group, and what was read."""
    from apache_beam.pvalue import TaggedOutput

    number, found = group
    ((of_input, names),) = found["names"]
    repeated = set(found["repeated"])
    places = iter(range(1 << 62))
    reader = local.Reader(find_sources(names), told.settings)
    kept = reader.kept(reader.sources, lambda text: next(places) in repeated)
    for n, documents in enumerate(local.in_batches(kept)):
        batch = local.Batch(of_input, documents)
        columns = local.columns_of(
            batch, tokenizer_of(told), told.settings, told.similar
        )
        yield (number, n), serialise(columns)
    yield TaggedOutput("counts", reader.counts)


def to_shard(record: tuple[Key, bytes], shards: dict[Key, int]):
    return shards[record[0]], record


def shards_of(sizes: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    """The shard of each record; it takes them, in order, until it is large enough."""
    shard, offset, found = 0, 0, {}
    for key, size in sorted(sizes):
        if offset >= records.SHARD_BYTES:
            shard, offset = shard + 1, 0
        found[key] = shard
        offset += size
    return found


def empty_index(told: Told) -> Index:
    tokenizer = tokenizer_of(told)
    columns = local.stored_columns(tokenizer, told.settings, told.similar)
    return Index(columns, tokenizer.size)


def write_shard(
    item: tuple[int, Iterable[tuple[Key, bytes]]], told: Told
) -> tuple[int, Index]:
    """One shard, and its part of the index."""
    shard, written = item
    index = empty_index(told)
    offset = 0
    with open_shard(epath.Path(told.folder) / shard_name(shard)) as file:
        for _, data in sorted(written):
            file.write(data)
            index.enter(data, shard=shard, offset=offset)
            offset += framed_size(data)
    return shard, index


def write_index(
    inputs: list[str], parts: list[tuple[int, Index]], counts: list[dict], told: Told
) -> None:
    tokenizer, index = tokenizer_of(told), empty_index(told)
    for _, part in sorted(parts, key=lambda part: part[0]):
        index.extend(part)
    with tempfile.TemporaryDirectory() as folder:
        read = {name: sum(c[name] for c in counts) for name in counts[0]}
        about = local.describe(inputs, told.settings, told.similar)
        tokenizer.save(Path(folder) / "tokenizer")
        if told.similar:
            told.similar.save(Path(folder) / "similar")
        index.write(Path(folder), tokenizer, **about, read=read)
        upload(Path(folder), epath.Path(told.folder), last="corpus.json")
