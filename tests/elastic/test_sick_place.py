"""A place is sick after too many deaths of a rank, or if the health command fails.

Deaths count within a length of time.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moe_ckpt.elastic.sick_place import (
    SickPlaceRules,
    check_health,
    reason_of_deaths,
    reason_of_status,
)
from moe_ckpt.linux import is_alive
from tests.harness.gloo.workers import wait_until

RULES = SickPlaceRules(deaths=3, within_s=60.0, health="nvidia-smi", health_s=5.0)


@pytest.mark.parametrize(
    ("deaths_s", "is_sick"),
    [
        ([], False),
        ([100.0], False),
        ([100.0, 101.0], False),
        ([100.0, 101.0, 102.0], True),
        ([100.0, 130.0, 160.0], True),
        ([100.0, 130.0, 160.1], False),
        ([0.0, 100.0, 130.0, 160.0], True),
        ([100.0, 101.0, 102.0, 500.0], False),
        ([100.0, 101.0, 500.0, 501.0], False),
        ([100.0, 500.0, 501.0, 502.0], True),
    ],
)
def test_deaths_count_within_their_time(deaths_s: list[float], is_sick: bool) -> None:
    reason = reason_of_deaths(RULES, deaths_s)
    assert (reason is not None) == is_sick
    if reason:
        limits = "runtime.sick_deaths=3, runtime.sick_within_s=60"
        assert (
            reason
            == f"3 deaths within {deaths_s[-1] - deaths_s[-3]:.0f} seconds ({limits})"
        )


def test_without_a_limit_any_number_of_deaths_is_allowed() -> None:
    assert (
        reason_of_deaths(SickPlaceRules(deaths=0, within_s=60.0), [100.0] * 1000)
        is None
    )


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (0, None),
        (1, "ended with status 1"),
        (127, "ended with status 127"),
        (-9, "died of SIGKILL"),
        (None, "did not end within runtime.health_s=5 seconds"),
    ],
)
def test_statuses_of_the_health_command(status: int | None, how: str | None) -> None:
    assert reason_of_status(RULES, status) == (
        how and f"runtime.health='nvidia-smi' {how}"
    )


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("", None),
        ("exit 0", None),
        ('test "$RANK" = 3', None),
        ("exit 4", "ended with status 4"),
        ("no-such-command 2> /dev/null", "ended with status 127"),
        ("kill -SEGV $$", "died of SIGSEGV"),
    ],
)
def test_the_health_command_is_run(
    command: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    reason = check_health(SickPlaceRules(health=command, health_s=30.0))
    assert reason == (wanted and f"runtime.health={command!r} {wanted}")


def test_a_health_command_that_hangs_is_ended_with_its_processes(
    tmp_path: Path,
) -> None:
    """A call into the driver of a sick GPU may never return."""
    command = f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"
    since_s = time.monotonic()
    reason = check_health(SickPlaceRules(health=command, health_s=0.5))
    assert (
        reason
        == f"runtime.health={command!r} did not end within runtime.health_s=0.5 seconds"
    )
    assert 0.5 <= time.monotonic() - since_s < 30.0
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
