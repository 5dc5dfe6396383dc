"""The version of mpisgd; `setup.cfg` reads it, too."""

__version__ = "0.1.0"
