"""All campaigns, one after the other: `python -m tests.faults --out results/faults`; what `make faults` runs.

Stopped and started again it goes on where it was, as each campaign does (the soak begins anew, unless it is whole). A campaign that
fails does not keep the others from being run; the exit status tells. What waits most, or measures no seconds of others, runs beside
the soak; the rest, for which seconds count, after it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.faults import summary
from tests.faults.job import stop_orderly

#: Campaign -> how many runs. Seconds per run on two quiet cores stand in results/faults/README.md.
BESIDE_THE_SOAK = {"flips": 1000, "virtual": 1000, "virtual_batch": 250, "fuzz": 48, "power": 21, "cuts": 12}
ALONE = {
    "network": 60,
    "deaths": 20,
    "kills": 66,
    "batch": 20,
    "starts": 189,
    "stops": 15,
    "phases": 51,
    "site": 29,
    "strangers": 14,
}
#: What only root can do: mount file systems, make network namespaces, be another user.
OF_ROOT = ("network", "power", "strangers")
MINUTES = 30


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="All campaigns of faults.")
    parser.add_argument("--out", type=Path, required=True, help="the directory of their files")
    parser.add_argument("--count", type=int, help="runs of each, and minutes of the soak; default: what each is meant to have")
    options = parser.parse_args(argv)
    stop_orderly()
    begun_s, failed = time.monotonic(), []
    under_way: list[subprocess.Popen[bytes]] = []

    def begin(name: str, count: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", f"tests.faults.{name}", "--out", str(options.out), "--count", str(options.count or count)]
        under_way.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        return under_way[-1]

    def end(name: str, campaign: subprocess.Popen[bytes]) -> None:
        if campaign.wait():
            failed.append(name)
        under_way.remove(campaign)
        print(f"faults: {name} {'failed' if name in failed else 'well'}, {time.monotonic() - begun_s:.0f} s", flush=True)

    def run(name: str, count: int) -> None:
        if name in OF_ROOT and os.geteuid():
            print(f"faults: {name} is left out: it needs root", flush=True)
        else:
            end(name, begin(name, count))

    try:
        soak = begin("soak", MINUTES)
        for name, count in BESIDE_THE_SOAK.items():
            run(name, count)
        end("soak", soak)
        for name, count in ALONE.items():
            run(name, count)
    finally:
        for campaign in under_way:
            campaign.terminate()
        for campaign in under_way:
            campaign.wait()
    page = options.out / "README.md"
    if page.is_file():
        page.write_text(summary.page(page.read_text(), options.out))
    print(f"faults: failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
