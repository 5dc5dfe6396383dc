"""Planted faults: which of them does a suite of tests find? `python -m tests.planted --help`."""
