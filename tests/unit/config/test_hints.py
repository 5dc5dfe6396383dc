"""Names of other frameworks are answered with what they are here, in commands and in files, and never with another thing."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable

import pytest
from torch.optim import lr_scheduler

from mpisgd.base.errors import ConfigError
from mpisgd.cli.options import parse
from mpisgd.cli.reading.compare import main as compare
from mpisgd.cli.reading.plan import main as plan
from mpisgd.cli.submit import main as submit
from mpisgd.config import KINDS, Config, config_file, hints, make_options
from mpisgd.config.optimizers import TORCH_SCHEDULERS

OURS = {item.name for item in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("word", "mend"),
    [
        ("--lr", "--alpha0"),
        ("--learning-rate=0.1", "--alpha0"),
        ("--batch-size", "--mu"),
        ("-b", "--mu"),
        ("--workers", "mpisgd run -n RANKS"),
        ("--num_workers", "mpirun -n RANKS"),
        ("--world-size", "mpisgd run -n RANKS"),
        ("-n", "mpisgd run -n RANKS"),
        ("--max-restarts", "mpisgd run -n RANKS --max-restarts N"),
        ("--inner-lr", "--local-steps, .*--inner-alpha0"),
        ("--learners", "--virtual.learners"),
        ("--momentum", "--optimizer.momentum"),
        ("--optimizer.lr", "--alpha0"),
        ("--weight-decay", "--optimizer.weight-decay"),
        ("--num-epochs", "--epochs"),
        ("--output", "--out"),
        ("--gpus", "--device"),
        ("--backend", "MPI"),
        ("--save-every", "--checkpoint.every-updates"),
        ("--max-grad-norm", "--clip-norm"),
        ("--resume-from-checkpoint", "--resume RUN"),
        ("--sweep", "removed; .*--out"),
        ("--resize", "mpisgd run -n RANKS --resume RUN"),
        ("--element", "loop in the shell .*--out"),
    ],
)
def test_an_option_of_another_framework_is_answered_with_ours(word: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option {word.partition('=')[0]}: .*{mend}"):
        parse([word, "4"], "mpisgd train")


def test_keys_of_files_have_the_same_table() -> None:
    for key, text in hints.OPTIONS.items():
        if key in ("load", "v", "o"):
            continue
        with pytest.raises(ConfigError) as refused:
            config_file.from_mapping({key: 1})
        assert str(refused.value) == f"unknown key {key!r}: {text.replace('`', '')}"
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer\.lr': the learning rate is alpha0"):
        config_file.from_mapping({"optimizer": {"name": "sgd", "lr": 0.1}})


def test_what_torchs_schedulers_take_stands_in_kwargs() -> None:
    """A scheduler's step_size is no learning rate."""
    with pytest.raises(ConfigError, match=r"unknown key 'schedule\.step_size': .* schedule\.kwargs$"):
        config_file.from_mapping({"schedule": {"name": "StepLR", "step_size": 3}})
    with pytest.raises(ConfigError, match=r"unknown option --schedule\.T-max: .* in a file, in the table schedule\.kwargs$"):
        parse(["--schedule", "CosineAnnealingLR", "--schedule.T-max", "4"], "mpisgd train")


def test_those_are_all_that_torchs_schedulers_take() -> None:
    taken = {name.lower() for known in TORCH_SCHEDULERS for name in inspect.signature(getattr(lr_scheduler, known)).parameters}
    of_schedules = {item.name for kind in KINDS["schedule"].values() for item in dataclasses.fields(kind)}
    not_given = {"optimizer", "last_epoch", "verbose", "steps_per_epoch", "scale_fn", "scale_mode"}
    momenta = {name for name in taken if "momentum" in name}
    assert taken - of_schedules - not_given - momenta == set(hints._SCHEDULERS_OWN.split())


def test_no_name_of_ours_is_taken_for_another() -> None:
    assert OURS.isdisjoint(hints.OPTIONS)
    words = ["--no-evaluator", "--data.no-subtract-mean", "--optimizer.momentum", "0.5", "--schedule.warmup-epochs", "1"]
    assert parse(words, "mpisgd train")[0].optimizer.momentum == 0.5


def test_what_is_named_as_the_mend_exists() -> None:
    """Each `field` of the table, as an option of some kind."""
    known = set(OURS)
    for component, value in vars(Config()).items():
        kinds = KINDS.get(component, {"": type(value)}).values() if dataclasses.is_dataclass(value) else ()
        known |= {f"{component}.{item.name}" for kind in kinds for item in dataclasses.fields(kind)}
    for text in (*hints.OPTIONS.values(), *hints.PLAN.values(), *hints.COMPARE.values()):
        assert set(text.split("`")[1::2]) <= known, text


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (compare, ["--sweep", "results/grid"], "--sweep: removed; give the runs' directories"),
        (submit, ["job.toml", "--resume", "results/grid"], "--resume: removed; submit each remaining run"),
        (plan, ["results/run", "--group-size=4"], "--group-size: removed; choose --group-size"),
    ],
)
def test_an_option_that_is_gone_is_refused_by_its_command(command: Callable[[list[str]], int], words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown option {said}"):
        command(words)


@pytest.mark.parametrize(
    ("component", "name", "said"),
    [
        ("optimizer", "AdamW", "; did you mean 'adamw'?"),
        ("optimizer", "LAMB", "; did you mean 'lamb'?"),
        ("optimizer", "lion", ": it is not here; expected one of"),
        ("optimizer", "NAdam", ": it is not here; expected one of"),
        ("optimizer", "SGD", "; did you mean 'sgd'?"),
        ("optimizer", "Adam", "; did you mean 'adam'?"),
        ("optimizer", "sgdd", "; did you mean 'sgd'?"),
        ("protocol", "BSP", ": use hardsync; expected one of"),
        ("protocol", "DiLoCo", ": use local_steps with another protocol; expected one of"),
        ("protocol", "ddp", ": use allreduce; expected one of"),
        ("data", "cifar100", ": bring your own: .* expected one of"),
        ("model", "resnet18", ": bring your own: package.module:factory"),
        ("schedule", "cosine", ": use CosineAnnealingLR, of torch; expected one of: ConstantLR"),
        ("schedule", "one_cycle", ": use OneCycleLR, of torch; expected one of"),
        ("schedule", "ReduceLROnPlateau", ": shards see no metric, and wait for no metric; expected one of"),
        ("schedule", "LambdaLR", ": bring your own function: package.module:function; expected one of"),
        ("schedule", "cosineannealinglr", "; did you mean 'CosineAnnealingLR'?"),
        ("schedule", "CosineAnealingLR", "; did you mean 'CosineAnnealingLR'?"),
    ],
)
def test_another_algorithm_is_no_misspelling(component: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{component} = '{name}' is unknown{said}".replace("?", r"\?")):
        make_options(component, name)


def test_without_the_table_nadam_would_be_called_adam() -> None:
    assert difflib.get_close_matches("nadam", KINDS["optimizer"], n=1, cutoff=0.6) == ["adam"]


@pytest.mark.parametrize(
    ("word", "mend"), [("--ntasks", "--learners"), ("--gpus", "--gpus-per-node"), ("--walltime", "--time"), ("--out", "job.toml")]
)
def test_submit_has_its_own(word: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option {word}: .*{mend}"):
        submit(["job.toml", word, "4"])
