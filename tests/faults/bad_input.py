"""Every bad input in one table: the command, the last line of what it says, its exit status, its seconds.

`python -m tests.faults.bad_input` runs all of them and writes `results/faults/bad_input.md`; `test_bad_input.py` runs those that
need no ranks, and compares. Those that do are the cases of `tests/mpi/test_failures.py`, which says what each of them must name,
and runs that cannot be continued.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.faults.bad_case import METRIC, STEP, Case, job, one_line, own_data, own_step
from tests.forge import unsealed

TABLE = Path(__file__).parents[2] / "results" / "faults" / "bad_input.md"


_TOO_MANY = '[protocol]\nname = "softsync"\nn = 3'
_RATE = 'def rate(epochs):\n    raise ValueError("no rate")\n'
_ENVIRONMENT = "shards = 1\n[environment]\nlearners = 2\n"

#: Refused by the first process alone, before torch and MPI are imported, or by commands that need no ranks.
CASES = (
    Case("", ("usage: mpisgd COMMAND",)),
    Case("trian", ("'trian'", "did you mean 'train'")),
    # Options: their names, their types, their bounds.
    Case("train --epoch 3", ("--epoch", "--epochs")),
    Case("train --mu many", ("--mu", "many", "int")),
    Case("train --mu", ("--mu",)),
    Case("train --mu 0", ("mu = 0", ">= 1")),
    Case("train --alpha0 -0.1", ("alpha0 = -0.1", ">= 0")),
    Case("train --alpha0 nan", ("alpha0 = nan",)),
    Case("train --epochs 0", ("epochs = 0", "above 0")),
    Case("train --seed -1", ("seed = -1", ">= 0")),
    Case("train --threads -1", ("threads = -1", ">= 0")),
    Case("train --shards 0", ("shards = 0", ">= 1")),
    Case("train --averaging 1.5", ("averaging = 1.5",)),
    Case("train --clip-norm -1", ("clip_norm = -1",)),
    Case("train --nonfinite ignore", ("--nonfinite", "ignore", "stop", "drop", "continue")),
    Case("train --device tpu", ("--device", "tpu", "cpu", "cuda")),
    Case("train --protocol sofsync", ("'sofsync'", "did you mean 'softsync'")),
    Case("train --protocol hardsync --protocol.n 3", ("--protocol.n", "belongs to --protocol softsync")),
    Case("train --protocol softsync --protocol.n 0", ("protocol.n = 0", ">= 1")),
    Case("train --protocol ssp --protocol.slack -1", ("protocol.slack = -1", ">= 0")),
    Case("train --optimizer sgdd", ("'sgdd'", "did you mean 'sgd'")),
    Case("train --optimizer.momentum 1.5", ("optimizer.momentum = 1.5",)),
    Case("train --optimizer adamw --optimizer.beta2 1", ("optimizer.beta2 = 1.0", "below 1")),
    Case("train --optimizer adamw --optimizer.weight-decay -1", ("optimizer.weight_decay = -1.0", ">= 0")),
    Case("train --optimizer lars --optimizer.trust 0", ("optimizer.trust = 0.0", "above 0")),
    Case("train --optimizer lamb --optimizer.beta1 1", ("optimizer.beta1 = 1.0", "below 1")),
    Case("simulate --local-steps 2 --inner-optimizer.beta1 2", ("inner_optimizer.beta1 = 2", "below 1")),
    Case("train --optimizer lamb --local-steps 4", ("optimizer = Lamb", "another", "local_steps > 0", "inner_optimizer")),
    Case("train --clip-average -1", ("clip_average = -1.0", ">= 0")),
    Case(
        "train --clip-average 1 --shards 2 --protocol async",
        ("clip_average_of = 'model'", "'slice'", "protocol async", "allowed with hardsync, allreduce"),
    ),
    Case("train --modulate rate", ("modulate = 'rate'", "'gradient'", "hardsync", "allowed with softsync")),
    Case("train --protocol async --modulate rate", ("modulate = 'rate'", "protocol.modulation = 'none'", "inverse")),
    Case("train --groups.weight-decay *.bias -1", ("groups.weight_decay['*.bias'] = -1.0", ">= 0")),
    Case(
        "simulate --groups.rate head.* 10", ("groups.rate['head.*'] = 10.0", "matches none of 1.weight, 1.bias, 3.weight, 3.bias")
    ),
    Case("train --schedule CosineAnealingLR", ("'CosineAnealingLR'", "did you mean 'CosineAnnealingLR'")),
    Case("simulate --schedule StepLR", ("StepLR refuses these arguments", "step_size")),
    Case("simulate --schedule failing:rate", ("schedule.factory = 'failing:rate'", "ValueError: no rate"), {"failing.py": _RATE}),
    Case("train --model lenet", ("'lenet'",)),
    Case("train --data imagenet", ("'imagenet'",)),
    Case("train --straggler.delay gauss", ("--straggler.delay", "gauss")),
    Case("train --straggler.delay-mean-s -1", ("straggler.delay_mean_s = -1",)),
    Case("train --checkpoint.every-updates -1", ("checkpoint.every_updates = -1", ">= 0")),
    Case("train --checkpoint.keep 0", ("checkpoint.keep = 0", ">= 1")),
    Case("train --log.flush-rows 0", ("log.flush_rows = 0", ">= 1")),
    Case("train --evaluation.every-epochs -1", ("evaluation.every_epochs = -1",)),
    # Files of configuration.
    Case("train nowhere.toml", ("nowhere.toml",)),
    Case("train folder.toml", ("folder.toml",), {"folder.toml/": ""}),
    job("mu = ", "is not TOML"),
    job("epoch = 3", "did you mean 'epochs'"),
    job('mu = "16"', "mu = '16'", "int"),
    job("mu = 0", "mu = 0", ">= 1"),
    job('[protocol]\nname = "softsync"\nm = 3', "protocol.m"),
    job('[protocol]\nname = "sofsync"', "'sofsync'"),
    job("[protokoll]\nn = 1", "protokoll"),
    job("protocol = 3", "protocol = 3"),
    # Runs that are to be continued, read, compared, replayed.
    Case("train --resume", ("--resume", "the directory of a run")),
    Case("train --resume nowhere", ("nowhere", "config.toml")),
    Case("train --resume run", ("config.toml", "is not TOML"), {"run/config.toml": "mu = "}),
    Case("report nowhere", ("nowhere", "config.toml")),
    Case("report run", ("run/config.toml", "is damaged"), {"run/config.toml": "mu = "}),
    Case("report run", ("run/config.toml", "[environment]"), {"run/config.toml": "mu = 4\n"}),
    Case("report run", ("run",), {"run/config.toml": _ENVIRONMENT}),
    Case("report run", ("shard-000.attempt-0.h5",), {"run/config.toml": _ENVIRONMENT, "run/shard-000.attempt-0.h5": "foreign"}),
    Case("compare nowhere elsewhere", ("nowhere", "config.toml")),
    Case("timeline nowhere", ("nowhere", "config.toml")),
    Case("replay nowhere", ("nowhere", "config.toml")),
    Case("plan nowhere", ("nowhere", "config.toml")),
    # Virtual jobs.
    Case("simulate --virtual.learners 0", ("virtual.learners = 0", ">= 1")),
    Case("simulate --virtual.learner 4", ("--virtual.learner", "--virtual.learners")),
    Case("simulate --compute lognormall", ("'lognormall'", "did you mean 'lognormal'")),
    Case("simulate --compute.mean-s -1", ("compute.mean_s = -1",)),
    Case("simulate --network.bandwidth 0", ("network.bandwidth = 0",)),
    Case("simulate --virtual.learners 2 --protocol softsync --protocol.n 3", ("protocol.n = 3", "lambda = 2")),
    Case("simulate --virtual.learners 2 --protocol backup --protocol.N 3", ("protocol.N = 3", "lambda = 2")),
    Case("simulate --protocol allreduce --aggregation node", ("aggregation = 'node'", "expected 'none'", "share memory")),
    Case("simulate --protocol softsync --aggregation node", ("aggregation = 'node'", "softsync", "hardsync")),
    Case("simulate --exchange duplex", ("--exchange", "removed", "--ahead")),
    Case("simulate --ahead 3", ("--ahead", "('0', '1', '2')")),
    Case("simulate --protocol async --ahead 1 --per-layer", ("ahead = 1", "beside per_layer")),
    Case("simulate --push-format topk --topk-share 0", ("topk_share = 0", "above 0, at most 1")),
    Case("simulate --topk-share 0.1", ("topk_share = 0.1", "other than 'topk'")),
    Case("simulate --pull-format int8", ("pull-format", "bfloat16")),
    Case("simulate --shard-device cuda", ("shard_device = 'cuda'", "'cpu' beside a virtual cluster")),
    Case("simulate --virtual.learners 2", ("results/run' exists", "--overwrite"), {"results/run/": ""}),
    Case("simulate --virtual.learners 2 --overwrite", ("is no run directory",), {"results/run/thesis.tex": "years of work"}),
    Case("simulate --virtual.learners 2 --out file/run", ("file/run", "cannot be made"), {"file": "mine"}),
    # Own steps, on a batch of the data set.
    Case("train --step mine:step --loss mse_loss", ("step = 'mine:step'", "expected ''", "beside a loss")),
    own_step("unnamed", "", "no attribute 'step'"),
    own_step("number", "def step(model, batch):\n    return 0.5\n", "step: returned float 0.5", "a scalar tensor"),
    own_step("vector", "def step(model, batch):\n    return model(batch[0])\n", "step: expected a scalar, got shape (16, 10)"),
    own_step("mapping", "def step(model, batch):\n    return {'accuracy': 1.0}\n", "mapping of 'accuracy'", "under 'loss'"),
    own_step("detached", f"{STEP}.detach()\n", "does not depend on the model's weights"),
    own_step("raising", "def step(model, batch):\n    return batch['labels']\n", "the step fails at the first mini-batch", ".py:2"),
    own_step("text", f"{METRIC}'much'}}\n", "metric 'share' is str 'much', expected a number"),
    own_step("dividing", f"{METRIC}1 / 0}}\n", "the step fails at the first mini-batch", "ZeroDivisionError"),
    own_step("column", f"{METRIC}0.5, 'epochs': 1}}\n", "its metric 'epochs' has the name of a column of the log"),
    # Models that are cut into stages.
    Case("simulate --group-size 3 --shards 2", ("shards = 2", "at least group_size = 3", "one for each stage")),
    Case("simulate --group-size 4 --shards 4", ("group_size = 4", "possible stages of the model, 2")),
    Case("simulate --micro-batches 3", ("micro_batches = 3", "a divisor of mu = 16")),
    # Data of which no batch can be made, and DataLoaders that say what is not theirs to say.
    own_data("things", "Samples()", "sample 0 cannot be put into a batch", "or a DataLoader with a collate_fn"),
    own_data("batch_size", "DataLoader(Pairs(), batch_size=4)", "batch_size = 4, but mu = 16"),
    own_data("sampler", "DataLoader(Pairs(), sampler=[0, 1])", "a sampler of your own, or none (list)"),
    own_data("stream", "DataLoader(Stream())", "found a stream, Stream", "sampling = 'stream'"),
    own_data("fork", "DataLoader(Pairs(), num_workers=1, multiprocessing_context='fork')", "forks workers"),
    own_data("collate", "DataLoader(Samples(), collate_fn=lambda samples: Samples())", "train: batch is a Samples, expected"),
    # Batch jobs.
    Case("submit --dry-run", ("PATH", "configuration")),
    Case("submit nowhere.toml --dry-run", ("nowhere.toml",)),
    Case("submit job.toml --system slurmm --dry-run", ("--system", "slurmm")),
    Case("submit job.toml --nodes 0 --dry-run", ("nodes", "0"), {"job.toml": ""}),
    Case("submit job.toml --learners 2 --time tomorrow --dry-run", ("tomorrow",), {"job.toml": ""}),
    Case("submit job.toml --nodes 1 --tasks-per-node 1 --dry-run", ("tasks_per_node = 1", "at least 2"), {"job.toml": ""}),
    Case("submit job.toml --learners 2 --dry-run", ("protocol.n = 3", "lambda = 2"), {"job.toml": _TOO_MANY}),
    # The rest.
    Case("bench wires", ("'wires'", "did you mean 'wire'")),
    Case("bench wire --sizes many", ("--sizes", "many")),
    Case("bench wire --optimizers sdg", ("optimizers = 'sdg'", "did you mean 'sgd'")),
    Case("bench train --ways hardsink", ("ways = 'hardsink'", "hardsync")),
    Case("bench virtual --repetitions 0", ("repetitions = 0", ">= 1")),
    Case("doctor --directory", ("--directory", "--dir")),
)


def message(text: str, directory: Path) -> str:
    """The last line, or the last error, if it has several; of what stands in a frame, all but the way to the help.

    Places, names of machines and seconds are left out.
    """
    for place in (directory.resolve(), directory):
        text = text.replace(f"{place}/", "").replace(str(place), ".")
    text = text.replace(socket.gethostname(), "HOST")
    text = re.sub(r"process \d+", "process PID", re.sub(r"since [\d:T+-]+", "since WHEN", text))
    if "For full helptext" in text:  # drawn by a library, in the characters that the terminal has
        lines = [line.strip("╭╮╰╯│─| ") for line in text.partition("For full helptext")[0].splitlines()]
        _title, *inside = [line for line in lines if line.strip("-")]
        return re.sub(r" ?\(default: [^)]*\)", "", one_line(" ".join(inside)))
    lines = [line for line in text.splitlines() if line.strip()]
    begins = max((at for at, line in enumerate(lines) if re.match(r"mpisgd \w+: .*Error: ", line)), default=len(lines) - 1)
    return one_line(" ".join(lines[begins:]))


def said_here(case: Case, directory: Path) -> tuple[int, str]:
    """Status and text of a case, run in this process, in this directory."""
    from mpisgd.__main__ import main

    case.prepare(directory)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(case.words)
    return status, out.getvalue() + err.getvalue()


def rows_alone() -> list[tuple[str, str, int, float]]:
    """Each case in a process of its own: as told, last line, status, seconds."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            case.prepare(directory)
            start_s = time.monotonic()
            command = [sys.executable, "-m", "mpisgd", *case.words]
            env = {**os.environ, "COLUMNS": "200"}
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, env=env, timeout=120)
            seconds = time.monotonic() - start_s
            rows.append((case.told, message(done.stdout + done.stderr, directory), done.returncode, seconds))
    return rows


