"""Measure the language of docstrings and messages: words, pronouns that stand for a noun, first words that hide the subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRONOUNS = frozenset(re.findall("[a-z]+", "it its that those which whose who whom they them one ones what such so"))
"""Words that make a reader look back for a noun."""
HIDDEN = tuple(f"{word} " for word in ("What", "Who", "Whom", "Whose", "Whether", "Where", "Those", "One", "As ever", "Of"))
"""First words that hide the subject of a docstring."""
LEAST_WORDS = 5
"""Of a message; shorter strings are names, keys, headings."""
_WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")


class Text(NamedTuple):
    """A docstring of a module, class, function, or attribute (the literal after an assignment); or a message."""

    file: Path
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return [word.lower() for word in _WORD.findall(self.text)]

    @property
    def hides_its_subject(self) -> bool:
        return self.text.strip().startswith(HIDDEN)


class Measured(NamedTuple):
    """The language of many docstrings."""

    words: int
    pronouns: int
    hidden: int

    @property
    def share(self) -> float:
        """Share of pronouns among all words."""
        return self.pronouns / max(1, self.words)


def docstrings(root: Path) -> Iterator[Text]:
    """Yield the docstrings of all modules below a directory."""
    for file, tree in modules(root):
        for node in ast.walk(tree):
            for literal in _literals(node):
                yield Text(file, literal.lineno, str(literal.value))


def messages(root: Path) -> Iterator[Text]:
    """Yield all other strings of `LEAST_WORDS` or more, in which values are left out."""
    for file, tree in modules(root):
        apart = {id(literal) for node in ast.walk(tree) for literal in _literals(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                apart |= {id(part) for part in node.values}
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
                text = node.value
            else:
                continue
            if len((found := Text(file, node.lineno, text)).words) >= LEAST_WORDS:
                yield found


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield all modules below a directory, parsed."""
    for file in sorted(root.rglob("*.py")):
        yield file, ast.parse(file.read_text("utf-8"))


def measure(found: Iterator[Text]) -> Measured:
    words = pronouns = hidden = 0
    for each in found:
        words += len(each.words)
        pronouns += sum(word in PRONOUNS for word in each.words)
        hidden += each.hides_its_subject
    return Measured(words, pronouns, hidden)


def _literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield strings that stand alone in a body: docstrings, and those of attributes."""
    body = getattr(node, "body", None)
    for child in body if isinstance(body, list) else ():
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield child.value


if __name__ == "__main__":
    package = Path(__file__).parents[1] / "mpisgd"
    for room in [*sorted(each for each in package.iterdir() if each.is_dir() and each.name != "__pycache__"), package]:
        found = measure(docstrings(room))
        shown = f"{found.words:>7,} words, {100 * found.share:4.1f} % pronouns, {found.hidden:>4} with a hidden subject"
        said = measure(messages(room))
        print(f"{room.name:<16} {shown}; messages {said.words:>6,} words, {100 * said.share:4.1f} % pronouns")
