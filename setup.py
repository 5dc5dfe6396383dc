"""The compiled form of the virtual cluster, made only where MPISGD_COMPILE=1 asks for it; all else is in setup.cfg.

    make compiled                                                   in place, in the environment of the Makefile
    MPISGD_COMPILE=1 python setup.py build_ext --inplace --force    in place, in another
    pip install mypy && MPISGD_COMPILE=1 pip install --no-build-isolation .      on a cluster; all need a C compiler

mypyc translates the same files, as they are, to C; the results are the same to the last bit. Python then takes the library that
lies beside a source, even where the source was edited since: `mpisgd --version` tells, and `make interpreted` goes back.
"""

import os

from setuptools import setup

#: What every gradient of a virtual cluster passes through.
MODULES = [
    "mpisgd/serving/answering.py",
    "mpisgd/exchange/channel.py",
    "mpisgd/comm/communicator.py",
    "mpisgd/vectors/computing.py",
    "mpisgd/exchange/evaluator_channel.py",
    "mpisgd/exchange/base.py",
    "mpisgd/serving/faults.py",
    "mpisgd/serving/finiteness.py",
    "mpisgd/exchange/layerwise.py",
    "mpisgd/job/allreduce.py",
    "mpisgd/learner.py",
    "mpisgd/comm/messages.py",
    "mpisgd/rules/admission.py",
    "mpisgd/rules/modulation.py",
    "mpisgd/rules/rules.py",
    "mpisgd/rules/verdict.py",
    "mpisgd/records/shard_records.py",
    "mpisgd/records/log/writer.py",
    "mpisgd/serving/refusals.py",
    "mpisgd/shard.py",
    "mpisgd/serving/snapshot_desk.py",
    "mpisgd/gradient/straggler.py",
    "mpisgd/serving/succession.py",
    "mpisgd/exchange/team_channel.py",
    "mpisgd/exchange/tolerant_channel.py",
    "mpisgd/comm/virtual/cluster.py",
    "mpisgd/comm/virtual/network.py",
    "mpisgd/simulate/passes.py",
    "mpisgd/simulate/sized.py",
    "mpisgd/comm/virtual/wire.py",
]


def extensions() -> list:
    """The modules as extensions; one library holds them all, so that they call each other directly."""
    from mypyc.build import mypycify

    # What is imported besides is not followed: types of torch and the like would cost two minutes, and gain nothing here. So
    # mypy's own findings are not those of `make types`, whose configuration is not read.
    options = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
    found = mypycify([*options, *MODULES], opt_level="3", group_name="mpisgd.comm.virtual.compiled")
    for extension in found:  # a tenth faster: calls within the library go straight, and those to Python through one table less
        extension.extra_compile_args += ["-fno-plt", "-fno-semantic-interposition", "-fvisibility=hidden"]
    return found


setup(ext_modules=extensions() if os.environ.get("MPISGD_COMPILE") == "1" else [])
