"""Time limits: given in any form that a batch system takes, told to each in its own."""

from __future__ import annotations

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.site.scripts.durations import fsd, hm, hms, seconds

HOUR, DAY = 3600, 86400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90 * 60),  # SLURM, LSF, Flux: minutes
        ("02:30", 2 * HOUR + 30 * 60),  # LSF
        ("100:30", 100 * HOUR + 30 * 60),
        ("01:02:03", HOUR + 2 * 60 + 3),  # SLURM, PBS
        ("48:00:00", 48 * HOUR),
        ("2-12", 2 * DAY + 12 * HOUR),  # SLURM
        ("2-12:30", 2 * DAY + 12 * HOUR + 30 * 60),
        ("1-00:00:00", DAY),
        ("0-1:02:03", HOUR + 2 * 60 + 3),
        ("90m", 90 * 60),  # Flux
        ("2h", 2 * HOUR),
        ("1.5h", HOUR + 1800),
        ("1d", DAY),
        ("300s", 300),
    ],
)
def test_every_form_is_read(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "an hour", "1 hour", "1:60", "1:00:60", "1:2:3:4", "-5", "1-", "2-12-1", "1h30m", "1e3", "1:00\n", "٣", "5x", "infinity"],
)
def test_any_other_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"time = .*: expected hours:minutes, .* days-hours:minutes:seconds, minutes, or .* 90m"):
        seconds(text)


def test_more_than_a_day_beside_days_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"time = '1-24:00': expected fewer than 24 hours beside days"):
        seconds("1-24:00")


@pytest.mark.parametrize(
    ("limit_s", "slurm_and_pbs", "lsf", "flux"),
    [
        (HOUR, "01:00:00", "01:00", "60m"),
        (HOUR + 1, "01:00:01", "01:01", "3601s"),
        (100 * HOUR + 90, "100:01:30", "100:02", "360090s"),
    ],
)
def test_each_system_is_told_in_its_own_form(limit_s: int, slurm_and_pbs: str, lsf: str, flux: str) -> None:
    assert (hms(limit_s), hm(limit_s), fsd(limit_s)) == (slurm_and_pbs, lsf, flux)