# ------------------------------------------------------------------------------------------------------------ with real ranks


def _stale(run: Path) -> None:
    """The lock of a job on a host that cannot be asked."""
    holder = {"host": "elsewhere", "pid": 7, "begun": "7", "job": "", "since": "2026-01-01T00:00:00+00:00"}
    (run / "LOCK").write_text(json.dumps(holder))


def _torn(run: Path) -> None:
    for path in run.glob("checkpoint/*/shard-000.h5"):
        os.truncate(path, 99)


def _other_model(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(re.sub(r"hidden = \[[^]]*\]", "hidden = [7]", unsealed(path.read_text())))


def _edited(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("mu = ", "mu = 1"))


def _spoolless(run: Path) -> None:
    for path in run.glob(".snapshots-*"):
        path.unlink()


def _alpha0(run: Path) -> None:
    """Nothing is wrong with the run; the command wants another one."""


def _bare(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")


#: What is done to a run that was interrupted, the ranks, and the words after `--resume run`.
SPOILT: dict[str, tuple[Callable[[Path], None], int, tuple[str, ...]]] = {
    "its LOCK is that of a job on another host": (_stale, 2, ()),
    "all its checkpoints are torn": (_torn, 2, ()),
    "it has no checkpoint": (_bare, 2, ()),
    "its config.toml says another model": (_other_model, 2, ()),
    "another learning rate is wanted": (_alpha0, 2, ("--alpha0", "0.7")),
    "its config.toml was edited": (_edited, 2, ()),
    "its snapshots are gone": (_spoolless, 2, ()),
}


def rows_on_ranks(top: Path) -> list[tuple[str, str, int, float]]:
    """Cases for which ranks are launched, all together; the seconds are those of the command, without the launch."""
    from tests.mpi import test_failures as failures
    from tests.mpi.conftest import execute

    base = ("train", "--epochs", "1", "--log.progress", "off", "--threads", "1", "--model", "mlp")
    execute(top, [(2, top, (*base, "--checkpoint.every-updates", "40", "--out", "base"))], ranks=2)
    (top / "base" / "DONE").unlink()
    told: list[str] = []
    commands: list[tuple[int, Path, tuple[str, ...]]] = []

    def add(what: str, ranks: int, words: tuple[str, ...], directory: str = "") -> Path:
        place = top / (directory or str(len(told)))
        place.mkdir(exist_ok=True)
        (place / "user.py").write_text(failures.USER)
        told.append(f"{ranks} ranks: {what}")
        commands.append((ranks, place, words))
        return place

    def command(words: Iterable[str]) -> str:
        return f"`mpisgd train {' '.join(words)}`"

    for name, (ranks, words, _) in failures.BAD_INPUT.items():
        add(f"{name}, {command(words)}", ranks, failures.words_of(*words))
    for name, damaged in failures.DAMAGED.items():
        failures.damage(add(f"{name} data, {command(damaged)}", 2, failures.words_of(*damaged)), name)
    for name, twice in failures.TWICE.items():
        place = add(f"{name}, {command(twice)}", 2, failures.words_of(*twice), directory="twice")
    (place / "precious").mkdir()
    for what, (spoil, ranks, more) in SPOILT.items():
        place = add(f"{command(('--resume', 'run', *more))}, and {what}", ranks, ("train", "--resume", "run", *more))
        shutil.copytree(top / "base", place / "run")
        spoil(place / "run")
    ends = execute(top, commands, ranks=5)
    rows = zip(told, commands, ends, strict=True)
    return [(what, message(end.err, place), end.status, end.seconds) for what, (_, place, _), end in rows if end.status]


# ------------------------------------------------------------------------------------------------------------------ the table

HEAD = """# Bad input, and what is said

`python -m tests.faults.bad_input` runs all of these; a test compares those of the first table with what is said now. The message is
the last line, or what stands in the frame. Seconds on two cores that were busy with other things: of the whole command in the first
table, in the second from when all ranks are up until the last of them has refused. Statuses: 2, the input is refused; 1, anything
else. Nothing is made or overwritten before all ranks agree.
"""


def table(title: str, rows: Sequence[tuple[str, str, int, float]]) -> str:
    lines = [f"## {title}", "", "| input | message | status | s |", "|---|---|---|---|"]
    lines += [f"| {what} | {said.replace('|', '&#124;')} | {status} | {seconds:.1f} |" for what, said, status, seconds in rows]
    return "\n".join(lines) + "\n"


def kept() -> dict[str, tuple[str, int]]:
    """Input -> message and status, as the table on disk has them."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {what: (said, int(status)) for what, said, status, _ in rows if status.isdigit()}


def main() -> None:
    alone = rows_alone()
    with tempfile.TemporaryDirectory() as name:
        on_ranks = rows_on_ranks(Path(name))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([HEAD, table("Without ranks", alone), table("On real ranks", on_ranks)]))


if __name__ == "__main__":
    main()
