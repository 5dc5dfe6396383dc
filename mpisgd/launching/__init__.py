"""Ranks that are started from a process that is none: a job that is begun again where it fails, and a function.

`under_way` is one start by this machine's launcher; `job` is `mpisgd run`, `function` is `mpisgd.launch`, and `called` its ranks.
"""
