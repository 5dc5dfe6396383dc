"""Damage to a run's files while nobody runs, and what it may come to (`tests/faults/flips.py` has more of the first).

What must hold of a run whose files were damaged after an attempt:

    goes on       from the newest checkpoint that says what it said before, every number and every bit of its tensors: none that is
                  whole is passed over, and of each damaged one that is, it is told which file
    is refused    by a CheckpointError or DataError that names a damaged file: one of a checkpoint, where none is whole; of a log or
                  snapshots that come before the checkpoint; an attempt may end so, too. Then it is begun anew
    harmless      what nobody reads any more: an account beside its manifest, rows after the checkpoint
    DONE          books and replay are as of any other run, unless reading it names a damaged file
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpisgd.base.errors import CheckpointError, DataError
from mpisgd.job.resume import Resumption
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.rank_file import FILE
from tests.virtual.storm.draw import Damage


@dataclass
class Files:
    """A run's files, and which were damaged."""

    run: Path
    spoilt: dict[Path, bytes | None] = field(default_factory=dict)
    """What a file has had since; None: nothing."""
    said: dict[Path, Any] = field(default_factory=dict)
    """What each checkpoint that was whole said, before the last damages."""

    def anew(self) -> Files:
        """Those of a run that begins in its place."""
        return Files(self.run.with_name(f"run-{int(self.run.name.removeprefix('run-')) + 1}"))

    def damage(self, damages: list[Damage]) -> None:
        self.said = {path: found for path in disk.directories(self.run) if (found := content(path)) is not None}
        before = self._read()
        for damage in damages:
            self._befalls(damage, random.Random(damage.seed))
        after = self._read()
        self.spoilt = {path: told for path, told in self.spoilt.items() if after.get(path) == told}  # others were written again
        self.spoilt |= {path: after.get(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}

    def named(self, text: str) -> bool:
        """Whether a damaged file is. Of a checkpoint, its manifest may tell of another."""
        for path in self.spoilt:
            own = path.name in text
            if own if path.parent == self.run else path.parent.name in text and (own or disk.MANIFEST in text):
                return True
        return False

    def expected(self) -> Path | None:
        """The newest checkpoint that says what it did."""
        return next((path for path in disk.directories(self.run) if path in self.said and content(path) == self.said[path]), None)

    def wrong(self, found: Resumption | CheckpointError | DataError) -> str:
        """What is not as promised of how the run goes on, or is refused; "" = all is."""
        expected = self.expected()
        if not isinstance(found, Resumption):
            if not self.named(str(found)):
                return f"refused, and none of {self._names()} is named: {found}"
            return "refused, with a checkpoint that is whole" if isinstance(found, CheckpointError) and expected else ""
        path = found.checkpoint.path
        if path != expected:
            return f"goes on from {path.name}, expected {expected and expected.name} of {self._names()}"
        for newer in self.said:
            told = [note for note in found.notes if note.startswith(f"{newer.name} is passed over")]
            if newer.name > path.name and not (told and self.named(told[0])):
                return f"{newer.name} is passed over: {told}, {self._names()}"
        return ""

    def _names(self) -> list[str]:
        return sorted(str(path.relative_to(self.run)) for path in self.spoilt)

    def _read(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self._of("checkpoint") + self._of("log") + self._of("snapshots")}

    def _of(self, kind: str) -> list[Path]:
        """The newest checkpoint first."""
        if kind == "checkpoint":
            found = [path for each in disk.directories(self.run) for path in sorted(each.iterdir())]
        else:
            found = sorted(self.run.iterdir())
            found = [path for path in found if (FILE.match(path.name) if kind == "log" else path.name.startswith(schema.SPOOL))]
        return [path for path in found if path.is_file() and path.parent.name[:1] + path.name[:1] != ".."]

    def _read_first(self, paths: list[Path]) -> list[Path]:
        """Those of the newest checkpoint that a run would go on from, but what nobody reads again; or all."""
        newest = next((path.parent for path in paths if path.name == disk.MANIFEST), None)
        return [path for path in paths if path.parent == newest and (path.suffix == ".h5" or path.name == disk.MANIFEST)] or paths

    def _befalls(self, damage: Damage, dice: random.Random) -> None:
        if damage.of == "clocks":
            directories = disk.directories(self.run)
            if len(directories) > 1:
                _swap(*dice.sample(directories, 2))
            return
        paths = [path for path in self._of(damage.of) if path.stat().st_size]
        if not paths:
            return
        path = dice.choice(self._read_first(paths) if dice.random() < 0.7 else paths)
        place = dice.randrange(path.stat().st_size)
        match damage.what:
            case "flipped":
                spoilt = bytearray(path.read_bytes())
                spoilt[place] ^= dice.randrange(1, 256)
                path.write_bytes(spoilt)
            case "torn":
                path.write_bytes(path.read_bytes()[:place])
            case "missing":
                path.unlink()
            case "swapped":
                others = [other for other in paths if other.suffix == path.suffix and other != path]
                if others:
                    _swap(path, dice.choice(others))


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def content(path: Path) -> Any:
    """All that a checkpoint says; None where it is not whole."""
    try:
        found = disk.read(path)
        parts = [found.tensors(shard) for shard in range(len(found.parts))]
    except CheckpointError:
        return None
    return found, [{name: tensor.tobytes() for name, tensor in part.items()} for part in parts]
