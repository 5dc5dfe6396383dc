"""The version of mpisgd; `setup.cfg` and the package itself take it from here."""

__version__ = "0.1.0"
