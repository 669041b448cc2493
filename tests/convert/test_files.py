"""The files of a directory: right tensors or a clear error, and no pickle is run."""

import builtins
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bert_jax.convert import files
from bert_jax.convert.files import read_json, read_tensors, write_safetensors
from bert_jax.errors import InputError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "f64": torch.float64}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 1, 4), "c": ()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def check_same(found: dict[str, np.ndarray], tensors: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[name].float().numpy())


def shard(folder: Path, tensors: dict, *, kind: str) -> Path:
    """Writes the tensors as two files with an index."""
    save = save_file if kind == "safetensors" else torch.save
    names = [f"{part}.{kind}" for part in "xy"]
    for n, name in enumerate(names):
        save({key: tensors[key] for key in sorted(tensors)[n::2]}, folder / name)
    whole = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    path = folder / f"{whole}.index.json"
    where = {key: names[n % 2] for n, key in enumerate(sorted(tensors))}
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


# What can be read.


def test_safetensors(tmp_path: Path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    check_same(read_tensors(tmp_path), tensors)


def test_torch_file(tmp_path: Path, tensors):
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check_same(read_tensors(tmp_path), tensors)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(tmp_path: Path, tensors, kind: str):
    shard(tmp_path, tensors, kind=kind)
    check_same(read_tensors(tmp_path), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_other_precisions(tmp_path: Path, tensors, name: str, dtype: str):
    stored = {key: tensor.to(DTYPES[dtype]) for key, tensor in tensors.items()}
    stored["position_ids"] = torch.arange(7)[None]
    save = save_file if name.endswith("safetensors") else torch.save
    save(stored, tmp_path / name)
    check_same(read_tensors(tmp_path), stored)


def test_small_numbers_are_kept(tmp_path: Path):
    tiny = {"a": torch.tensor([1e-45, 3e-39, -0.0, 1.0])}
    save_file(tiny, tmp_path / "model.safetensors")
    found = read_tensors(tmp_path)["a"]
    assert found.tobytes() == tiny["a"].numpy().tobytes()


def test_safetensors_go_before_a_pickle(tmp_path: Path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    check_same(read_tensors(tmp_path), tensors)


def test_what_is_written_is_read(tmp_path: Path, tensors):
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    check_same(read_tensors(tmp_path), tensors)


# What cannot.


def test_no_weights(tmp_path: Path):
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(InputError, match=r"holds no weights .*pytorch_model\.bin\.ind"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "name", ["../x", "/elsewhere/x.safetensors", "sub/x.safetensors", "."]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, tensors, kind, name: str):
    index = shard(tmp_path, tensors, kind=kind)
    content = json.loads(index.read_text())
    content["weight_map"]["c"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(InputError, match="outside its directory") as raised:
        read_tensors(tmp_path)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_missing_shard(tmp_path: Path, tensors, kind: str):
    shard(tmp_path, tensors, kind=kind)
    (tmp_path / f"y.{kind}").unlink()
    with pytest.raises(InputError, match=rf"y\.{kind} is missing"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tensor_that_no_shard_holds(tmp_path: Path, tensors, kind: str):
    index = shard(tmp_path, tensors, kind=kind)
    content = json.loads(index.read_text())
    content["weight_map"] |= {"lost": f"x.{kind}", "gone": f"y.{kind}"}
    index.write_text(json.dumps(content))
    text = r"index\.json lists tensors that no file holds: gone, lost"
    with pytest.raises(InputError, match=text):
        read_tensors(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_of_nothing(tmp_path: Path, content: dict):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is damaged: it has no weight_map"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(tmp_path: Path, tensors, keep: int):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        read_tensors(tmp_path)


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("shards", [False, True])
def test_a_pickle_is_not_run(tmp_path: Path, tensors, shards: bool):
    trace, name = tmp_path / "trace", "pytorch_model.bin"
    pickle.loads(pickle.dumps(Malicious(trace)))
    assert trace.exists()  # it would work
    trace.unlink()
    if shards:
        name = "x.bin"
        shard(tmp_path, tensors, kind="bin")
    torch.save({"weight": Malicious(trace)}, tmp_path / name)
    with pytest.raises(InputError, match=rf"{name} .*holds more than tensors") as e:
        read_tensors(tmp_path)
    assert not trace.exists()
    assert len(str(e.value)) < 500  # not the library's page of advice to switch it off


@pytest.mark.parametrize(
    "content",
    [b"", b"not a pickle", "truncated", {"a": 1}, [1, 2], {"model": {"a": "b"}}],
)
def test_a_damaged_torch_file(tmp_path: Path, tensors, content):
    path = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "truncated":
        torch.save(tensors, path)
        path.write_bytes(path.read_bytes()[:-100])
    else:
        torch.save(content, path)
    with pytest.raises(InputError, match=r"pytorch_model\.bin is damaged or holds"):
        read_tensors(tmp_path)


def test_a_torch_file_without_torch(tmp_path: Path, tensors, monkeypatch):
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    real_import = builtins.__import__

    def no_torch(name, *args):
        if name == "torch":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(InputError, match=r"needs PyTorch .* pip install"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{'a': 1}", "is damaged, not JSON"),
        (b"", "is damaged, not JSON"),
        (b'{"a": "\xff"}', "is damaged, not JSON"),
        (b"[1, 2]", "does not hold a JSON object"),
    ],
)
def test_damaged_json(tmp_path: Path, content: bytes, text: str):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"config\.json .*{text}"):
        read_json(tmp_path / "config.json")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch):
    def fail(*args, **options):
        raise SafetensorError("no room")

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(OSError, match="no room"):
        write_safetensors(tmp_path / "model.safetensors", {})
