"""TOML and back: strict in reading, complete in writing, so that a run's config.toml repeats the run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from mpisgd.base.errors import ConfigError
from mpisgd.cli.options import parse
from mpisgd.config import (
    KINDS,
    Config,
    CustomModelOptions,
    ExponentialOptions,
    LinearOptions,
    MlpOptions,
    RmspropOptions,
    StepOptions,
    config_file,
    hints,
    options,
    replace,
)
from mpisgd.config.config_virtual import EmpiricalComputeOptions, FailureOptions, VirtualOptions
from mpisgd.protocols import SoftsyncOptions
from mpisgd.records import directory

JOBS = Path(__file__).parents[3] / "jobs"

#: Changed together with all the others, it would be refused; it is written and read below.
OWN = {"micro_batches": 1 + Config.mu, "field": 5, "layers": {"*.bias": 2}}
"""A divisor of mu as it is changed, an odd number, the names that seconds are changed to."""
UNCHANGED = {"parameters", "abort", "batched", "warmup_updates", "warmup_samples"}


def changed(cls: type) -> Any:
    """An instance of which no field but UNCHANGED has its default; so a field that is not written or not read is seen."""
    hints = typing.get_type_hints(cls)
    return cls(**{item.name: _changed(hints[item.name], item) for item in dataclasses.fields(cls)})


def _changed(hint: Any, item: dataclasses.Field[Any]) -> Any:
    if item.name in UNCHANGED:
        return item.default
    if item.name in OWN:
        return OWN[item.name]
    if item.name == "modulation":
        return "inverse_plus_one"
    if item.name == "scheduler":
        return "StepLR"
    if item.name in KINDS:
        return changed(list(KINDS[item.name].values())[1])
    if dataclasses.is_dataclass(hint):
        return changed(typing.cast(type, hint))
    if typing.get_origin(hint) is Literal:
        return next(choice for choice in typing.get_args(hint) if choice != item.default)
    if typing.get_origin(hint) is dict:
        given = {int: {3: 2.5}, str: {"depth": 2, "widths": [1, 2], "more": {"a": True, "b": "x"}}}
        return {"*.bias": 0.5} if typing.get_args(hint) == (str, float) else given[typing.get_args(hint)[0]]
    if typing.get_origin(hint) is tuple:
        (each, *_) = typing.get_args(hint)
        return (typing.get_args(each)[-1],) if typing.get_origin(each) is Literal else tuple(value + 1 for value in item.default)
    if isinstance(hint, types.UnionType):
        return 2
    if hint is bool:
        return not item.default
    if hint is str:
        return f"{item.default}x"
    return item.default / 2 or 0.25 if hint is float else item.default + 1


def write(path: Path, text: str) -> Path:
    file = path / "job.toml"
    file.write_text(text)
    return file


def test_the_papers_constants_are_in_job_files() -> None:
    """Read as they are; [Chen16 A.1] anneals the last 10 of 25 epochs, [Chen16 A.2] has decay and momentum 0.9 for RMSprop."""
    mnist, inception = (config_file.read(JOBS / f"chen16-{name}.toml") for name in ("mnist", "inception"))
    assert (mnist.schedule, mnist.epochs) == (LinearOptions(start_epochs=15.0, end=0.0), 25)
    assert inception.optimizer == RmspropOptions(smoothing=0.9, momentum=0.9, eps=1.0)
    assert inception.schedule == ExponentialOptions(beta=0.94, every_epochs=2.0)
    assert (inception.alpha0, inception.linear_scaling, inception.averaging) == (0.045, True, 0.9999)


@pytest.mark.parametrize(("component", "cls"), [(component, cls) for component, kinds in KINDS.items() for cls in kinds.values()])
def test_every_kind_round_trips(component: str, cls: type, tmp_path: Path) -> None:
    for kind in (cls(), changed(cls)):
        config = Config(**{component: kind})
        assert config_file.read(write(tmp_path, config_file.dumps(config))) == config
        assert config_file.from_mapping(config_file.to_mapping(config)) == config


def test_everything_at_once_round_trips() -> None:
    config = replace(changed(Config), way="auto", chunks=Config().chunks)
    assert not [item.name for item in options() if getattr(config, item.name) == getattr(Config(), item.name)]
    assert config_file.from_mapping(tomllib.loads(config_file.dumps(config))) == config


def test_the_environment_is_written_and_passed_over() -> None:
    text = config_file.dumps(Config(), {"learners": 4, "hosts": ["a", "b"], "versions": {"torch": "2"}})
    assert tomllib.loads(text)["environment"]["versions"] == {"torch": "2"}
    assert config_file.from_mapping(tomllib.loads(text)) == Config()


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", Config()),
        ('protocol = "softsync"', Config(protocol=SoftsyncOptions())),
        ('[protocol]\nname = "softsync"\nn = 4', Config(protocol=SoftsyncOptions(n=4))),
        ("alpha0 = 1\nepochs = 3", Config(alpha0=1.0, epochs=3.0)),
        ('[schedule]\nname = "step"\nepochs = [1, 2.5]', Config(schedule=StepOptions(epochs=(1.0, 2.5)))),
        ('[model]\nname = "mlp"\nhidden = []', Config(model=MlpOptions(hidden=()))),
        ("[virtual]\nbatched = true", Config(virtual=VirtualOptions(batched=True))),
        ("[virtual]\nslow_nodes = {2 = 3.5}", Config(virtual=VirtualOptions(slow_nodes={2: 3.5}))),
        ("[failures]\nat_s = {0 = 1.5}", Config(failures=FailureOptions(at_s={0: 1.5}))),
        ('[compute]\nname = "empirical"\nrun = "out"', Config(compute=EmpiricalComputeOptions(run="out"))),
        ('model = "my.nets:make"', Config(model=CustomModelOptions(factory="my.nets:make"))),
        (
            '[model]\nname = "my.nets:make"\nkwargs = {depth = 2}',
            Config(model=CustomModelOptions(factory="my.nets:make", kwargs={"depth": 2})),
        ),
        (
            '[model]\nname = "custom"\nfactory = "my.nets:make"',
            Config(model=CustomModelOptions(factory="my.nets:make")),
        ),
    ],
)
def test_what_may_be_written(text: str, config: Config, tmp_path: Path) -> None:
    read = config_file.read(write(tmp_path, text))
    assert read == config
    assert config_file.from_mapping(config_file.to_mapping(read)) == config
    assert isinstance(read.alpha0, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mus = 4", r"unknown key 'mus'; did you mean 'mu'\?"),
        ("xyzzy = 4", r"unknown key 'xyzzy'; expected one of: accumulation, aggregation, ahead"),
        ("[evaluation]\nbach = 4", r"unknown key 'evaluation\.bach'; did you mean 'batch'\?"),
        ('[protocol]\nname = "softsync"\nN = 4', r"unknown key 'protocol\.N'; expected one of: modulation, n"),
        ('[protocol]\nname = "hardsync"\nn = 4', r"unknown key 'protocol\.n'"),
        ('[optimizer]\nname = "sgd"\nmomentun = 0.5', r"unknown key 'optimizer\.momentun'; did you mean 'momentum'\?"),
        ('protocol = "softsink"', r"protocol = 'softsink' is unknown; did you mean 'softsync'\?"),
        ('[schedule]\nname = "cosine"', r"schedule = 'cosine' is unknown: use CosineAnnealingLR, of torch; expected one of: "),
        ("[protocol]\nn = 4", r"protocol = \{'n': 4\}: expected a table with the key 'name', one of hardsync, softsync"),
        ("[protocol]\nname = 4", r"expected a table with the key 'name'"),
        ("protocol = 4", r"protocol = 4: expected a table with the key 'name'"),
        ("evaluation = 4", r"evaluation = 4: expected a table \[evaluation\]"),
        ("mu = 4.0", r"mu = 4\.0: expected `int`, got `float`"),
        ("mu = true", r"mu = True: expected `int`, got `bool`"),
        ('mu = "4"', r"mu = '4': expected `int`, got `str`"),
        ('alpha0 = "0.1"', r"alpha0 = '0\.1': expected `float`, got `str`"),
        ("alpha0 = true", r"alpha0 = True: expected `float`, got `bool`"),
        ("evaluator = 1", r"evaluator = 1: expected `bool`, got `int`"),
        ("out = 3", r"out = 3: expected `str`, got `int`"),
        ('device = "gpu"', r"device = 'gpu': invalid enum value 'gpu'"),
        ('[model]\nname = "mlp"\nhidden = [1, "2"]', r"model\.hidden = \[1, '2'\]: expected `int`, got `str`"),
        ('[model]\nname = "mlp"\nhidden = 8', r"model\.hidden = 8: expected `array`, got `int`"),
        ('[model]\nname = "small_cnn"\nchannels = [8]', r"model\.channels = \[8\]: expected `array` of length 2"),
        ("[straggler]\nslowdown = {one = 2.0}", r"straggler\.slowdown = \{'one': 2\.0\}: expected `int`"),
        ("mu = 0", r"mu = 0: expected a finite number >= 1"),
        ("alpha0 = nan", r"alpha0 = nan: expected a finite number >= 0"),
        ('[protocol]\nname = "softsync"\nn = 0', r"protocol\.n = 0: expected a finite number >= 1"),
        ("mu = ", r"is not TOML"),
        ("mu = 4\nmu = 5", r"is not TOML"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """With the file and the field: the user sees where to look."""
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"job.toml.*{message}"):
        config_file.read(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration file '.*nowhere\.toml' cannot be read: .*No such file"):
        config_file.read(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: .*directory"):
        config_file.read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'out = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml' cannot be read: .*codec"):
        config_file.read(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"out": Path("r/types")}, "r/types"),
        ({"mu": np.int64(16)}, 16),
        ({"alpha0": np.float32(0.5)}, 0.5),
        ({"alpha0": torch.tensor(0.5)}, 0.5),
        ({"evaluator": np.bool_(True)}, True),
        ({"out": Path("~/run")}, str(Path("~/run").expanduser())),
        ({"data_dir": "~"}, str(Path("~").expanduser())),
        ({"out": "$OF_A_TEST/run"}, "/scratch/run"),
        ({"init_from": Path("${OF_A_TEST}") / "w.pt"}, "/scratch/w.pt"),
        ({"out": "cost$5"}, "cost$5"),
    ],
    ids=str,
)
def test_values_of_numpy_torch_and_paths_are_taken(given: dict[str, Any], taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_A_TEST", "/scratch")
    ((field, _),) = given.items()
    kinds = argparse.Namespace, types.SimpleNamespace, dataclasses.make_dataclass("Options", [field])
    found = [getattr(config_file.from_objects(each), field) for each in (given, *(kind(**given) for kind in kinds))]
    assert found == [taken] * 4
    assert type(found[0]) is type(taken)
    assert getattr(config_file.from_objects(Config(**given)), field) == taken


def test_tables_may_be_namespaces_too() -> None:
    given = argparse.Namespace(protocol=argparse.Namespace(name="softsync", n=2), virtual=types.SimpleNamespace(learners=3))
    made = config_file.from_objects(given)
    assert (dataclasses.asdict(made.protocol)["n"], made.virtual.learners) == (2, 3)


def test_a_variable_that_is_not_set_makes_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a run that an earlier mpisgd put there is read."""
    monkeypatch.chdir(tmp_path)
    out = config_file.from_objects({"out": "$NOT_SET_HERE/run"}).out
    with pytest.raises(ConfigError, match=r"out = '\$NOT_SET_HERE/run': the environment variable NOT_SET_HERE is not set here"):
        directory.claim(Path(out), overwrite=False)
    assert not list(tmp_path.iterdir())


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="config: found list, expected the path of a TOML file"):
        config_file.from_objects([("mu", 16)])


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "greek.toml").write_bytes('# the rate α₀\nmu = 8\nout = "λ"\n'.encode())
    program = "from mpisgd.config import config_file; print(ascii(config_file.read('greek.toml').out))"
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == ascii("λ"), done.stderr


@pytest.mark.parametrize("key", sorted(hints.REMOVED))
def test_a_key_that_is_gone_is_passed_over_where_it_did_nothing_and_else_refused(key: str) -> None:
    table, _, name = key.rpartition(".")
    option = f"--{key.replace('_', '-')}"

    def read(value: Any) -> Config:
        return config_file.from_mapping({table: {name: value}} if table else {name: value})

    assert read(hints.REMOVED[key][0]) == Config()
    with pytest.raises(ConfigError, match=f"unknown key '{key}': removed; "):
        read("anything")
    with pytest.raises(ConfigError, match=f"unknown option {option}: removed; "):
        parse([option, "3"], "mpisgd train")
