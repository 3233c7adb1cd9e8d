"""Command lines of settings: Hydra's overrides without Hydra's own options.

`train`, `simulate` and `moe-ckpt train` share this module. An override is `GROUP=FILE`,
`KEY=VALUE`, `+KEY=VALUE` or `~KEY`. Must not: import Hydra.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt import __version__
from moe_ckpt.arguments import Parser
from moe_ckpt.config import is_utf8, require, require_choice
from moe_ckpt.errors import ConfigError

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
_INSTEAD = {
    ("--multirun", "-m"): "one start for each value: there are no sweeps yet",
    ("--config-dir", "-cd"): "overrides of the settings that --help lists",
    (
        "--config-name",
        "-cn",
        "--config-path",
        "-cp",
    ): "overrides of the settings that --help lists",
    (
        "--info",
        "-i",
        "--hydra-help",
        "--package",
        "-p",
        "--resolve",
        "-c",
    ): "--help, or --cfg job",
    (
        "--run",
        "-r",
        "--experimental-rerun",
        "--shell-completion",
        "-sc",
    ): "no option of Hydra",
}
"""Hydra's own options, which would train nothing, and the alternative to each."""


def make_parser(prog: str, description: str) -> Parser:
    """Return the parser of a command that takes overrides.

    Args:
        prog: The name of the command.
        description: The text of `--help`.
    """
    parser = Parser(prog=prog, description=description, add_help=False)
    parser.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="explain all options and settings, and end",
    )
    parser.add_argument(
        "--version", action="version", version=f"moe-ckpt {__version__}"
    )
    parser.add_argument(
        "--cfg",
        choices=["job"],
        help="print the settings as they are composed, and end",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="GROUP=FILE or KEY=VALUE"
    )
    return parser


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line of options and overrides, in any order.

    Args:
        parser: A parser of `make_parser`.
        arguments: The words of the command line.

    Returns:
        The options, with the overrides as `overrides`.

    Raises:
        ConfigError: An option is unknown, or a setting has two values.
    """
    options, unknown = parser.parse_known_intermixed_args(arguments)
    for word in unknown:
        option = word.partition("=")[0]
        for names, wanted in _INSTEAD.items():
            require(option not in names, option, "an option of Hydra", wanted)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    require_one_value_each(options.overrides)
    return options


def require_one_value_each(overrides: Sequence[str]) -> None:
    """Require a single value for each setting and each choice of a file.

    Raises:
        ConfigError: A setting has two different values, or text that is not UTF-8.
    """
    values: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        require(is_utf8(override), key, value, "a text in UTF-8")
        first = values.setdefault(key, value)
        if first != value:
            raise ConfigError(f"{key}: got {first!r} and {value!r}, wanted one value")


def last_values(overrides: Sequence[str]) -> list[str]:
    """Drop overrides of a setting that a later override sets again.

    Used for the defaults of a script, followed by the overrides of the script's user.
    """
    last = {override.lstrip("+").partition("=")[0]: override for override in overrides}
    return list(last.values())


def help_text(name: str, overrides: Sequence[str]) -> str:
    """Return the files that a command composes: keys, defaults and comments.

    Args:
        name: The file in conf/ that names the groups, without its suffix.
        overrides: The overrides of the command line.

    Raises:
        ConfigError: A choice does not exist.
    """
    text = (CONF_DIR / f"{name}.yaml").read_text()
    chosen = re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE)
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    asked = {group: choice for group, _, choice in pairs}
    parts = [text.replace("\ndefaults:", "\n\ndefaults:", 1)]
    for group, default in chosen:
        choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
        choice = asked.get(group) or default
        require_choice(group, choice, choices)
        parts.append(
            f"# {group}={choice}; GROUP=CHOICE chooses another one:"
            f" {', '.join(choices)}"
        )
        parts.append(
            textwrap.indent((CONF_DIR / group / f"{choice}.yaml").read_text(), "  ")
        )
    return "\n".join(parts)
