"""Batch systems: words for common options, and options that a system lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError

SystemName = Literal["slurm", "lsf", "jsrun", "pbs", "flux"]

WARNING_S = 120
"""Seconds from the warning to the time limit; SLURM can warn 60 s early (TRAPS 7)."""

#: States that earlier jobs must reach first; the jobs' numbers follow, after colons.
DEPENDENCIES = ("after", "afterany", "afterok", "afternotok")


@dataclass(frozen=True)
class System:
    """A batch system.

    Attributes:
        keyword: beginning of a line for the system.
        submit: command that reads a script from standard input.
        says: option -> word, with {} for the value; "" = placed by the template.
        lacks: option -> alternative.
        after: kind of dependency -> word, with {} for a job's number.
        repeated: words that may begin several lines.
        one_by_one: without arrays: words to queue an element, {index} from 1, and to tell later elements the first's number,
            {first}.
    """

    title: str
    keyword: str
    submit: tuple[str, ...]
    says: Mapping[str, str]
    lacks: Mapping[str, str]
    after: Mapping[str, str]
    joins: str
    mail: Mapping[str, str]
    mail_joins: str = ""
    repeated: frozenset[str] = frozenset()
    one_by_one: tuple[str, str] | None = None

    def refuse_what_it_lacks(self, given: Mapping[str, object]) -> None:
        for option, instead in self.lacks.items():
            if given.get(option):
                raise ConfigError(f"{option} = {given[option]!r}: expected none with {self.title}: {instead}")

    def lines(self, option: str, value: object) -> list[str]:
        """Return an option's lines, without keyword; none if the template has them."""
        said = self.says.get(option, "")
        return [said.format(value)] if value and said else []

    def depends(self, text: str) -> list[str]:
        kind, jobs = split_dependency(text)
        each = [self.after[kind].format(job) for job in jobs]
        if self.joins == "\n":
            return [self.says["dependency"].format(one) for one in each]
        return self.lines("dependency", self.joins.join(each))

    def mails(self, address: str, when: Sequence[str]) -> list[str]:
        """Return lines for mail; `fail` alone is impossible where a single mail covers every end."""
        if not address:
            return []
        words = list(dict.fromkeys(self.mail[each] for each in when))
        return self.lines("mail", address) + self.lines("mail_when", self.mail_joins.join(words))

    def check_directives(self, directives: Sequence[str], script: str) -> None:
        """Raise ConfigError for a directive already in the script: the last would win, unseen."""
        lines = [line.removeprefix(self.keyword) for line in script.splitlines() if line.startswith(self.keyword)]
        for directive in directives:
            if directive in lines:  # a user's template may lack directives
                lines.remove(directive)
        own = {first_word(line) for line in lines}
        for directive in directives:
            word = first_word(directive)
            expected = "an option that the script does not set; use submit's own option"
            require(word in self.repeated or word not in own, "directive", directive, expected)


def first_word(directive: str) -> str:
    """Return `--time` of `--time=1:00`, `-W` of `-W 60`, `-l select` of PBS's `-l select=1:ncpus=4`."""
    found = re.match(r"-l\s+[^\s=:]+|[^\s=]+", directive.strip())
    return found[0] if found else ""


def split_dependency(text: str) -> tuple[str, list[str]]:
    """Split `afterok:17:18` into ("afterok", ["17", "18"])."""
    kind, *jobs = text.split(":")
    good = kind in DEPENDENCIES and jobs and all(re.fullmatch(r"[\w.\[\]-]+", job) for job in jobs)
    expected = f"KIND:JOB, or KIND:JOB:JOB, with one of {', '.join(DEPENDENCIES)}: afterok:4711"
    require(bool(good), "dependency", text, expected)
    return kind, jobs


_SLURM = System(
    title="SLURM",
    keyword="#SBATCH ",
    submit=("sbatch", "--parsable"),
    says={
        "account": "",
        "queue": "",
        "memory": "--mem={}",
        "qos": "--qos={}",
        "constraint": "--constraint={}",
        "reservation": "--reservation={}",
        "exclusive": "--exclusive",
        "mail": "--mail-user={}",
        "mail_when": "--mail-type={}",
        "dependency": "--dependency={}",
        "array": "",
        "chain": "",
    },
    lacks={},
    after={kind: f"{kind}:{{}}" for kind in DEPENDENCIES},
    joins=",",
    mail={"begin": "BEGIN", "end": "END", "fail": "FAIL"},
    mail_joins=",",
)
_LSF = System(
    title="LSF",
    keyword="#BSUB ",
    submit=("bsub",),
    says={
        "account": "",
        "queue": "",
        "memory": '-R "rusage[mem={}B]"',
        "constraint": '-R "select[{}]"',
        "reservation": "-U {}",
        "exclusive": "-x",
        "mail": "-u {}",
        "mail_when": "{}",
        "dependency": '-w "{}"',
        "array": "",
        "chain": "",
    },
    lacks={"qos": "service classes are the site's: --directive '-sla NAME'"},
    after={"after": "started({})", "afterany": "ended({})", "afterok": "done({})", "afternotok": "exit({})"},
    joins=" && ",
    mail={"begin": "-B", "end": "-N", "fail": "-N"},
    mail_joins=" ",
    repeated=frozenset({"-R"}),
)
_PBS = System(
    title="PBS",
    keyword="#PBS ",
    submit=("qsub",),
    says={
        "account": "",
        "queue": "",
        "memory": "",
        "constraint": "",
        "exclusive": "",
        "mail": "-M {}",
        "mail_when": "-m {}",
        "dependency": "-W depend={}",
        "array": "",
        "chain": "",
    },
    lacks={
        "qos": "a qos is a queue, or a resource of the site's: --queue, or --directive '-l NAME=...'",
        "reservation": "a reservation is a queue: give its name, R17 say, by --queue",
    },
    after={kind: f"{kind}:{{}}" for kind in DEPENDENCIES},
    joins=",",
    mail={"begin": "b", "end": "e", "fail": "a"},
    repeated=frozenset({"-W"}),
)
_FLUX = System(
    title="Flux",
    keyword="#flux: ",
    submit=("flux", "batch"),
    says={
        "account": "",
        "queue": "",
        "constraint": "--requires={}",
        "exclusive": "--exclusive",
        "dependency": "--dependency={}",
        "array": "",
    },
    lacks={
        "memory": "Flux does not deal out memory; --exclusive gives whole nodes",
        "qos": "priorities are the bank's and the queue's: --account, --queue",
        "reservation": "give the site's queue or property: --queue, --constraint",
        "mail": "Flux writes no mail; flux job wait-event waits for a job",
        "chain": "a job cannot be queued again, nor warned of the end to come: submit the next link by --dependency"
        " afterany:JOB, with a configuration that resumes",
    },
    after={"after": "afterstart:{}", **{kind: f"{kind}:{{}}" for kind in DEPENDENCIES[1:]}},
    joins="\n",
    mail={},
    repeated=frozenset({"--dependency", "--setattr", "--env", "-o", "-S", "--setopt"}),
    one_by_one=("--env=ARRAY_INDEX={index}", "--env=ARRAY_JOB={first}"),
)
SYSTEMS: Mapping[SystemName, System] = {"slurm": _SLURM, "lsf": _LSF, "jsrun": _LSF, "pbs": _PBS, "flux": _FLUX}
