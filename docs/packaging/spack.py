# type: ignore
# ruff: noqa: F403, F405
"""DRAFT of a recipe for Spack, its package.py: not built, and sent to nobody. The checksum is of a release that is yet to come."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpisgd(PythonPackage):
    """Parameter-server SGD over MPI for PyTorch, with the staleness of every gradient chosen, bounded, logged and replayed."""

    pypi = "mpisgd/mpisgd-0.1.0.tar.gz"
    license("Apache-2.0")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@70:", type="build")
    depends_on("py-greenlet@3.0:", type=("build", "run"))
    depends_on("py-h5py@3.11:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-tomli-w@1.0:", type=("build", "run"))
    depends_on("py-torch@2.6:", type=("build", "run"))
    depends_on("py-tyro@1.0:", type=("build", "run"))
