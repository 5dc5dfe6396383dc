"""What does not go together is refused alike by every way in; the documentation's page of it is made from the same table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import simulate as simulate_cli
from mpisgd.cli import submit as submit_cli
from mpisgd.cli import train as train_cli
from mpisgd.config import Config, compatibility, config_file, replace
from mpisgd.job import placement
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.job.run.start import place
from mpisgd.liveness.ranks import Ranks
from mpisgd.protocols import PROTOCOLS, AllreduceOptions
from mpisgd.simulate.job import Job
from tests.effort import EVERYTHING, thinned

LEARNERS = 4

#: Each protocol, and what its own options change.
VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in PROTOCOLS if name != "backup"),
    {"name": "backup", "b": 0},
    {"name": "backup", "b": 0, "late": "apply"},
    {"name": "backup", "b": 0, "abort": True},
    {"name": "versioned", "tolerance": 1},
    {"name": "downpour", "n_push": 2},
    {"name": "downpour", "n_fetch": 2},
    {"name": "ssp", "get_model_frequency": 2},
]
CHOICES: dict[str, tuple[Any, ...]] = {
    "per_layer": (False, True),
    "push_format": ("float32", "bfloat16", "topk"),
    "pull_format": ("float32", "bfloat16"),
    "compensation": (0.0, 0.5),
    "aggregation": ("none", "node"),
    "team_size": (0, 2),
    "local_steps": (0, 2),
    "shard_device": ("cpu", "cuda"),
}


def configurations() -> Iterator[dict[str, Any]]:
    for variant, *values in itertools.product(VARIANTS, *CHOICES.values()):
        yield {"protocol": variant, **dict(zip(CHOICES, values, strict=True))}


def config_of(table: dict[str, Any], **more: Any) -> Config:
    return config_file.from_mapping({**table, **more})


def refusal(action: Any) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def refused_by_train(config: Config) -> str:
    """By a rank of `LEARNERS` learners on one host, before anything is loaded."""
    ranks = LEARNERS + (0 if config_file.to_mapping(config)["protocol"]["name"] == "allreduce" else config.shards)
    world = Ranks(size=ranks, rank=0, hosts=("a",) * ranks, cores=1, own_cores=1, pids=(0,) * ranks)
    return refusal(lambda: place(config, world))


@pytest.mark.deeper
def test_all_ways_in_refuse_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 5,760 configurations, or each 69th; the command lines that print, whose reading is slow, are asked for few of them."""
    path, counts = tmp_path / "job.toml", [0, 0]
    for number, table in enumerate(thinned(configurations(), 69)):
        config = config_of(table)
        said = refusal(lambda config=config: compatibility.check(config))
        counts[bool(said)] += 1
        assert refused_by_train(config) == said
        if number % (47 if EVERYTHING else 17):
            continue
        path.write_text(config_file.dumps(config))
        assert refusal(lambda: train_cli.main([str(path), "--print-config"])) == said
        gpus = ["--gpus-per-node", str(LEARNERS)] if config.shard_device == "cuda" else []
        started = config_of(table, device="cuda") if gpus else config
        words = [str(path), "--learners", str(LEARNERS), "--nodes", "1", "--dry-run", *gpus]
        assert refusal(lambda words=words: submit_cli.main(words)) == refusal(lambda started=started: compatibility.check(started))
        virtual = config_of(table, virtual={"learners": LEARNERS, "ranks_per_node": LEARNERS + 1})
        path.write_text(config_file.dumps(virtual))
        said = refusal(lambda virtual=virtual: compatibility.check(virtual, virtual=True))
        assert refusal(lambda: simulate_cli.main([str(path), "--print-config"])) == said
        assert refusal(lambda virtual=virtual: placement.on_virtual_ranks(virtual)) == said
        if said:
            assert refusal(lambda virtual=virtual: Job(virtual, NO_OBJECTS)) == said
    assert min(counts) > sum(counts) / 38, "some of both kinds"
    capsys.readouterr()


