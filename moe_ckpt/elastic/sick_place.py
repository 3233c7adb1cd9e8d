"""Whether the place of a rank (its node, and its GPU there) is sick: a replacement
would die like its forerunners.

Owns: the two rules, by deaths and by a command of the user's, and the reasons that they
give. Must not: end a job.
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
    """A place is sick if one rank dies `deaths` times within `within_s` seconds there
    (0: any number is allowed), or if the command `health` (empty: there is none) fails
    or takes longer than `health_s` seconds.
    """

    deaths: int = 0
    within_s: float = 0.0
    health: str = ""
    health_s: float = 0.0


def reason_of_deaths(rules: SickPlaceRules, deaths_s: Sequence[float]) -> str | None:
    """Return the reason if these deaths, at times in ascending order of which the last
    is now, are too many.
    """
    if not rules.deaths or len(deaths_s) < rules.deaths:
        return None
    # of the last ones only: deaths that lie months apart say nothing about a place
    spent_s = deaths_s[-1] - deaths_s[-rules.deaths]
    if spent_s > rules.within_s:
        return None
    limits = (
        f"runtime.sick_deaths={rules.deaths}, runtime.sick_within_s={rules.within_s:g}"
    )
    return f"{rules.deaths} deaths within {spent_s:.0f} seconds ({limits})"


def reason_of_status(rules: SickPlaceRules, status: int | None) -> str | None:
    """Return the reason if the health command ended with this status, as Popen gives
    it; None: it did not end.
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
    """Run the health command, if there is one; return the reason if the place is sick.

    The command has this process's environment: RANK and LOCAL_RANK name the rank. Call
    from a process with one thread.
    """
    if not rules.health:
        return None
    parent = os.getpid()
    process = subprocess.Popen(
        rules.health,
        shell=True,
        stdin=subprocess.DEVNULL,
        # the processes that the shell starts end with it at the limit
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent=parent),
    )
    try:
        return reason_of_status(rules, process.wait(rules.health_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return reason_of_status(rules, None)
