"""Configs: every file loads, every field is read, every mistake is named."""

import dataclasses
import json
from pathlib import Path

import pytest

from bert_jax import config as configs
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.presets import ALIASES, PRESETS, preset

ROOT = Path(__file__).parents[1]


def resolved(**changes):
    config = configs.load_config("pretrain:bert-tiny")
    named = {name.replace("__", "."): value for name, value in changes.items()}
    configs.override(config, {"data": "corpus", **named})
    return configs.resolve(config)


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_pretrain_loads_for_every_preset(name):
    config = configs.load_config(f"pretrain:{name}")
    config.data = "corpus"
    assert configs.resolve(config).arch == preset(name).arch


def test_a_config_is_found_by_name_and_by_path(monkeypatch, tmp_path):
    by_name = configs.load_config("pretrain:bert-mini")
    by_path = configs.load_config(f"{ROOT / 'configs/pretrain.py'}:bert-mini")
    assert by_name.to_dict() == by_path.to_dict()
    monkeypatch.chdir(tmp_path)  # away from the checkout, as installed
    assert configs.load_config("configs/pretrain.py:bert-mini") == by_name


def test_every_field_of_a_config_can_be_overridden():
    config = configs.load_config("pretrain:bert-tiny")
    for name, value in configs.flatten(config):
        if name in ("preset", "objective.name"):  # they decide other fields
            continue
        new = {str: "text", tuple: "(('.*', 7.0),)"}.get(type(value), "7")
        configs.override(config, {name: new})
        assert dict(configs.flatten(config))[name] in (7, "text", ((".*", 7.0),))


def test_a_workdir_of_fewer_fields_is_the_same_run():
    new = resolved().as_dict()
    old = json.loads(json.dumps(new))
    for part, field in (
        ("optim", "rate_rules"),
        ("optim", "schedule"),
        ("arch", "share"),
    ):
        del old[part][field]
    del old["objective"]["choose"]
    assert configs.differences(old, new) == []
    old["optim"]["lr"] = 7.0
    (text,) = configs.differences(old, new)
    assert text == "optim.lr: 7.0 in the workdir, 0.0001 now"


def test_numbers_are_read_as_people_write_them():
    run = resolved(steps="1e4", optim__lr="3e-4", batch="64")
    assert (run.steps, run.optim.lr, run.batch) == (10_000, 3e-4, 64)


def test_all_wrong_overrides_are_named_at_once():
    config = configs.load_config("pretrain:bert-tiny")
    changes = {"bacth": "8", "optim.lrr": "1", "steps": "many", "batch": "inf"}
    changes |= {"optim.rate_rules": "('a', 1.0", "optim.decay_rules": "exit()"}
    with pytest.raises(InputError) as caught:
        configs.override(config, {**changes, "preset": "bert-mini"})
    text = str(caught.value)
    assert "config.batch='inf' is not of type int" in text
    assert "the preset is part of --config: --config NAME:bert-mini" in text
    assert "unknown config field 'bacth'. Did you mean batch" in text
    assert "unknown config field 'optim.lrr'. Did you mean optim.lr" in text
    assert "config.steps='many' is not of type int" in text
    assert "config.optim.rate_rules=\"('a', 1.0\" is not of type tuple" in text
    assert "config.optim.decay_rules='exit()' is not of type tuple" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "config.data is not set"),
        ({"length": "1024"}, "length=1024 is more than config.arch.max_positions=512"),
        ({"dtype": "float8"}, "unknown config.dtype 'float8'"),
        ({"steps": "0"}, "config.steps=0: at least 1"),
        ({"seed": "-1"}, "config.seed=-1 must be in 0..4294967295"),
        ({"arch.types": "1"}, "config.rows=pair needs config.arch.types"),
        ({"arch.stack": "loop:3"}, "must be loop, scan or scan:k"),
        ({"optim.lr": "nan"}, "optim.lr=nan must be 0 or more, and finite"),
        ({"arch.heads": "3"}, "arch.width=128 is not a multiple of arch.heads=3"),
        ({"arch.activation": "gelo"}, "Did you mean gelu"),
        ({"arch.stack": "scan:3"}, "needs arch.layers=2 to be a multiple of 3"),
        ({"arch.stack": "tower"}, "must be loop, scan or scan:k"),
        ({"arch.remat": "some"}, "unknown arch.remat 'some'"),
        ({"arch.dropout": "1.5"}, "arch.dropout=1.5 must be in"),
        ({"optim.name": "adam"}, "unknown optim.name 'adam'. Did you mean adamw"),
        ({"optim.beta1": "1"}, "optim.beta1=1.0 not in"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    config = configs.load_config("pretrain:bert-tiny")
    configs.override(config, {"data": "corpus", **changes})
    with pytest.raises(InputError) as caught:
        configs.resolve(config)
    assert message in str(caught.value)


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean pretrain"):
        configs.load_config("pretran:bert-tiny")
    with pytest.raises(InputError, match="unknown preset 'bert-tinny'.*bert-tiny"):
        configs.load_config("pretrain:bert-tinny")


def test_a_file_without_get_config_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"mine\.py has no function get_config"):
        configs.load_config(str(tmp_path / "mine.py"))


def test_fields_nobody_reads_and_fields_that_lack_are_errors(tmp_path):
    config = configs.load_config("pretrain:bert-tiny")
    config.unlock()
    config.colour = "red"
    del config.steps
    config.optim.momentum = 0.9
    with pytest.raises(InputError) as caught:
        configs.resolve(config)
    text = str(caught.value)
    assert "unknown config field 'colour'" in text
    assert "lacks the fields steps" in text
    assert "unknown config field 'optim.momentum'" in text


def test_arch_names_all_problems_at_once():
    with pytest.raises(InputError) as caught:
        Arch(layers=0, dropout=-1.0, activation="x")
    assert len(str(caught.value).splitlines()) == 3


def test_differences_ignore_what_does_not_change_the_result():
    told = dict(keep="9", eval__every="5", spike="skip")
    old, new = resolved().as_dict(), resolved(**told).as_dict()
    assert configs.differences(old, new) == []
    new = dataclasses.replace(resolved(), seed=3).as_dict()
    assert configs.differences(old, new) == ["seed: 0 in the workdir, 3 now"]
