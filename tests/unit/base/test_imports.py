"""What is imported, and when: nothing heavy before it is needed, and nothing of it changes what is outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What imports, one after the other, and what must not have been imported by then, by whatever detour.
CHEAP = {
    "mpisgd.protocols": {"torch", "mpi4py", "matplotlib", "h5py"},
    "mpisgd, mpisgd.cli.submit": {"torch", "mpi4py", "matplotlib", "h5py"},
    "mpisgd.cli.options": {"torch", "mpi4py", "matplotlib"},
    "mpisgd.report.single, mpisgd.report.compare": {"torch", "mpi4py", "matplotlib"},
}


def test_importing_costs_nothing_heavy() -> None:
    """What a misspelt option, a submission or a report would wait seconds for."""
    code = "import sys\n" + "".join(f"import {what}\nprint(*sys.modules)\n" for what in CHEAP)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    for (what, heavy), loaded in zip(CHEAP.items(), told.splitlines(), strict=True):
        assert heavy.isdisjoint(loaded.split()), what


#: All optimisers and a scheduler of torch at work on a shard's slice.
AT_WORK = """
import logging, sys, torch
import mpisgd, mpisgd.job.run
print(logging.getLogger("mpisgd").handlers + logging.getLogger().handlers)
from mpisgd.config import AdagradOptions, AdamOptions, AdamwOptions, LambOptions, LarsOptions, RmspropOptions, SgdOptions
from mpisgd.config import TorchScheduleOptions
from mpisgd.update import schedule
from mpisgd.update.slice_update import SliceUpdate
schedule.make(TorchScheduleOptions(), 1.0, 0.1)(0.5)
for options in (AdagradOptions(), AdamOptions(), AdamwOptions(), RmspropOptions(), SgdOptions(), LarsOptions(), LambOptions()):
    update = SliceUpdate(torch.zeros(9), options, learning_rate=0.1, schedule=lambda epochs: 1.0, train_samples=8)
    update.accumulate(update.bodies.take(), 1.0, 4, 0)
    update.step()
print("torch._dynamo" in sys.modules)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_shard_runs_without_torchs_compiler_and_its_import_configures_nothing() -> None:
    """The compiler would take as long to import as torch; a user's own torch.compile still finds it."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", AT_WORK], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["[]", "False", "True"]
