"""`moe-ckpt prove -- COMMAND`: whether a training command repeats itself, bit for bit.

Also proves that the command continues bit for bit after a fault. A command without an
attachment is run twice, and killed and resumed by its own means (`resumed.py`). A
command with an attachment is run plain, and under faults (`attached.py`). `moe-ckpt
check` is another name of the command.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.output_folder import make_output_folder
from launcher.prove.attached import AttachedProof, run_job
from launcher.prove.commands import parse_command
from launcher.prove.resumed import PLACEHOLDER, ResumeProof
from launcher.prove.runs import NOT_PROVEN, run_to_end
from moe_ckpt.arguments import Parser, parse_before_program
from moe_ckpt.config import require
from moe_ckpt.door import VARIABLE
from moe_ckpt.errors import exit_status

_EPILOG = (
    "exit status: 0 exact; 1 different; 2 not proven: a run failed, or the control was"
    " not noticed\n"
    "examples:\n"
    "  moe-ckpt prove -- torchrun --nproc-per-node=4 pretrain_gpt.py"
    f" --save {PLACEHOLDER} --load {PLACEHOLDER} ARGUMENTS\n"
    "  moe-ckpt prove -- torchrun --nproc-per-node=4 -m moe_ckpt.run --ckpt moevement"
    " -- pretrain_gpt.py ARGUMENTS\n"
    "  moe-ckpt prove -- moe-ckpt train --nproc-per-node=4 +ckpt=moevement"
    " train.iterations=20"
)


def main(arguments: Sequence[str]) -> int:
    """Prove the command that follows the options, and print a few lines.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """

    def prove() -> int:
        options, words = parse_before_program(_parser(), arguments)
        attached = parse_command(words, os.environ.get(VARIABLE, ""))
        folder = make_output_folder(options.output, "prove")
        require(not any(folder.iterdir()), "-o", str(folder), "an empty folder")
        if attached:
            got, wanted = "a command with an attachment", "one without"
            require(options.resume, "--no-resume", got, wanted)
            require(not options.ignored, "--except", got, wanted)
            execute = functools.partial(run_job, limit_s=options.limit_s)
            return AttachedProof(attached, folder, execute).run()
        execute = functools.partial(run_to_end, limit_s=options.limit_s)
        proof = ResumeProof(
            words, folder, execute, resumes=options.resume, ignored=options.ignored
        )
        return proof.run()

    return exit_status(prove, failed=NOT_PROVEN)


def _parser() -> Parser:
    parser = Parser(
        prog="moe-ckpt prove",
        description=(
            "Prove that a training command repeats itself, and goes on exactly after a"
            " fault."
        ),
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of all runs (outputs/DATE/TIME-prove)",
    )
    add(
        "--limit-s",
        type=float,
        default=3600.0,
        help="seconds after which a run is stopped (3600)",
    )
    add(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="compare two runs, without a kill",
    )
    add(
        *("--except", "-x"),
        dest="ignored",
        action="append",
        default=[],
        metavar="TENSOR",
        help=(
            "a tensor that is not compared, by its name; may be given several times;"
            " without an attachment"
        ),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
