"""The worked example of CONTRIBUTING.md: a protocol that lies outside the package, as a user's would."""

from __future__ import annotations

import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def written(directory: Path, module: str = "majority") -> Path:
    """The module as it stands on the page, in this directory."""
    text = PAGE.read_text()
    page = text[text.index("```python") :].split("```")[1].removeprefix("python")
    path = directory / f"{module}.py"
    path.write_text(textwrap.dedent(page).lstrip())
    return path
