"""Faults of four kinds, drawn by a seed, the rooms of the package in turn; nothing that only says something is changed."""

from __future__ import annotations

import ast
import itertools
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT_MODULES = ("learner.py", "shard.py", "evaluator.py", "api.py")
Span = tuple[int, int]
TURNED: Mapping[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", ">=", "<="),
    ast.LtE: ("<=", ">", "<"),
    ast.Gt: (">", "<=", ">="),
    ast.GtE: (">=", "<", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
"""Looks of an operator, and what it is turned into."""

#: What says something or is not run: no faults there.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.pattern)
SKIPPED_FIELDS = ("decorator_list", "annotation", "returns", "type_params", "bases")
#: Calls for which the order of two arguments says nothing, or only to who reads types.
ANY_ORDER = ("isinstance", "issubclass", "cast", "max", "min", "equal")


@dataclass(frozen=True)
class Site:
    """A place for a fault: bytes `edit` become `text`; `whole` is the expression around them, at which the probe is put."""

    kind: str
    line: int
    whole: Span
    edit: Span
    text: str


@dataclass(frozen=True)
class Fault:
    """A fault: its site in a file of the package, and the source before and after, in one line."""

    number: int
    room: str
    file: str
    site: Site
    before: str
    after: str


def within(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yield what is run in bodies of functions."""
    text = ast.unparse(node.test if isinstance(node, ast.If) else node.value) if isinstance(node, ast.If | ast.Subscript) else ""
    if isinstance(node, SKIPPED) or "TYPE_CHECKING" in text or text == "Literal":
        return
    if inside:
        yield node
    for name, value in ast.iter_fields(node):
        body = inside or (name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in SKIPPED_FIELDS:
                yield from within(child, body)


def sites(source: bytes) -> list[Site]:
    """Return all sites of a file, in a fixed order."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def span(node: ast.expr) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def edits(node: ast.AST) -> Iterator[tuple[str, ast.expr, Span, str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for before, op, after in zip([left, *comparators], ops, comparators, strict=False):
                    start, end = span(before)[1], span(after)[0]
                    look, *others = TURNED[type(op)]
                    for found in itertools.islice(re.finditer(look.encode(), source[start:end]), 1):
                        for other in others:
                            yield "comparison", node, (start + found.start(), start + found.end()), other
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                yield "constant", node, span(node), repr(value + 1)
            case ast.If(test=test, orelse=orelse):
                yield "branch", test, span(test), "False"
                if orelse:
                    yield "branch", test, span(test), "True"
            case ast.Call(func=func, args=args) if ast.unparse(func).rpartition(".")[2] not in ANY_ORDER:
                for first, second in itertools.pairwise(args):
                    (start, end), (begin, last) = span(first), span(second)
                    two = (source[begin:last] + source[end:begin] + source[start:end]).decode()
                    kinds = {type(first), type(second)}
                    if ast.Starred not in kinds and kinds != {ast.Constant} and ast.dump(first) != ast.dump(second):
                        yield "argument", node, (start, last), two

    nodes = within(ast.parse(source))
    return [Site(kind, e.lineno, span(e), edit, text) for node in nodes for kind, e, edit, text in edits(node)]


def planted(source: bytes, site: Site) -> bytes:
    return source[: site.edit[0]] + site.text.encode() + source[site.edit[1] :]


def probed(source: bytes, wholes: Mapping[int, Span]) -> bytes:
    """Return the source with the expression of each site as `(reached(number) or (expression))`."""
    marks: list[tuple[int, int, int, int, str]] = []
    for number, (start, end) in wholes.items():
        marks.append((start, 1, -end, number, f'(__import__("planted_probe").reached({number}) or ('))
        marks.append((end, 0, -start, -number, "))"))
    for position, *_, text in sorted(marks, reverse=True):
        source = source[:position] + text.encode() + source[position:]
    return source


def sound(source: bytes, site: Site) -> bool:
    """Tell whether the file compiles with the fault, and says something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(probed(source, {0: site.whole}), "probed", "exec")
            compile(planted(source, site), "planted", "exec")
        except (SyntaxError, ValueError):
            return False
        return ast.dump(ast.parse(planted(source, site))) != ast.dump(ast.parse(source))


def in_a_line(source: bytes, site: Site, more: int) -> str:
    """Return the source of a site's expression, of a constant its whole line; `more`: how much the fault has lengthened it."""
    start, end = site.whole[0], site.whole[1] + more
    if site.kind == "constant":
        start, end = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end) % (len(source) + 1)
    return " ".join(source[start:end].decode().split())


def draw(package: Path, count: int, seed: int) -> list[Fault]:
    """Draw faults: rooms in turn, a file by how many sites it has, a kind, a site."""
    generator = random.Random(seed)
    rooms: dict[str, dict[str, list[Site]]] = defaultdict(dict)
    sources = {path.relative_to(package): path.read_bytes() for path in sorted(package.rglob("*.py"))}
    for path, source in sources.items():
        if (len(path.parts) > 1 or path.name in ROOT_MODULES) and (found := sites(source)):
            rooms[path.parent.as_posix() if len(path.parts) > 1 else path.stem][path.as_posix()] = found
    order, faults = sorted(rooms), list[Fault]()
    generator.shuffle(order)
    while len(faults) < count and any(rooms.values()):
        for room in [each for each in order if rooms[each]][: count - len(faults)]:
            for file, site in drawn(rooms[room], generator):
                source = sources[Path(file)]
                if sound(source, site):
                    changed = planted(source, site)
                    texts = in_a_line(source, site, 0), in_a_line(changed, site, len(changed) - len(source))
                    faults.append(Fault(len(faults) + 1, room, file, site, *texts))
                    break
    return faults


def drawn(files: dict[str, list[Site]], generator: random.Random) -> Iterator[tuple[str, Site]]:
    """Draw sites of a room until there are none left; a drawn one is taken away."""
    while files:
        names = sorted(files)
        file = generator.choices(names, [len(files[name]) for name in names])[0]
        kind = generator.choice(sorted({site.kind for site in files[file]}))
        site = generator.choice([site for site in files[file] if site.kind == kind])
        files[file].remove(site)
        if not files[file]:
            del files[file]
        yield file, site
