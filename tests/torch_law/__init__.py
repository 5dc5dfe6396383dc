"""Torch's own loop is the law: idioms of ordinary PyTorch, each run by a plain loop and by mpisgd, and compared to the bit."""

from tests.torch_law import data, habits, losses, modules, optimizers, outputs

ZOO = {**modules.ZOO, **habits.ZOO, **outputs.ZOO, **losses.ZOO, **optimizers.ZOO, **data.ZOO}