def test_print_config_and_dry_run_refuse_what_train_does(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('per_layer = true\nsampling = "dealt"\naggregation = "node"\n')
    for action in (
        lambda: train_cli.main([str(path), "--print-config"]),
        lambda: submit_cli.main([str(path), "--learners", "4", "--dry-run"]),
        lambda: simulate_cli.main([str(path), "--print-config"]),
    ):
        said = refusal(action)
        assert len(said.splitlines()) == 3
        assert "aggregation = 'node': expected 'none' beside per_layer" in said
        assert "sampling = 'dealt': expected 'epoch' beside aggregation = 'node'" in said
    path.write_text('compensation = 0.5\nprotocol = "hardsync"\n')
    said = refusal(lambda: train_cli.main([str(path), "--print-config"]))
    assert said.startswith("compensation = 0.5: expected 0 beside protocol hardsync (applies no stale gradients): ")
    assert said.endswith("; allowed with softsync, async, downpour, ssp")


def test_submit_asks_for_what_its_script_will_say(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("group_size = 2\n")
    said = refusal(lambda: submit_cli.main([str(path), "--gpus-per-node", "4", "--dry-run"]))
    assert "device = 'cuda': expected 'cpu' beside group_size" in said, "which the script would say"
    path.write_text('[faults]\nmode = "tolerant"\n')
    assert "--fault-tolerant" in refusal(lambda: submit_cli.main([str(path), "--learners", "4", "--dry-run"]))
    assert refusal(lambda: submit_cli.main([str(path), "--learners", "4", "--dry-run", "--fault-tolerant"])) == ""
    path.write_text("[straggler]\nslowdown = {4 = 2.0}\n")
    assert "there is no learner 4" in refusal(lambda: submit_cli.main([str(path), "--learners", "4", "--dry-run"]))


def test_a_run_that_goes_on_is_printed_only_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config_file.dumps(Config()))
    assert "alpha0 = 0.7" in refusal(lambda: train_cli.main(["--resume", str(tmp_path), "--alpha0", "0.7", "--print-config"]))
    assert refusal(lambda: train_cli.main(["--resume", str(tmp_path), "--epochs", "20", "--print-config"])) == ""


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compensation_goes_with_protocols_that_apply_stale_gradients(variant: dict[str, Any]) -> None:
    config = config_of({"protocol": variant, "compensation": 0.5})
    assert bool(compatibility.refused(config)) == config.protocol.make(LEARNERS).fresh


#: Tables that have, between them, each pair of what does not go together.
PAIRS: list[dict[str, Any]] = [
    {"protocol": "async", "virtual": {"forward_s": {"1": 1.0}, "backward_s": {"1": 1.0}}},
    {"protocol": {"name": "sandblaster", "push_every": 2, "order": "portions"}, "per_layer": True, "group_size": 2,
     "checkpoint": {"partner_updates": 5}, "step": "mine:step", "micro_batches": 2, "virtual": {"batched": True}},
    {"protocol": {"name": "sandblaster", "push_every": 2, "order": "portions"}, "shard_device": "cuda",
     "group_form": "partition", "stages": {"at": ["1"], "balance": "seconds"}, "pipeline": "1f1b", "push_format": "topk"},
    {"protocol": "allreduce", "aggregation": "node", "sampling": "dealt", "group_size": 2},
    {"protocol": "sandblaster", "local_steps": 2, "clip_average": 1.0, "shards": 2, "group_size": 2},
    {"protocol": "allreduce", "compensation": 0.5, "ahead": 1, "pull_format": "bfloat16"},
    {"protocol": "sandblaster", "aggregation": "node", "sampling": "dealt", "nonfinite": "drop", "per_layer": True},
    {"protocol": "allreduce", "local_steps": 2, "faults": {"mode": "tolerant"}},
    {"protocol": "sandblaster", "team_size": 2, "checkpoint": {"every_updates": 1}, "optimizer": "adam", "schedule": "linear",
     "alpha0": 0.1, "epochs": 1.0},
    {"protocol": "sandblaster", "per_layer": True, "group_size": 2, "device": "cuda"},
    {"protocol": "sandblaster", "shard_device": "cuda"},
    {"protocol": "ssp", "aggregation": "node", "faults": {"mode": "tolerant"}},
    {"protocol": "sandblaster", "push_format": "bfloat16", "autocast": "float16", "group_size": 2, "micro_batches": 2},
    {"protocol": {"name": "downpour", "n_fetch": 2}, "local_steps": 2, "sampling": "dealt", "nonfinite": "drop",
     "per_layer": True},
    {"protocol": "sandblaster", "compensation": 0.5, "averaging": 0.9, "clip_norm": 1.0, "clip_average": 1.0,
     "linear_scaling": True, "nonfinite": "drop", "sampling": "replacement"},
    {"protocol": "sandblaster", "pull_format": "bfloat16", "inner_optimizer": "sgd", "inner_alpha0": 0.1},
    {"protocol": "allreduce", "local_steps": 2, "group_size": 2, "group_form": "partition", "failures": {"mean_s": 1.0}},
    {"protocol": {"name": "downpour", "n_push": 2}, "local_steps": 2, "sampling": "dealt", "aggregation": "node",
     "ahead": 1},
    {"protocol": {"name": "ssp", "get_model_frequency": 2}, "local_steps": 2, "clip_average": 1.0, "shards": 2,
     "faults": {"mode": "tolerant"}},
    {"protocol": {"name": "downpour", "n_push": 2}, "per_layer": True, "modulate": "rate"},
    {"protocol": {"name": "backup", "b": 0, "abort": True}, "local_steps": 2, "modulate": "rate"},
    {"protocol": "ssp", "compensation": 0.5, "push_format": "topk"},
    {"protocol": {"name": "backup", "b": 0, "abort": True}, "per_layer": True, "topk_share": 0.1},
    {"protocol": "allreduce", "local_steps": 2, "evaluation": {"best": "loss", "patience": 1}},
    {"protocol": {"name": "ssp", "get_model_frequency": 2}, "per_layer": True, "epoch_samples": 9},
    {"protocol": "sandblaster", "compensation": 0.5, "accumulation": 2, "virtual": {"batched": True}},
    {"protocol": "sandblaster", "team_size": 2, "evaluation": {"best": "loss"}, "virtual": {"gradients": False}},
    {"protocol": "allreduce", "aggregation": "node", "group_size": 2, "ahead": 1, "push_format": "topk",
     "micro_batches": 2},
    {"protocol": "ssp", "local_steps": 2, "optimizer": "lars"},
    {"protocol": "ssp", "ahead": 2, "device": "cuda"},
    {"protocol": "ssp", "aggregation": "node", "failures": {"mean_s": 1.0}},
    {"protocol": "ssp", "ahead": 1, "faults": {"mode": "tolerant"}},
    {"protocol": "allreduce", "per_layer": True},
    {"protocol": "async", "per_layer": True, "ahead": 1},
    {"protocol": "hardsync", "aggregation": "node", "group_size": 2},
    {"protocol": "async", "local_steps": 2, "step": "mine:step", "loss": "mse_loss"},
    {"protocol": "ssp", "team_size": 2, "autocast": "bfloat16", "virtual": {"batched": True}},
    {"protocol": "ssp", "shard_device": "cuda", "ahead": 1, "pull_format": "bfloat16"},
    {"protocol": "sandblaster", "local_steps": 2, "evaluation": {"best": "loss", "patience": 1}},
    {"protocol": "allreduce", "aggregation": "node", "ahead": 1, "pull_format": "bfloat16"},
    {"protocol": "ssp", "team_size": 2, "group_size": 2, "faults": {"mode": "tolerant"}, "accumulation": 2},
    {"protocol": "async", "team_size": 2, "group_size": 2, "virtual": {"gradients": False, "parameters": 100}},
    {"protocol": "sandblaster", "team_size": 2, "groups": {"rate": {"*": 2.0}}, "virtual": {"gradients": False}},
    {"protocol": "allreduce", "push_format": "bfloat16", "sampling": "dealt", "aggregation": "node", "ahead": 1},
    {"protocol": {"name": "backup", "b": 0, "abort": True}, "push_format": "bfloat16", "group_form": "partition",
     "nonfinite": "drop", "clip_norm": 1.0},
    {"optimizer": "adagrad", "schedule": "OneCycleLR", "local_steps": 2},
]  # fmt: skip


def test_every_pair_can_come_up() -> None:
    """No line of the table is dead, and each names a field that can be changed."""
    known = {**compatibility.FEATURES, **compatibility.REAL, **compatibility.VIRTUAL}
    assert all(known[one].field and known[one].expected for one, _ in compatibility.REFUSED)
    seen = set[tuple[str, str]]()
    shared = replace(Config(), protocol=AllreduceOptions(), aggregation="node")  # which a file's reader drops (`older.py`)
    for config, virtual in itertools.product([shared, *map(config_of, PAIRS)], (False, True)):
        refused = compatibility.refused(config, virtual=virtual)
        seen.update(refused)
        if refused:
            with pytest.raises(ConfigError) as caught:
                compatibility.check(config, virtual=virtual)
            assert len(str(caught.value).splitlines()) == len(refused)
    assert seen == set(compatibility.REFUSED)
