"""A checkpoint server on a machine that trains nothing: `moe-ckpt server JOB`.

    moe-ckpt server JOB [--interface NAME] [--memory FOLDER] [--secret FILE]

With ckpt.servers=hosts a job uses such servers. JOB is the job's run folder, if this
machine has access to that folder. Otherwise JOB is HOST:PORT of the job's store, which
the file `store` in that folder names, together with a copy of the file `secret` there.

The command waits for the job, takes the first free number among the job's
ckpt.server_hosts servers, and holds states until the job ends. An additional server is
a spare, and takes the number of the first server that is lost. A server is no rank and
needs no torchrun: the settings come from the job.

Owns: this process and its memory, which is removed at the end of the process, even if
the process is killed. Must not: train. FlowCheck, section 4.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.arguments import Parser
from moe_ckpt.errors import exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the job ends, and return the exit status."""
    parser = Parser(prog="moe-ckpt server", description=__doc__)
    parser.add_argument(
        "job", metavar="JOB", help="the job's run folder, or HOST:PORT of its store"
    )
    parser.add_argument(
        "--interface",
        help="the interface that gradients arrive on; by default the one to the store",
    )
    parser.add_argument(
        "--memory",
        type=Path,
        default=Path("/dev/shm"),
        help="the folder in memory for states",
    )
    parser.add_argument(
        "--secret",
        type=Path,
        help="a copy of the file `secret` in the run folder, for HOST:PORT",
    )

    def run() -> None:
        options = parser.parse_args(arguments)
        # torch takes seconds to import, and --help needs no torch
        from moe_ckpt.flowcheck.server_process import serve  # noqa: PLC0415

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        serve(options.job, options.interface, options.memory, options.secret)

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
