"""Whether a rank's place is sick: its node, and its GPU there.

In a sick place, a replacement would die like its forerunners. Owns: the two rules, by
deaths and by a command of the user's, and the reasons that they give. Must not: end a
job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.agent import die_with_parent
from moe_ckpt.linux import signal_name


@dataclass(frozen=True, kw_only=True, slots=True)
class SickPlaceRules:
    """The rules by which a place is sick."""

    deaths: int = 0
    """Number of deaths of one rank within `within_s` at which the place is sick; 0: any
    number is allowed.
    """

    within_s: float = 0.0
    """Length of time in which `deaths` counts, in seconds."""

    health: str = ""
    """Command that fails, or takes longer than `health_s`, in a sick place; empty: no
    command.
    """

    health_s: float = 0.0
    """Time limit of the command, in seconds."""


def reason_of_deaths(rules: SickPlaceRules, deaths_s: Sequence[float]) -> str | None:
    """Return the reason if there are too many deaths.

    Args:
        rules: The rules.
        deaths_s: The times of the deaths in ascending order, in seconds. The last one
            is now.
    """
    if not rules.deaths or len(deaths_s) < rules.deaths:
        return None
    # only of the last deaths: deaths that lie months apart say nothing about a place
    spent_s = deaths_s[-1] - deaths_s[-rules.deaths]
    if spent_s > rules.within_s:
        return None
    limits = (
        f"runtime.sick_deaths={rules.deaths}, runtime.sick_within_s={rules.within_s:g}"
    )
    return f"{rules.deaths} deaths within {spent_s:.0f} seconds ({limits})"


def reason_of_status(rules: SickPlaceRules, status: int | None) -> str | None:
    """Return the reason if the health command failed.

    Args:
        rules: The rules.
        status: The exit status, as Popen returns it; None: the command did not end in
            time.
    """
    if status == 0:
        return None
    if status is None:
        how = f"did not end within runtime.health_s={rules.health_s:g} seconds"
    else:
        how = (
            f"died of {signal_name(-status)}"
            if status < 0
            else f"ended with status {status}"
        )
    return f"runtime.health={rules.health!r} {how}"


def check_health(rules: SickPlaceRules) -> str | None:
    """Run the health command, if the rules have one.

    The command has this process's environment: RANK and LOCAL_RANK name the rank. Call
    from a process with one thread.

    Returns:
        The reason if the place is sick, else None.
    """
    if not rules.health:
        return None
    parent = os.getpid()
    process = subprocess.Popen(
        rules.health,
        shell=True,
        stdin=subprocess.DEVNULL,
        # so that the processes that the shell starts end with the shell at the limit
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent=parent),
    )
    try:
        return reason_of_status(rules, process.wait(rules.health_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return reason_of_status(rules, None)
