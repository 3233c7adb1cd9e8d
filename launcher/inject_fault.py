"""Injects faults into a running job: the command of scripts/inject_fault.sh.

The command kills a random worker, or follows a plan.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.faults.carry_out import carry_out
from launcher.faults.config import read_trace
from launcher.faults.job import LOOK_EVERY_S
from moe_ckpt.arguments import Parser
from moe_ckpt.config import require
from moe_ckpt.elastic.live_workers import (
    LATEST,
    LiveWorker,
    is_running,
    read_live,
    read_world_size,
    read_written,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import (
    KILL_PHASES,
    SCOPES,
    SIGNALS,
    Kill,
    check_signal,
    choose_ranks,
    poisson_kills,
    trace_kills,
)

_FAILED = 1
_WRONG_USE = 2
_INTERRUPTED = 130
_PATIENCE_S = 60.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
# flushed, so that a program that reads the output gets each line at once
_say = functools.partial(print, flush=True)
_EXAMPLES = """\
examples:
  (no option)                              kill one random worker of the newest run
  --rank 2 --signal STOP                   rank 2 hangs
  --rank 0 --scope node                    the host memory of rank 0's node is lost, too
  --rank 1 --at-iteration 17 --phase backward
                                           rank 1 dies as it enters backward of 17
  --rank 1 --phase recovery                rank 1 dies in the next recovery
  --mtbf 30s --count 5 --seed 7            five kills of random ranks, 30 s apart on
                                           average
  --trace aws_p3.csv --speedup 60          as nodes went in a trace, 60 times as fast
  --mtbf 5m --count 100 --dry-run          print the plan, touch nothing

scripts/inject_fault.sh takes the same options. What happened is added to
RUN/faults.jsonl; exit status: 0 all was carried out, 1 not all or no run, 2 wrong use
"""


def main(arguments: Sequence[str]) -> int:
    """Inject the faults that the arguments describe.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status: 0 all faults were carried out, 1 not all or no run, 2 wrong
        use, 130 interrupted.
    """
    try:
        options = _parser().parse_args(arguments)
        return _inject(options, Path(options.run).resolve())
    except ConfigError as error:
        return _fail(_WRONG_USE, str(error))
    except KeyboardInterrupt:
        return _fail(
            _INTERRUPTED,
            "interrupted: what was ordered stays ordered, the rest is left undone",
        )


def _inject(options: argparse.Namespace, run: Path) -> int:
    _check_combination(options)
    if not (run / "run.json").exists():
        return _fail(
            _FAILED, f"no run in {run}: start one, or name another's folder with --run"
        )
    live = _wait_for_live(run)
    if not live:
        return _fail(
            _FAILED,
            f"no live worker in {run}: the run has ended, or is on other machines",
        )
    world_size = read_world_size(run)
    kills = _plan(options, [worker.global_rank for worker in live], world_size)
    _check_fit(options, kills, live, world_size)
    if options.dry_run:
        print("\n".join([f"plan for {run}, seed {options.seed}:", *map(str, kills)]))
        return 0
    if options.mtbf is not None or options.trace is not None:
        _say(f"{len(kills)} faults, seed {options.seed}")
    # the most workers of any node: on other nodes some workers may be dead at the
    # moment
    ranks_per_node = max(
        Counter(worker.node for worker in read_written(run)).values(), default=1
    )
    done = carry_out(
        kills, run, ranks_per_node=ranks_per_node, say=_say, patience_s=_PATIENCE_S
    )
    return 0 if done else _FAILED


def _plan(
    options: argparse.Namespace, live_ranks: Sequence[int], world_size: int
) -> tuple[Kill, ...]:
    signal, scope, seed = options.signal, options.scope, options.seed
    if options.mtbf is not None:
        count = 1 if options.count is None else options.count
        return poisson_kills(
            mtbf_s=options.mtbf,
            count=count,
            seed=seed,
            world_size=world_size,
            signal=signal,
            scope=scope,
        )
    if options.trace is not None:
        text, speedup = read_trace("--trace", options.trace), options.speedup or 1.0
        return trace_kills(
            text,
            speedup=speedup,
            seed=seed,
            world_size=world_size,
            signal=signal,
            scope=scope,
        )
    now = options.at_iteration is None and options.phase is None
    kill = Kill(
        rank=options.rank,
        signal=signal,
        scope=scope,
        iteration=options.at_iteration,
        phase=options.phase,
        after_s=0.0 if now else None,
    )
    return choose_ranks([kill], seed=seed, ranks=live_ranks)


def _check_combination(options: argparse.Namespace) -> None:
    check_signal("--", options.signal, options.scope)
    planned = options.mtbf is not None or options.trace is not None
    for name in ("rank", "at_iteration", "phase"):
        got = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        require(
            got is None or not planned,
            flag,
            got,
            "nothing beside --mtbf or --trace, which choose",
        )
    require(
        options.count is None or options.mtbf is not None,
        "--count",
        options.count,
        "--mtbf beside it",
    )
    require(
        options.speedup is None or options.trace is not None,
        "--speedup",
        options.speedup,
        "--trace beside it",
    )


def _check_fit(
    options: argparse.Namespace,
    kills: Sequence[Kill],
    live: Sequence[LiveWorker],
    world_size: int,
) -> None:
    """Refuse a rank that the run lacks and an iteration that has passed.

    Raises:
        ConfigError: `--rank` or `--at-iteration` does not fit the run.
    """
    wanted = f"between 0 and {world_size - 1}, the ranks of the run"
    require(
        options.rank is None or options.rank < world_size,
        "--rank",
        options.rank,
        wanted,
    )
    if options.at_iteration is not None:
        for worker in (
            worker for worker in live if worker.global_rank == kills[0].rank
        ):
            there = worker.open_page().iteration
            wanted = f"at least {there}, where rank {worker.global_rank} is"
            require(
                options.at_iteration >= there,
                "--at-iteration",
                options.at_iteration,
                wanted,
            )


def _wait_for_live(run: Path) -> list[LiveWorker]:
    """Return the live workers.

    If all workers are being replaced, waits for the first replacement.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (
        not (live := read_live(run))
        and is_running(read_written(run))
        and time.monotonic() < deadline_s
    ):
        time.sleep(LOOK_EVERY_S)
    return live


