"""What somebody does who changes a run's files and wants it not to be seen at once: the checksums go."""

from __future__ import annotations

import h5py


def forge(file: h5py.File) -> None:
    """A log, opened to be changed, becomes one without checksums, as an earlier mpisgd wrote it."""
    if "sums" in file:
        del file["sums"]


def unsealed(text: str) -> str:
    """config.toml without its first line."""
    assert text.startswith("# crc32")
    return text.partition("\n")[2]
