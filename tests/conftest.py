"""What every test may use."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices on one machine; a test that wants one uses the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What tests compile is kept, except for what takes no time: too many files.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

ROOT = Path(__file__).parents[1]
# Many tests compile the same small step: once is enough.
os.environ["BERT_JAX_CACHE"] = str(ROOT / ".pytest_cache/bert_jax")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache/bert_jax/xla"))


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_compiled():
    """What a file compiled is of no use to the next; kept, it made each collection of
    garbage, and so all that came later, three times as slow."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; without it the test is skipped.

    Where BERT_JAX_DATA is set the folder must be there: a missing one is a failure.
    """
    given = os.environ.get("BERT_JAX_DATA")
    path = Path(given or ROOT.parent / "shared/data")
    if not path.is_dir():
        if given:
            pytest.fail(f"BERT_JAX_DATA={given} is not a folder")
        pytest.skip("real data: set BERT_JAX_DATA")
    return path


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    """A folder that stands for all of gs://, for etils.epath and for fsspec.

    Its files are TensorFlow's, as those of gs:// are where TensorFlow is installed.
    """
    import fsspec
    from etils.epath import backend, gpath

    folder = tmp_path / "gs"
    real = gpath._GPath._backend
    monkeypatch.setattr(
        fsspec.core,
        "url_to_fs",
        lambda url: (fsspec.filesystem("file"), url.replace("gs://", f"{folder}/")),
    )

    class Folder(type(backend.tf_backend)):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if not callable(found) or name.startswith("_"):
                return found

            def call(*paths, **options):
                here = [str(p).replace("gs://", f"{folder}/") for p in paths]
                result = found(*here, **options)
                if name == "glob":
                    return [p.replace(f"{folder}/", "gs://") for p in result]
                return result

            return call

    is_bucket = lambda path: str(path).startswith("gs://")  # noqa: E731
    choose = lambda path: Folder() if is_bucket(path) else real.fget(path)  # noqa: E731
    monkeypatch.setattr(gpath._GPath, "_backend", property(choose))
    pick = lambda a, b: Folder() if is_bucket(a) or is_bucket(b) else real.fget(a)  # noqa: E731
    monkeypatch.setattr(gpath, "_get_backend", pick)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory):
    from tests import tiny

    return tiny.make_tokenizer(folder=tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory, tiny_tokenizer):
    """A prepared corpus of forty short documents."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("corpus")
    return tiny.make_corpus(folder, tokenizer=tiny_tokenizer)


def pytest_terminal_summary(terminalreporter):
    """A table of what was skipped, by reason: a skip is not a pass."""
    reasons = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "?"
        reasons[reason] = reasons.get(reason, 0) + 1
    terminalreporter.section("skipped, by reason")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:4} {reason}")
    if not reasons:
        terminalreporter.write_line("   0 nothing was skipped")
