"""`make audit`: the versions in constraints.txt against the database of known vulnerabilities, by pip-audit.

    python -m tests.audit PIP-AUDIT [constraints.txt]

pip-audit says "no known vulnerabilities", with status 0, also of packages that it could not look up. So its findings are read: exit
status 0: all were looked up, and none has any; 1: some have, they are named; 3: nothing is known of some or all, the database
cannot be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "30", "--format", "json")
FOUND, UNKNOWN = 1, 3


def audit(program: str, constraints: Path) -> int:
    """Prints what was found; returns the exit status."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "found.json"
        command = [program, *OPTIONS, "--requirement", str(constraints), "--output", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        packages = json.loads(out.read_text())["dependencies"] if out.is_file() and out.stat().st_size else []
    wanted = sum(1 for line in constraints.read_text().splitlines() if "==" in line and not line.startswith("#"))
    looked_up = [each for each in packages if "skip_reason" not in each]
    for each in looked_up:
        for known in each["vulns"]:
            fixed = ", ".join(known.get("fix_versions") or []) or "none yet"
            print(f"{each['name']} {each['version']}: {known['id']}; fixed in: {fixed}")
    missed = [each["name"] for each in packages if "skip_reason" in each]
    status = FOUND if any(each["vulns"] for each in looked_up) else 0
    if len(looked_up) < wanted:
        status = status or UNKNOWN
        if looked_up:
            unknown = ", ".join(missed) or "they were not looked up"
            print(f"of {wanted - len(looked_up)} of {wanted} packages nothing is known: {unknown}")
        else:
            last = (done.stderr.strip().splitlines() or ["no word from pip-audit"])[-1]
            why = packages[0]["skip_reason"] if packages else last
            print(f"the database of vulnerabilities cannot be reached: nothing is known of any of {wanted} packages ({why})")
    else:
        print(f"{len(looked_up)} packages were looked up: {'see above' if status else 'no known vulnerabilities'}")
    return status


def main(argv: list[str]) -> int:
    program, *rest = argv
    return audit(program, Path(rest[0]) if rest else Path("constraints.txt"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
