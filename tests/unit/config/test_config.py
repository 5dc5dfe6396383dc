"""What a user may choose: every bound is refused with the field, the value and what was expected (DESIGN 8)."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch

from mpisgd import config
from mpisgd.base.errors import ConfigError, nearest
from mpisgd.config import (
    KINDS,
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    Config,
    ConstantOptions,
    CustomDataOptions,
    CustomModelOptions,
    EvaluationOptions,
    ExponentialOptions,
    LambOptions,
    LarsOptions,
    LinearOptions,
    LogOptions,
    MlpOptions,
    RmspropOptions,
    SgdOptions,
    SmallCnnOptions,
    StepOptions,
    StragglerOptions,
    SyntheticOptions,
    kind_of,
    make_options,
)
from mpisgd.config.config_file import from_mapping
from mpisgd.config.config_virtual import (
    ConstantComputeOptions,
    FailureOptions,
    HeavyTailComputeOptions,
    LognormalComputeOptions,
    NetworkOptions,
    NormalComputeOptions,
    ServiceOptions,
    VirtualOptions,
)
from mpisgd.data.dataset import DataSet, Split
from mpisgd.job.parts import warn_at_start
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    OwnProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)

_MODULATIONS = "none, inverse, inverse_plus_one, exponential:0.1 (or another number), or package.module:function"
#: (class, prefix, field, a value that is refused, what the message expects)
BOUNDS: list[tuple[type, str, str, Any, str]] = [
    *(
        (cls, prefix, name, least - 1, f"a finite number >= {least}")
        for cls, prefix, names in [
            (SoftsyncOptions, "protocol.", {"n": 1}),
            (BackupOptions, "protocol.", {"N": 1, "b": 0}),
            (TimeoutOptions, "protocol.", {"N": 1, "N_min": 1, "timeout_s": 0}),
            (VersionedOptions, "protocol.", {"grads_to_wait": 1, "tolerance": 0}),
            (AsyncOptions, "protocol.", {"most_staleness": 0, "warm_up": 0, "ramp": 0}),
            (DownpourOptions, "protocol.", {"n_push": 1, "n_fetch": 1, "local_alpha": 0, "warm_up": 0}),
            (SspOptions, "protocol.", {"slack": 0, "get_model_frequency": 1, "local_alpha": 0}),
            (SyntheticOptions, "data.", {"classes": 2, "samples": 1, "test_samples": 0}),
            (SgdOptions, "optimizer.", {"momentum": 0, "weight_decay": 0}),
            (AdagradOptions, "optimizer.", {"weight_decay": 0, "eps": 0}),
            (RmspropOptions, "optimizer.", {"smoothing": 0, "momentum": 0, "eps": 0, "weight_decay": 0}),
            (AdamOptions, "optimizer.", {"beta1": 0, "beta2": 0, "eps": 0, "weight_decay": 0}),
            (AdamwOptions, "optimizer.", {"beta1": 0, "beta2": 0, "eps": 0, "weight_decay": 0}),
            (LarsOptions, "optimizer.", {"momentum": 0, "weight_decay": 0, "trust": 0}),
            (LambOptions, "optimizer.", {"beta1": 0, "beta2": 0, "eps": 0, "weight_decay": 0}),
            (ConstantOptions, "schedule.", {"warmup_epochs": 0, "warmup_updates": 0, "warmup_samples": 0}),
            (StepOptions, "schedule.", {"factor": 0, "warmup_epochs": 0}),
            (ExponentialOptions, "schedule.", {"beta": 0, "every_epochs": 1e-9, "warmup_epochs": 0}),
            (LinearOptions, "schedule.", {"start_epochs": 0, "end": 0, "warmup_epochs": 0}),
            (
                StragglerOptions,
                "straggler.",
                {"delay_mean_s": 0, "delay_spread": 0, "delay_probability": 0, "pause_every": 1, "pause_s": 0, "rest_mean_s": 0},
            ),
            (EvaluationOptions, "evaluation.", {"every_epochs": 0, "batch": 1, "recalibrate_batches": 1}),
            (LogOptions, "log.", {"flush_rows": 1, "flush_s": 0, "progress_s": 0}),
            (
                VirtualOptions,
                "virtual.",
                {
                    "learners": 1, "parameters": 0, "train_samples": 1, "ranks_per_node": 1, "pause_mean_s": 0,
                    "pause_every_s": 1e-3,
                },
            ),
            (ConstantComputeOptions, "compute.", {"mean_s": 0}),
            (NormalComputeOptions, "compute.", {"mean_s": 0, "deviation_s": 0}),
            (LognormalComputeOptions, "compute.", {"mean_s": 0, "sigma": 0}),
            (
                HeavyTailComputeOptions,
                "compute.",
                {"mean_s": 0, "sigma": 0, "tail_probability": 0, "tail_scale_s": 0, "tail_index": 0.1, "tail_most_s": 0},
            ),
            (
                NetworkOptions,
                "network.",
                {"latency_s": 0, "overhead_s": 0, "bandwidth": 1, "node_bandwidth": 1, "local_bandwidth": 1},
            ),
            (ServiceOptions, "service.", {"gradient_s_per_byte": 0, "update_s_per_byte": 0, "gradient_s": 0, "update_s": 0}),
            (FailureOptions, "failures.", {"mean_s": 0, "notice_s": 0}),
            (
                Config,
                "",
                {
                    "shards": 1, "seed": 0, "epochs": 0, "mu": 1, "alpha0": 0, "averaging": 0, "clip_norm": 0, "threads": 0,
                    "compensation": 0, "compensation_memory": 0, "clip_average": 0,
                },
            ),
        ]
        for name, least in names.items()
    ),
    (MlpOptions, "model.", "hidden", (8, 0), "positive numbers of units"),
    (SmallCnnOptions, "model.", "channels", (0, 8), "positive numbers"),
    (SyntheticOptions, "data.", "shape", (3, 0), "positive sizes"),
    (RmspropOptions, "optimizer.", "smoothing", 1.0, "a number below 1"),
    (AdamOptions, "optimizer.", "beta1", 1.0, "a number below 1"),
    (AdamOptions, "optimizer.", "beta2", 1.5, "a number below 1"),
    (AdamwOptions, "optimizer.", "beta1", 1.0, "a number below 1"),
    (AdamwOptions, "optimizer.", "beta2", 1.0, "a number below 1"),
    (LarsOptions, "optimizer.", "momentum", 1.0, "a number below 1"),
    (LarsOptions, "optimizer.", "trust", 0.0, "a number above 0"),
    (LambOptions, "optimizer.", "beta1", 1.0, "a number below 1"),
    (LambOptions, "optimizer.", "beta2", 1.0, "a number below 1"),
    (StragglerOptions, "straggler.", "delay_probability", 1.01, "at most 1"),
    (ConstantComputeOptions, "compute.", "mean_s", math.inf, "a finite number >= 0"),
    (LognormalComputeOptions, "compute.", "sigma", 10.5, "at most 10"),
    (HeavyTailComputeOptions, "compute.", "sigma", 10.5, "at most 10"),
    (HeavyTailComputeOptions, "compute.", "tail_probability", 1.01, "at most 1"),
    (HeavyTailComputeOptions, "compute.", "tail_most_s", 0.25, "at least compute.tail_scale_s = 0.5"),
    (Config, "", "averaging", 1.0, "a number below 1"),
    (Config, "", "compensation_memory", 1.0, "a number below 1"),
    (Config, "", "epochs", 0.0, "a number above 0"),
    *(
        (cls, "protocol.", "modulation", "invers", f"{_MODULATIONS}; did you mean 'inverse'?")
        for cls in (SoftsyncOptions, BackupOptions, VersionedOptions, AsyncOptions, DownpourOptions, SspOptions)
    ),
    (Config, "", "out", "", "the path of a directory"),
    (Config, "", "seed", 2**64, "a number below 2^64"),
    (Config, "", "alpha0", math.nan, "a finite number >= 0"),
    (Config, "", "clip_norm", math.inf, "a finite number >= 0"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "prefix", "name", "value", "expected"), BOUNDS)
def test_every_bound(cls: type, prefix: str, name: str, value: Any, expected: str) -> None:
    message = re.escape(f"{prefix}{name} = {value!r}: expected {expected}")
    with pytest.raises(ConfigError, match=f"^{message}$"):
        cls(**{name: value})


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (BackupOptions, {"abort": True, "late": "apply"}, r"protocol\.abort = True: expected False, or late = \"drop\": a learner"),
        (TimeoutOptions, {"N": 2, "N_min": 3}, r"protocol\.N_min = 3: expected at most protocol\.N = 2"),
        (DownpourOptions, {"n_push": 2, "n_fetch": 3}, r"protocol\.n_fetch = 3: expected a multiple of protocol\.n_push = 2: a"),
        (SgdOptions, {"nesterov": True, "momentum": 0.0}, r"optimizer\.nesterov = True: expected momentum > 0 beside nesterov"),
        (StragglerOptions, {"delay": "pareto"}, r"straggler\.delay_spread = 1\.0: expected a shape above 1 for pareto"),
        (StragglerOptions, {"slowdown": {0: 2.0, 3: 0.5}}, r"straggler\.slowdown\[3\] = 0\.5: expected a factor >= 1"),
        (StragglerOptions, {"rest_deviation_s": 0.1}, r"straggler\.rest_deviation_s = 0\.1: expected 0, or straggler\.rest_mean_s"),
        (StragglerOptions, {"slowdown": {1: math.inf}}, r"straggler\.slowdown\[1\] = inf: expected a factor >= 1"),
        (VirtualOptions, {"slow_nodes": {0: 2.0, 3: -0.5}}, r"virtual\.slow_nodes\[3\] = -0\.5: expected a finite number >= 0"),
        (VirtualOptions, {"batched": True, "gradients": False}, r"virtual\.batched = True: expected virtual\.gradients = true"),
        (FailureOptions, {"at_s": {2: math.nan}}, r"failures\.at_s\[2\] = nan: expected a finite number >= 0"),
    ],
)
def test_fields_that_do_not_fit_each_other(cls: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**fields)


def test_replace_checks_again() -> None:
    assert config.replace(Config(), mu=4).mu == 4
    with pytest.raises(ConfigError, match="mu = 0"):
        config.replace(Config(), mu=0)


@pytest.mark.parametrize(("component", "kind"), [(component, kind) for component, kinds in KINDS.items() for kind in kinds])
def test_every_kind_is_found_by_its_name_and_fits_the_config(component: str, kind: str) -> None:
    options = make_options(component, kind)
    assert kind_of(options) == kind
    assert getattr(Config(**{component: options}), component) is options
    assert options.__doc__


def test_no_dataclass_stands_under_two_names() -> None:
    named = {(name, cls) for kinds in KINDS.values() for name, cls in kinds.items()}
    assert len({cls for _, cls in named}) == len(named)


def test_unknown_kinds_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="protocol = 'softsink' is unknown; did you mean 'softsync'"):
        make_options("protocol", "softsink")
    with pytest.raises(
        ConfigError,
        match="schedule = 'cosine' is unknown: use CosineAnnealingLR, of torch; expected one of: ConstantLR, Cosi",
    ):
        make_options("schedule", "cosine")
    with pytest.raises(ConfigError, match="optimizer = 'mine:make' is unknown"):
        make_options("optimizer", "mine:make")
    with pytest.raises(TypeError, match="LogOptions is no component"):
        kind_of(LogOptions())


def test_a_factory_is_a_kind_of_model_of_data_and_of_protocol() -> None:
    assert make_options("protocol", "mine:Majority") == OwnProtocolOptions(factory="mine:Majority")
    assert make_options("model", "my.models:make") == CustomModelOptions(factory="my.models:make")
    assert make_options("data", "mine:data", kwargs={"a": 1}) == CustomDataOptions(factory="mine:data", kwargs={"a": 1})


def test_defaults_of_adaptive_optimisers_are_torchs() -> None:
    """What the papers have otherwise is in jobs/: with an eps of 1.0, RMSprop stands still at its usual learning rates."""

    def torchs(optimiser: type, *names: str) -> list[Any]:
        found = inspect.signature(optimiser).parameters
        return [found[name].default for name in names]

    rmsprop, adam, adamw, adagrad = RmspropOptions(), AdamOptions(), AdamwOptions(), AdagradOptions()
    of_rmsprop = [rmsprop.smoothing, rmsprop.momentum, rmsprop.eps, rmsprop.weight_decay]
    assert of_rmsprop == torchs(torch.optim.RMSprop, "alpha", "momentum", "eps", "weight_decay")
    of_adam = [(adam.beta1, adam.beta2), adam.eps, adam.weight_decay]
    assert of_adam == torchs(torch.optim.Adam, "betas", "eps", "weight_decay")
    of_adamw = [(adamw.beta1, adamw.beta2), adamw.eps, adamw.weight_decay]
    assert of_adamw == torchs(torch.optim.AdamW, "betas", "eps", "weight_decay")
    assert [adagrad.eps, adagrad.weight_decay] == torchs(torch.optim.Adagrad, "eps", "weight_decay")


def test_defaults_are_what_the_papers_say() -> None:
    assert isinstance(Config().protocol, HardsyncOptions)
    assert Config().optimizer == SgdOptions(momentum=0.9)  # [Zhang16 4.1]
    assert SgdOptions() == SgdOptions(momentum=torch.optim.SGD([torch.ones(1)]).defaults["momentum"])
    assert (StepOptions().epochs, StepOptions().factor) == ((120.0, 130.0), 0.1)  # [Zhang16 4.1]
    assert (ExponentialOptions().beta, ExponentialOptions().every_epochs) == (0.94, 2.0)  # [Chen16 A.2]


@pytest.mark.parametrize(
    ("fields", "active"),
    [
        ({}, False),
        ({"slowdown": {0: 2.0}}, True),
        ({"delay": "normal"}, True),
        ({"pause_learner": 0}, True),
        ({"rest_mean_s": 0.1}, True),
    ],
)
def test_stragglers_are_active_when_anything_is_put_in(fields: dict[str, Any], active: bool) -> None:
    assert StragglerOptions(**fields).active is active


DECAY: dict[str, Any] = {"optimizer": {"name": "sgd", "weight_decay": 0.01}}


@pytest.mark.parametrize(
    ("job", "warned"),
    [
        ({"protocol": {"name": "softsync", "n": 30}, **DECAY}, True),
        ({"protocol": {"name": "softsync", "n": 30}, "groups": {"weight_decay": {"*.bias": 0.1}}}, True),
        ({"protocol": {"name": "async", "modulation": "inverse"}, **DECAY}, True),
        ({"protocol": {"name": "softsync", "n": 30}}, False),
        ({"protocol": {"name": "softsync", "n": 1}, **DECAY}, False),
        ({"protocol": {"name": "softsync", "n": 30, "modulation": "none"}, **DECAY}, False),
        ({"protocol": {"name": "softsync", "n": 30}, "modulate": "rate", **DECAY}, False),
        ({"protocol": {"name": "softsync", "n": 30}, "optimizer": {"name": "adamw", "weight_decay": 0.01}}, False),
        ({"protocol": "hardsync", **DECAY}, False),
        ({"protocol": "backup", **DECAY}, False),
    ],
)
def test_decay_beside_gradients_weighted_by_staleness_is_warned_of(
    job: dict[str, Any], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_at_start(from_mapping(job), DataSet("one", *[Split(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))] * 2))
    assert ("relative to the gradients, decay is" in capsys.readouterr().err) == warned


def test_nearest() -> None:
    assert nearest("mus", ["mu", "alpha0"]) == "; did you mean 'mu'?"
    assert nearest("xyz", ["mu", "alpha0"]) == "; expected one of: alpha0, mu"
