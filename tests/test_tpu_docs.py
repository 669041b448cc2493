"""docs/tpu.md: what it tells people to type is what the commands take."""

import os
import re
import shlex
import subprocess

import pytest

from bert_jax.cli import TAKE_MORE, parser, read_overrides
from bert_jax.config import load_config, override, resolve
from bert_jax.tpu import Topology
from tests.conftest import ROOT
from tests.test_tpu_scripts import SCRIPTS

PAGE = (ROOT / "docs/tpu.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("tpu ", "bert_jax "))
]
TPU = [words[1:] for words in LINES if words[0] == "tpu"]
AFTER = [words[words.index("--") + 1 :] for words in LINES if "--" in words]
OURS = [words[1:] for words in [*LINES, *AFTER] if words[0] == "bert_jax"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the files that the page writes."""
    made = tmp_path_factory.mktemp("page")
    for block in BLOCKS:
        if "<<'END'" in block:
            subprocess.run(["bash", "-ec", block], cwd=made, check=True)
    assert {path.name for path in made.iterdir()} == {"tpu.env", "mount_disk.sh"}
    return made


def test_the_page_has_every_command_of_the_way():
    commands = {words[0] for words in TPU}
    assert {"create", "install", "check", "watch", "logs", "delete"} <= commands
    assert {words[0] for words in OURS} > {"prepare", "compile", "train", "export"}


@pytest.mark.parametrize("words", TPU, ids=" ".join)
def test_a_line_of_tpu_is_taken(folder, words):
    result = subprocess.run(
        [SCRIPTS / "tpu", words[0], "--dry-run", *words[1:]],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "\ngcloud compute tpus " in f"\n{result.stdout}"
    assert "berta" in result.stdout
    assert "--zone=us-west4-a" in result.stdout


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_line_of_bert_jax_is_taken(words):
    arguments, rest = parser().parse_known_args(words)
    assert not rest or arguments.command in TAKE_MORE
    if "config" in arguments:
        config = load_config(arguments.config)
        config.data = config.data or "corpus"  # compile needs none
        override(config, read_overrides(rest))
        resolve(config)
    if "topology" in arguments:
        Topology.parse(arguments.topology)
