"""The built-in corpus: a made-up package for the rules, then the real build."""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

pydocs = pytest.importorskip("bert_jax.data.pydocs")

from bert_jax.data.text import Document, documents  # noqa: E402
from bert_jax.errors import InputError  # noqa: E402

ROOT = Path(__file__).parents[2]


def prose(topic: str, words: int = 60) -> str:
    """A line of words which only this topic has."""
    return " ".join(f"{topic}{number}" for number in range(words)) + "."


@pytest.fixture
def roots(tmp_path):
    """A package with all that the reader must cope with."""
    package = tmp_path / "made_up"
    files = {
        "__init__.py": f'"""{prose("top")}"""',
        "explosive.py": (
            f'"""{prose("module")}"""\nraise RuntimeError("imported")\n'
            f'class A:\n    """{prose("class")}"""\n'
            f'    def f(self):\n        """{prose("method")}"""\n'
            f"try:\n    pass\nexcept ImportError:\n"
            f'    async def g():\n        """{prose("late")}"""\n'
        ),
        "tiny.py": '"""Too short."""',
        "no_syntax.py": f'"""{prose("bad")}"""\ndef (:\n',
        "zero.py": b"x = '\0'",
        "latin.py": b"# -*- coding: latin-1 -*-\n'''" + b"caf\xe9 " * 60 + b"'''",
        "copy.py": f'"""{prose("top")}"""',
        "half.py": f'"""\\ud800 {prose("half")}"""',
        "tests/inner.py": f'"""{prose("inner")}"""',
        "test_it.py": f'"""{prose("it")}"""',
        "sub/deep.py": f'"""{prose("deep")}"""',
        "notes.txt": prose("notes"),
    }
    for name, content in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (package / "dangling.py").symlink_to(package / "nowhere.py")
    return [("made_up.", package)]


def test_one_document_a_module_and_nothing_is_run(roots):
    found = {document.name: document.text for document in pydocs.collect(roots)}
    assert list(found) == [
        "made_up",
        "made_up.explosive",
        "made_up.half",
        "made_up.latin",
        "made_up.sub.deep",
    ]
    parts = ("module", "class", "method", "late")
    assert found["made_up.explosive"] == "\n".join(map(prose, parts))
    assert found["made_up.latin"].startswith("café café")
    assert found["made_up.half"].startswith("? half0")


def test_topics_are_read_one_by_one(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    topics = {"if": prose("if"), "while": prose("while"), "x": "short"}
    code = f"# made by Sphinx\ntopics = {topics!r}\n"
    (tmp_path / "pydoc_data/topics.py").write_text(code)
    assert pydocs.collect([("", tmp_path)]) == [
        Document("pydoc_data.topics.if", prose("if")),
        Document("pydoc_data.topics.while", prose("while")),
    ]


def test_a_missing_package_is_left_out(monkeypatch):
    monkeypatch.setattr(pydocs, "PACKAGES", ("numpy", "no_such_package"))
    assert [prefix for prefix, _ in pydocs.installed()] == ["", "numpy."]


def test_fingerprint_follows_the_sources(roots):
    before = pydocs.fingerprint(roots)
    assert before == pydocs.fingerprint(roots)
    (roots[0][1] / "tests/inner.py").write_text("not part of it")
    assert before == pydocs.fingerprint(roots)
    (roots[0][1] / "sub/deep.py").write_text("changed")
    assert before != pydocs.fingerprint(roots)


DOCSTRING = """Summary of the function on a single line.

    Some longer paragraph which was wrapped by hand at some column and so
    goes on here, until it ends.
    Parameters
    ----------
    x : array_like
        The first argument, which needs more than one line of text to be
        explained.

    * An item of a list which is too long for one single line of text
      and hangs.
    * Another item.

    Args:
      axis: The axis along which something is computed, for the reason
        that is given here.

    Example::

        result = function(argument, another_argument, third_argument)
        print(result)

    >>> function(1) + function(2) + function(3) + function(4) + 5
    15

    ======  ===========================================
    Name    A column of a table with a long description
    Other   The next row with another long description
    ======  ===========================================
    """

UNWRAPPED = """Summary of the function on a single line.
Some longer paragraph which was wrapped by hand at some column and so goes on here, until it ends.
Parameters
x : array_like
The first argument, which needs more than one line of text to be explained.
* An item of a list which is too long for one single line of text and hangs.
* Another item.
Args:
axis: The axis along which something is computed, for the reason that is given here.
Example::
result = function(argument, another_argument, third_argument)
print(result)
>>> function(1) + function(2) + function(3) + function(4) + 5
15
Name    A column of a table with a long description
Other   The next row with another long description"""  # noqa: E501


def test_unwrap():
    assert pydocs.unwrap(DOCSTRING).split("\n") == UNWRAPPED.split("\n")


def test_common_text_lands_on_one_side():
    alone = [Document(f"alone{n}", prose(f"a{n}x")) for n in range(400)]
    # Each pair shares a fifth of its words: a Jaccard index far below 0.5.
    pairs = [
        Document(f"{side}{n}", f"{prose(f'c{n}x', 40)} {prose(f'{side}{n}x', 160)}")
        for n in range(200)
        for side in ("left", "right")
    ]
    # A chain: the ends share nothing but must follow the middle.
    chain = [
        Document(f"chain{n}", f"{prose(f'k{n}x')} {prose(f'k{n + 1}x')}")
        for n in range(30)
    ]
    everything = alone + pairs + chain
    drawn = dict(zip(everything, pydocs.sides(everything), strict=True))
    assert 5 < sum(drawn[d] == "valid" for d in alone) < 40  # 20 expected
    lefts = [drawn[d] for d in pairs[::2]]
    assert lefts == [drawn[d] for d in pairs[1::2]]
    assert set(lefts) == {"train", "valid"}
    assert len({drawn[d] for d in chain}) == 1
    # The order of the documents decides nothing.
    turned = everything[::-1]
    assert dict(zip(turned, pydocs.sides(turned), strict=True)) == drawn


def test_no_documents():
    assert pydocs.sides([]) == []


def test_load_builds_once_and_again_for_other_sources(
    roots, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pydocs, "VALID_SHARE", 0.5)
    expected = pydocs.collect(roots)

    def load() -> list[Document]:
        return [d for split in pydocs.SPLITS for d in pydocs.load(split, roots=roots)]

    assert sorted(load()) == sorted(expected)
    with monkeypatch.context() as patched:
        patched.setattr(pydocs, "collect", lambda roots: pytest.fail("built again"))
        assert sorted(load()) == sorted(expected)
    assert capsys.readouterr() == ("", "")
    (roots[0][1] / "new.py").write_text(f'"""{prose("new")}"""')
    assert sorted(load()) == sorted([*expected, Document("made_up.new", prose("new"))])


def test_another_process_may_finish_first(roots, tmp_path, monkeypatch):
    monkeypatch.setattr(pydocs, "VALID_SHARE", 0.5)
    draw = pydocs.sides

    def overtaken(documents):
        monkeypatch.setattr(pydocs, "sides", draw)
        other.extend(pydocs.load(cache=tmp_path / "cache", roots=roots))
        return draw(documents)

    other: list[Document] = []
    monkeypatch.setattr(pydocs, "sides", overtaken)
    mine = list(pydocs.load(cache=tmp_path / "cache", roots=roots))
    assert mine == other != []


def test_load_errors(tmp_path, roots):
    with pytest.raises(InputError, match=r"split of pydocs 'test'.*train, valid"):
        pydocs.load("test")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="BERT_JAX_CACHE"):
        pydocs.load(cache=tmp_path / "file/cache", roots=roots)


