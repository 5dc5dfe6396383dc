"""Run idioms on real ranks, one after the other: `mpirun -n 2 python -m tests.torch_law FOLDER PROTOCOL IDIOM ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import mpisgd
from mpisgd.config import replace
from mpisgd.config.config_file import from_mapping
from tests.torch_law import ZOO

if __name__ == "__main__":
    folder, protocol, *names = sys.argv[1:]
    for number, name in enumerate(names):
        idiom = ZOO[name]
        config = replace(idiom.made(Path(folder, str(number))), protocol=from_mapping({"protocol": protocol}).protocol)
        user_objects = idiom.user_objects
        mpisgd.train(
            model=user_objects.model, data=user_objects.data, loss=user_objects.loss, step=user_objects.step, config=config
        )
