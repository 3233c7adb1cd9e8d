"""Run each command of a list with `--help` and with an unknown option, in forks.

Results are printed as JSON.

    python -m tests.help_of_all '[{"moe-ckpt status": [], "moe-ckpt server": ["JOB"]},
        ["torch", "hydra"]]'

The words in the list of a command are the arguments that the command requires. The
second list has the names of slow packages.

Must not: import anything slow, because each fork reports the slow packages that have
been imported.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "--nonesuch"


def main() -> None:
    """Print status, output and imported slow packages of each command and option."""
    entries, slow = json.loads(sys.argv[1])
    found: dict[str, dict[str, list[object]]] = {}
    for entry, needed in entries.items():
        options = {"--help": ["--help"], UNKNOWN: [UNKNOWN, *needed]}
        found[entry] = {
            name: _in_a_fork(entry.split(), rest, slow)
            for name, rest in options.items()
        }
    print(json.dumps(found))


def _in_a_fork(
    words: Sequence[str], rest: Sequence[str], slow: Sequence[str]
) -> list[object]:
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as imported:
        if os.fork() == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            status = 1
            try:
                status = _run(words, rest)
            except SystemExit as ended:
                status = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                imported.write(
                    json.dumps([name for name in slow if name in sys.modules])
                )
                imported.flush()
                os._exit(status)
        _, status = os.wait()
        said.seek(0)
        imported.seek(0)
        return [
            os.waitstatus_to_exitcode(status),
            said.read(),
            json.loads(imported.read() or "[]"),
        ]


def _run(words: Sequence[str], rest: Sequence[str]) -> int:
    """Run a command: `moe-ckpt` and its words, `-m` and a module, or a script."""
    if words[0] == "moe-ckpt":
        # imported in the fork, like all imports of the command
        from moe_ckpt import cli  # noqa: PLC0415

        return cli.main([*words[1:], *rest])
    sys.argv = [words[-1], *rest]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    return 0


if __name__ == "__main__":
    main()