def test_a_killed_build_is_not_taken_for_a_corpus(roots, tmp_path, monkeypatch):
    # TFDS wants an example in each split, and there are five documents.
    monkeypatch.setattr(pydocs, "VALID_SHARE", 0.5)
    cache = tmp_path / "cache"
    code = f"""
import os
from pathlib import Path
from bert_jax.data import pydocs

def die(self, documents):
    yield 0, {{"name": "half", "text": "half"}}
    os._exit(9)

pydocs.Pydocs._generate_examples = die
pydocs.load(cache={str(cache)!r}, roots=[("made_up.", Path({str(roots[0][1])!r}))])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.returncode == 9, done.stderr.decode()[-2000:]
    assert list(cache.rglob("*incomplete*"))
    names = [
        d.name for s in pydocs.SPLITS for d in pydocs.load(s, cache=cache, roots=roots)
    ]
    assert "half" not in names
    assert len(names) == len(pydocs.collect(roots))


def runs(document: Document) -> set[int]:
    """The 13-word shingles once more, by other means than the module's."""
    words = re.findall(r"\w+", document.text.lower())
    return {hash(tuple(words[i : i + 13])) for i in range(len(words) - 12)}


def test_the_real_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path))
    train = list(documents(["pydocs"]))
    valid = list(documents(["pydocs:valid"]))
    both = train + valid
    size = sum(len(d.text) for d in both)
    assert size > 3_000_000
    assert 0.02 < sum(len(d.text) for d in valid) / size < 0.10
    names = {d.name for d in both}
    assert {"textwrap", "numpy.linalg._linalg", "pydoc_data.topics.assert"} <= names
    assert len(names) == len(both) == len({d.text for d in both})
    assert all(len(d.text) >= 200 for d in both)
    noise = re.compile(r"^[-=~\s]*$", re.MULTILINE)  # underlines and empty lines
    assert not [d.name for d in both if noise.search(d.text)]

    # No near-duplicate across the sides, and little common text at all.
    owners = defaultdict(list)
    for document in valid:
        for run in runs(document):
            owners[run].append(document)
    sizes = Counter(document for found in owners.values() for document in found)
    leaked = set()
    for document in train:
        own = runs(document)
        common = own & owners.keys()
        leaked |= common
        shared = Counter(other for run in common for other in owners[run])
        for other, count in shared.items():
            union = len(own) + sizes[other] - count
            assert count <= 0.5 * union, (document.name, other.name)
    assert len(leaked) < 0.05 * len(owners)

    # English, not tables: most letters are in lower case, and common words are common.
    text = " ".join(d.text for d in valid)
    assert sum(c.islower() for c in text) > 0.6 * len(text)
    assert len(re.findall(r"\bthe\b", text)) > len(text) / 200
