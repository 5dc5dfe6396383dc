"""A text that is always here: this project's own README."""

from __future__ import annotations

from pathlib import Path

TEXT = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")[:6000]
