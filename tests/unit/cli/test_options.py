"""The command line of a run: a file, then overrides, then nothing but a configuration that can be printed and read again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import train
from mpisgd.cli.help import LEFT
from mpisgd.cli.options import VIRTUAL, parse
from mpisgd.config import (
    AdamOptions,
    Config,
    CustomModelOptions,
    DigitsOptions,
    GroupOptions,
    MlpOptions,
    SgdOptions,
    StragglerOptions,
    config_file,
    replace,
)
from mpisgd.protocols import BackupOptions, SoftsyncOptions


def configured(words: str) -> Config:
    return parse(words.split(), "mpisgd train")[0]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    text = 'mu = 4\nalpha0 = 0.5\n[protocol]\nname = "softsync"\nn = 3\n[model]\nname = "my.nets:make"\nkwargs = {depth = 2}\n'
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("", Config()),
        ("--mu 4 --alpha0=1", Config(mu=4, alpha0=1.0)),
        ("--protocol softsync --protocol.n 3", Config(protocol=SoftsyncOptions(n=3))),
        ("--protocol.n 3 --protocol=softsync", Config(protocol=SoftsyncOptions(n=3))),
        ("--protocol backup --protocol.b 2", Config(protocol=BackupOptions(b=2))),
        ("--optimizer adam --optimizer.beta1 0.5", Config(optimizer=AdamOptions(beta1=0.5))),
        ("--model.hidden 3 4", Config(model=MlpOptions(hidden=(3, 4)))),
        ("--model.batch-norm --evaluator", Config(model=MlpOptions(batch_norm=True), evaluator=True)),
        ("--data.no-subtract-mean", Config(data=DigitsOptions(subtract_mean=False))),
        ("--straggler.slowdown 0 2.0 3 4", Config(straggler=StragglerOptions(slowdown={0: 2.0, 3: 4.0}))),
        (
            "--groups.weight-decay *.bias 0 norm* 0.5 --groups.rate head.* 10",
            Config(groups=GroupOptions({"*.bias": 0.0, "norm*": 0.5}, {"head.*": 10.0})),
        ),
        ("--model my.nets:make", Config(model=CustomModelOptions(factory="my.nets:make"))),
    ],
)
def test_words_become_a_configuration(words: str, config: Config) -> None:
    assert configured(words) == config


def test_words_override_the_file(job: Path) -> None:
    base = config_file.read(job)
    assert configured(str(job)) == base
    assert configured(f"{job} --mu 8 --protocol.n 2") == replace(base, mu=8, protocol=SoftsyncOptions(n=2))


def test_a_kind_that_the_file_has_keeps_the_files_options_and_another_starts_anew(job: Path) -> None:
    base = config_file.read(job)
    assert configured(f"{job} --protocol softsync") == base
    assert configured(f"{job} --model my.nets:make") == base
    assert configured(f"{job} --protocol backup") == replace(base, protocol=BackupOptions())
    assert configured(f"{job} --model other:make").model == CustomModelOptions(factory="other:make")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--mus 4", "--mu INT"),
        ("--evaluation.bach 4", "--evaluation.batch INT"),
        ("--mu four", "invalid literal for int() with base 10: 'four'"),
        ("--mu", "--mu"),
        ("--device gpu", "cuda"),
        ("--mu 4 job.toml", "job.toml"),
    ],
)
def test_a_misspelt_option_exits_with_2_and_names_the_nearest(words: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        configured(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert shown in told.out + told.err


def test_64_learners_do_not_say_it_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    with pytest.raises(SystemExit) as ended:
        configured("--mus 4")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--protocol softsink", "protocol = 'softsink' is unknown; did you mean 'softsync'"),
        (
            "--protocol",
            "--protocol: expected one of hardsync, softsync, .*, allreduce, sandblaster, custom after --protocol",
        ),
        ("--mu 0", "mu = 0: expected a finite number >= 1"),
        ("--protocol softsync --protocol.n 0", r"protocol\.n = 0"),
        ("nowhere.toml --mu 4", "'nowhere.toml' cannot be read"),
    ],
)
def test_values_that_cannot_be(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(words)


def test_print_config_round_trips_and_runs_nothing(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(job), "--seed", "7", "--print-config"]
    assert train.main(words) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert config_file.read(printed) == configured(f"{job} --seed 7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert train.main(words) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--protocol.n 4", "protocol 'hardsync' has no 'n'; this option belongs to --protocol softsync"),
        ("--protocol softsync --protocol.b=1", "protocol 'softsync' has no 'b'; this option belongs to --protocol backup"),
        ("--optimizer adam --optimizer.no-nesterov", "optimizer 'adam' has no 'nesterov'; this option belongs to --optimizer sgd"),
    ],
)
def test_an_option_of_another_kind_is_refused_with_the_kind_it_belongs_to(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        configured(words)


# ------------------------------------------------------------------------------------------------------------------- the help


def helped(words: str, capsys: pytest.CaptureFixture[str], *, virtual: bool = False) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(words.split(), "mpisgd simulate" if virtual else "mpisgd train", virtual=virtual)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_of_training_is_two_screens_without_the_virtual_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    told = helped("--protocol downpour --help", capsys)
    lines = told.splitlines()
    assert len(lines) <= 92
    assert max(map(len, lines)) <= 100
    assert "--protocol.n-push" in told
    assert re.search(
        r"--ahead Pull weights that lack this many of the learner's own gradients \(0 = none, or 1, 2\)", " ".join(told.split())
    )
    assert re.search(r"--clip-norm .*\(0 = off\)", told)
    for table in VIRTUAL:
        assert f"--{table}" not in told
    assert "--inner" not in told
    assert "--modulate" not in told, "this protocol's weights are all 1"
    assert "--modulate" in helped("--protocol downpour --protocol.modulation inverse --help", capsys)
    assert "--topk-share" not in told
    assert "--topk-share" in helped("--push-format topk --help", capsys)
    told = helped("--local-steps 4 --help", capsys)
    assert "--inner-alpha0" in told
    assert "--inner-optimizer.beta1" in told
    told = helped("-h", capsys, virtual=True)
    assert all(f"--{table}." in told for table in VIRTUAL)
    assert "--resume" not in told
    assert "--log.flush-s" not in told, "few need it"
    assert "--straggler.pause-s" not in told and "--straggler.pause-s" in helped("--straggler.pause-learner 1 --help", capsys)


def test_the_inner_optimizer_has_kinds_and_says_whose_option_is_wrong() -> None:
    """Its kinds are those of `optimizer`."""
    words = "--local-steps 2 --inner-optimizer sgd --inner-optimizer.momentum"
    found = parse([*words.split(), "0.5"], "mpisgd train")[0].inner_optimizer
    assert found == SgdOptions(momentum=0.5)
    for more, said in (
        ("2", "inner_optimizer.momentum = 2.0: expected a number below 1"),
        ("0 --inner-optimizer.beta1 0", "has no 'beta1'; this option belongs to --inner-optimizer adam or adamw or lamb"),
        ("0 --optimizer.momentum 2", "optimizer.momentum = 2.0: expected a number below 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            parse([*words.split(), *more.split()], "mpisgd train")
        assert ("inner" in str(caught.value)) == ("inner" in said)
    with pytest.raises(ConfigError, match=r"^inner_optimizer\.momentum = 2\.0"):
        config_file.from_mapping({"local_steps": 2, "inner_optimizer": {"name": "sgd", "momentum": 2.0}})


def test_help_shows_the_values_of_the_file(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = helped(f"{job} --help", capsys)
    assert re.search(r"--mu .*\(4\)", told)
    assert re.search(r"--protocol\.n .*\(3\)", told)


def test_help_all_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    told = helped("--protocol ssp --help-all", capsys)
    assert "steps by itself, by plain SGD" in told, "the end of a text"
    assert not any(f"--{table}" in told for table in VIRTUAL)
    assert all(f"--{name}".replace("_", "-") in told.replace("[no-]", "") for name in LEFT), "also what few need"
    assert "--virtual.slow-nodes" in helped("--help-all", capsys, virtual=True)


def test_one_rank_prints_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert helped("--help", capsys) == helped("--help-all", capsys) == ""


@pytest.mark.parametrize("words", ["--virtual.learners 3", "--virtual.no-gradients", "--compute normal", "--network.latency-s 0"])
def test_options_of_the_virtual_cluster_are_those_of_simulate_alone(words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words.partition(' ')[0]}: an option of virtual clusters"):
        configured(words)
    assert parse(words.split(), "mpisgd simulate", virtual=True)[0] != Config()


def test_training_takes_a_file_that_has_a_virtual_cluster(job: Path) -> None:
    """One file serves both; `train` keeps its tables, and changes nothing of them."""
    job.write_text(job.read_text() + '[virtual]\nlearners = 7\n[compute]\nname = "normal"\ndeviation_s = 0.5\n')
    config = configured(f"{job} --mu 2")
    assert config == replace(config_file.read(job), mu=2)
    assert type(config) is Config
    assert (config.virtual.learners, config.mu) == (7, 2)
