"""`moe-ckpt door install|remove`: the file by which the variable MOE_CKPT attaches to
programs of this environment.

Python reads the file, of one line, at each start in the environment. Without the
variable the line does nothing. Nothing but this command puts the file there: code that
runs at each start of Python is for the user to ask for.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.arguments import Parser
from moe_ckpt.config import require_choice
from moe_ckpt.errors import ConfigError, exit_status

NAME = "moe_ckpt_door.pth"
LINE = (
    'import os; os.environ.get("MOE_CKPT") and'
    ' __import__("moe_ckpt.door").door.enter()\n'
)
"""Without the variable the line imports nothing of this package, and outlives its
removal.
"""


def main(arguments: Sequence[str]) -> int:
    """Install or remove the file; return the exit status."""
    description = (
        "Lets the variable MOE_CKPT attach to programs that this environment's Python"
        " starts."
    )
    parser = Parser(prog="moe-ckpt door", description=description)
    parser.add_argument(
        "action", metavar="install|remove", help="put the file there, or take it away"
    )

    def change() -> None:
        action = parser.parse_args(arguments).action
        require_choice("ACTION", action, ["install", "remove"])
        change_file(Path(sysconfig.get_path("purelib")), is_wanted=action == "install")

    return exit_status(change)


def change_file(folder: Path, *, is_wanted: bool) -> None:
    """Put the file into a folder, or remove it, and print where. Raises ConfigError if
    the folder cannot be written.
    """
    path = folder / NAME
    try:
        if is_wanted:
            path.write_text(LINE)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"site-packages: got {str(folder)!r}, wanted a folder that can be written"
            f" ({error})"
        ) from error
    print(f"{'installed' if is_wanted else 'removed'} {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
