"""`mpisgd timeline RUN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.base.errors import EXIT_OK, ConfigError
from mpisgd.report.look import FORMATS, Look, applied


@dataclass(frozen=True)
class Options(Look):
    """Write a Chrome trace of a run, for https://ui.perfetto.dev or chrome://tracing; of a small run also a figure.

    Works on real and virtual runs, also under way or killed.
    """

    run: tyro.conf.Positional[Path]
    """The run's directory, e.g. results/run."""
    out: Path | None = None
    """Trace; the figure differs by its suffix. Default: <run>/report/timeline.json."""
    from_s: float | None = None
    """Start of the window, in seconds after the run's start barrier. Default: 0."""
    to_s: float | None = None
    """End of the window, in seconds after the start barrier. Default: the run's end, or 50,000 pushes."""
    learners: int | None = None
    """Show this many learners, from the first. Default: all, at most 256."""
    figure: bool = True
    """Draw the figure, if readable."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd timeline")
    from mpisgd.analysis import about, timeline
    from mpisgd.records.log.reader import Run
    from mpisgd.report import chrome_trace
    from mpisgd.report.writing import say, terminal

    out = options.out or options.run / "report" / "timeline.json"
    if out.suffix[1:] in FORMATS:
        raise ConfigError(f"--out {out}: expected the name of a trace, e.g. timeline.json; the figure becomes timeline.png")
    console, run = terminal(), Run(options.run)
    found = timeline.look(run, from_s=options.from_s, to_s=options.to_s, learners=options.learners)
    events = chrome_trace.write(out, found, {"run": about.label(run), "placement": found.slack(), "notes": list(found.notes)})
    for note in found.notes:
        say(console, f"shown: {note}")
    say(console, found.slack())
    say(console, f"written to {out}: {events:,} events; open the trace in https://ui.perfetto.dev or chrome://tracing")
    if options.figure:
        from mpisgd.report import figures_timeline, style

        with applied(options):
            drawing = figures_timeline.drawing(run, found)
            if drawing.figure is None:
                say(console, f"no figure {drawing.key}: {drawing.missing}")
            else:
                for path in style.save(drawing.figure, out.with_suffix("")):
                    say(console, f"written to {path}: {drawing.caption.lower()}")
    return EXIT_OK
