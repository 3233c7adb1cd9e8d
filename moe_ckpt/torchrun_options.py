"""The options of torchrun, for the commands that start torchrun. Pure.

The commands are `moe-ckpt train` and `moe-ckpt run`. torchrun's own parser imports
torch, which takes seconds; this module answers mistakes and `--help` without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

WITH_VALUE = (
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
    "log-line-prefix-template",
)
"""Options with a value."""

FLAGS = ("standalone", "virtual-local-rank")
"""Options without a value."""

OF_PROGRAMS = ("help", "module", "no-python", "run-path")
"""Options that choose the program for torchrun; the command itself chooses."""
OF_SHELLS = ("print-completion",)
"""Options with a value, with which torchrun starts nothing."""
_SHORT = {"redirects": "-r", "tee": "-t"}


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's options, in both of their spellings, to a parser."""
    group = parser.add_argument_group(
        "options of torchrun, as `torchrun --help` explains them"
    )
    for name in (*WITH_VALUE, *FLAGS):
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        short = [_SHORT[name]] if name in _SHORT else []
        if name in FLAGS:
            group.add_argument(*short, *spellings, action="store_true")
        else:
            group.add_argument(*short, *spellings, metavar="VALUE")


def torchrun_command(options: argparse.Namespace, program: Sequence[str]) -> list[str]:
    """Return the command, of this Python, that starts a program under torchrun.

    Args:
        options: The parsed options, those of torchrun among them.
        program: The script, or `-m` and a module, and its arguments.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *torchrun_words(options),
        *program,
    ]


def torchrun_words(options: argparse.Namespace) -> list[str]:
    """Return the parsed options of torchrun as words."""
    given = {
        name: getattr(options, name.replace("-", "_")) for name in (*WITH_VALUE, *FLAGS)
    }
    with_value = [
        f"--{name}={given[name]}" for name in WITH_VALUE if given[name] is not None
    ]
    return with_value + [f"--{name}" for name in FLAGS if given[name]]


def count_processes(options: argparse.Namespace) -> int | None:
    """Return the number of processes that the options start on a node.

    None if torchrun counts CPUs or GPUs itself.
    """
    wanted = options.nproc_per_node or "1"
    return int(wanted) if wanted.isdecimal() else None


def count_nodes(options: argparse.Namespace) -> int | None:
    """Return the number of nodes; None for a range of several numbers."""
    numbers = set((options.nnodes or "1").split(":"))
    number = numbers.pop()
    return int(number) if not numbers and number.isdecimal() else None
