"""All campaigns: `python -m tests.faults --out results/faults`; what `make faults` runs.

Stopped and started again it goes on where it was, as each campaign does (the soak begins anew, unless it is whole). A campaign that
fails does not keep the others from being run; the exit status tells. Stages follow each other; the lanes of a stage run side by
side, since campaigns mostly wait for deadlines. Campaigns of the shortest deadlines are in the last stage.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

from tests.faults import summary
from tests.faults.job import stop_orderly

#: Stages of lanes: campaign -> how many runs; of the soak, minutes. Seconds per run stand in results/faults/README.md.
STAGES: tuple[tuple[dict[str, int], ...], ...] = (
    (
        {"soak": 30, "network": 60},
        {"flips": 1000, "virtual": 1000, "virtual_batch": 250, "fuzz": 48, "power": 21, "cuts": 12},
        {"starts": 189, "site": 29, "kills": 66},
    ),
    ({"phases": 51, "strangers": 14}, {"batch": 20, "deaths": 20, "stops": 15}),
)
#: What only root can do: mount file systems, make network namespaces, be another user.
OF_ROOT = ("network", "power", "strangers")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="All campaigns of faults.")
    parser.add_argument("--out", type=Path, required=True, help="the directory of their files")
    parser.add_argument("--count", type=int, help="runs of each, and minutes of the soak; default: what each is meant to have")
    options = parser.parse_args(argv)
    stop_orderly()
    begun_s, failed = time.monotonic(), list[str]()

    def run(lane: dict[str, int]) -> Generator[None]:
        """Run the campaigns of a lane; yield as long as each lasts."""
        for name, count in lane.items():
            if name in OF_ROOT and os.geteuid():
                print(f"faults: {name} is left out: it needs root", flush=True)
                continue
            words = ["--out", str(options.out), "--count", str(options.count or count)]
            campaign = subprocess.Popen([sys.executable, "-m", f"tests.faults.{name}", *words], stdout=subprocess.DEVNULL)
            try:
                while campaign.poll() is None:
                    yield
            finally:  # also where this process is stopped
                campaign.terminate()
                if campaign.wait():
                    failed.append(name)
            print(f"faults: {name} {'failed' if name in failed else 'well'}, {time.monotonic() - begun_s:.0f} s", flush=True)

    for lanes in STAGES:
        with ExitStack() as stack:
            under_way = [stack.enter_context(closing(run(lane))) for lane in lanes]
            while under_way:
                under_way = [lane for lane in under_way if next(lane, "ended") is None]
                time.sleep(0.2)
    page = options.out / "README.md"
    if page.is_file():
        page.write_text(summary.page(page.read_text(), options.out))
    print(f"faults: failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