def _fail(status: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="moe-ckpt inject",
        description=(
            "Inject faults into a running job. Without options: SIGKILL to one random"
            " live worker."
        ),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--run",
        metavar="DIR",
        default=LATEST,
        help="the run's folder (default: outputs/latest, the newest)",
    )
    add("--rank", type=_whole(0), help="which rank (default: a random one that lives)")
    add(
        "--signal",
        choices=SIGNALS,
        default="KILL",
        help="STOP is a hang, RAISE an exception at a point (default: KILL)",
    )
    add(
        "--scope",
        choices=SCOPES,
        default="process",
        help="node: all ranks of its node, with their host memory",
    )
    add(
        "--at-iteration",
        type=_whole(1),
        metavar="N",
        help="not at once but as the rank enters iteration N",
    )
    add(
        "--phase",
        choices=KILL_PHASES,
        help="not at once but as the rank enters this phase, the next time or in N",
    )
    plan = parser.add_mutually_exclusive_group()
    plan.add_argument(
        "--mtbf",
        type=_duration_s,
        help="kills at random times, this far apart on average: 30s, 5m, 1h",
    )
    plan.add_argument(
        "--trace", metavar="FILE", help="kills when nodes of a real cluster went"
    )
    add("--count", type=_whole(1), help="with --mtbf: how many kills (default: 1)")
    add(
        "--speedup",
        type=_above_zero,
        help="with --trace: how many times as fast (default: 1)",
    )
    # an explicit number instead of an unseeded generator: the number is printed, so
    # that the plan can be repeated
    add(
        "--seed",
        type=_whole(0),
        default=random.SystemRandom().randrange(2**32),
        help="the same seed, the same plan",
    )
    add("--dry-run", action="store_true", help="print the plan, touch nothing")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, wanted a whole number of at least {least}"
            )
        return int(text)

    return convert


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number above 0")


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted a number above 0 with its unit: 30s, 5m, 1h"
        )
    return float(match[1]) * _UNITS_S[match[2]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
