"""The commands `moe-ckpt door install` and `moe-ckpt door remove`.

With the file that these commands install and remove, the variable MOE_CKPT attaches to
programs of this environment. Python reads the file, of one line, at each start in the
environment. Without the variable the line does nothing. Nothing but this command
installs the file: code that runs at each start of Python must be requested by the user.
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
"""Name of the file."""

LINE = (
    'import os; os.environ.get("MOE_CKPT") and'
    ' __import__("moe_ckpt.door").door.enter()\n'
)
"""The line of the file.

Without the variable the line imports nothing of this package, and so survives a removal
of the package.
"""


def main(arguments: Sequence[str]) -> int:
    """Install or remove the file, and return the exit status."""
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
    """Put the file into a folder or remove it there, and print the path.

    Args:
        folder: The folder.
        is_wanted: Whether to install the file.

    Raises:
        ConfigError: The folder cannot be written.
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
