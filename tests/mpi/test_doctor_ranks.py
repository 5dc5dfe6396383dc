"""The doctor among real ranks: one report, messages that arrive, and an end even where a rank does not answer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import launch

#: Real ranks, but no torch, which would take seconds to import: {patch} runs on each rank first, rank 0 prints {show}.
PROGRAM = """\
import socket, sys, time
sys.modules["torch"] = None
from pathlib import Path
from mpisgd.site import doctor, survey
from mpisgd.comm.mpi.library import MPI
rank = MPI.COMM_WORLD.Get_rank()
{patch}
found, rank = survey.examine(Path(), timeout_s={timeout_s})
if rank == 0:
    print({show})
"""


def examine(ranks, show, patch="", timeout_s=60.0, **options):
    return launch(ranks, "-c", PROGRAM.format(patch=patch, show=show, timeout_s=timeout_s), **options)


@pytest.mark.slow
def test_ranks_give_one_report_without_a_fault(tmp_path):
    done = launch(2, "-m", "mpisgd", "doctor", cwd=tmp_path, timeout_s=120)
    assert done.status == 0, done.text
    assert "2 on 1 host: " in done.out
    assert done.out.count("every byte verified") == 1
    assert done.out.count("0 faults") == 1
    assert "the other ranks can read the growing log" in done.out
    assert "Traceback" not in done.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fault_is_every_ranks_exit_status(tmp_path):
    done = launch(2, "-m", "mpisgd", "doctor", "--dir", "nowhere", cwd=tmp_path, timeout_s=120)
    assert done.status == 1, done.text
    assert "nowhere: No such file or directory" in done.out
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_a_process_that_should_be_one_of_three_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mpisgd", "doctor"],
        env={**os.environ, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "3 times 1 rank, not 3 ranks: SLURM_STEP_NUM_TASKS = 3" in done.stdout


@pytest.mark.slow
def test_one_wrong_byte_is_found(tmp_path):
    patch = """\
pattern = survey._pattern
def spoilt(sender):
    content = pattern(sender)
    content[77] ^= sender == rank == 1
    return content
survey._pattern = spoilt
"""
    done = examine(3, "doctor.check_ring(found)", patch, cwd=tmp_path)
    assert "wrong bytes at rank 2" in done.out, done.text


@pytest.mark.slow
def test_round_trips_are_measured_to_every_rank(tmp_path):
    done = examine(4, "[0 < us < 1e6 for us in found.ring.round_trip_us], found.ring.corrupted", cwd=tmp_path)
    assert done.out == "[True, True, True] ()\n", done.text


@pytest.mark.slow
def test_every_host_is_examined_and_reads_the_files_of_the_next(tmp_path):
    patch = """\
socket.gethostname = lambda: "even" if rank % 2 == 0 else "odd"
read = survey._read_rows
survey._read_rows = lambda path: read(path) or path.name
"""
    show = "sorted(found.hosts), [facts.hdf5_read_problem for facts in found.ranks], doctor.check_ranks(found).text"
    done = examine(3, show, patch, cwd=tmp_path)
    assert done.out == "['even', 'odd'] ['odd.h5', 'even.h5', 'odd.h5'] 3 on 2 hosts: even x 2, odd x 1\n", done.text


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_doctor(tmp_path):
    patch = """\
survey._ring = survey._ring if rank != 1 else lambda comm: time.sleep(60)
deadline = survey._deadline
survey._deadline = lambda step, timeout_s: deadline(step, 2.0 if step == "the ring" else timeout_s)  # the others may be slow
"""
    done = examine(3, "'not reached'", patch, cwd=tmp_path)
    assert done.status != 0
    assert "the ring: no end after 2 s" in done.err
    assert "not reached" not in done.out


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_doctor(tmp_path):
    patch = "survey._write_rows = survey._write_rows if rank != 0 else lambda path: 1 / 0"
    done = examine(3, "'not reached'", patch, timeout_s=60.0, cwd=tmp_path)
    assert done.status != 0
    assert "rank 0 (doctor)" in done.err
    assert "ZeroDivisionError" in done.err


@pytest.mark.slow
def test_groups_are_told_of_by_ranks_that_would_be_them(tmp_path):
    groups = ("--shards", "2", "--group-size", "2", "--placement", "packed")
    done = launch(4, "-m", "mpisgd", "doctor", *groups, cwd=tmp_path, timeout_s=120)
    assert done.status == 0, done.text
    assert "rank 2, stage 0 of learner 0, core" in done.out
    assert "1 of 2 ranks, each on one node: learner 0 = rank 2-3 on " in done.out
    refused = launch(4, "-m", "mpisgd", "doctor", "--faults.mode", "tolerant", cwd=tmp_path, timeout_s=120)
    assert refused.status == 1, refused.text
    assert "mend: start ranks by mpirun --with-ft ulfm" in refused.out
