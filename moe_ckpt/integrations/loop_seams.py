"""Checks that a training loop has the functions that an attachment expects.

Functions of these loops call each other as module globals. An attribute of a module is
therefore a seam: an attachment replaces the attribute. If a release moves a seam, a run
looks protected and is not (Megatron-Bridge issue 6086). A moved seam is therefore an
error before training, which names the seam. The module also owns the texts that say
which release to install, and the mark of an attached module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moe_ckpt.errors import ConfigError

Names = Mapping[str, Sequence[str]]
"""Names of parameters or of called functions, by the name of a function."""

Python = tuple[int, int]
"""Major and minor version."""
_ATTACHED = "_moe_ckpt_attached"
_THIS = sys.version_info[:2]


def what_to_install(
    requirement: str, python: Python, *, or_newer: bool, this: Python = _THIS
) -> str:
    """Return the command that installs a package, and the Python if another is needed.

    On another Python, pip silently takes an older release of the package, which does
    not have the seams.

    Args:
        requirement: The package and its releases, for pip.
        python: The Python for which pip has these releases.
        or_newer: Whether pip has these releases for newer Pythons, too.
        this: The running Python.

    Example:
        >>> what_to_install("megatron-core>=0.18", (3, 12), or_newer=True, this=(3, 11))
        "Python 3.12 or newer (this is 3.11), and pip install 'megatron-core>=0.18'"
    """
    command = f"pip install '{requirement}'"
    if this == python or (or_newer and this > python):
        return command
    wanted = _name(python) + (" or newer" if or_newer else "")
    return f"Python {wanted} (this is {_name(this)}), and {command}"


def _name(python: Python) -> str:
    return ".".join(map(str, python))


def mark_attached(module: Any) -> None:
    """Mark a loop's module as attached.

    Raises:
        ConfigError: The module has an attachment already.
    """
    if is_attached(module):
        package = module.__name__.rpartition(".")[0]
        raise ConfigError(
            f"moe_ckpt.run: got a second attachment to {package}, wanted one a process"
        )
    setattr(module, _ATTACHED, True)


def is_attached(module: Any) -> bool:
    """Return whether a loop's module has an attachment in this process."""
    return getattr(module, _ATTACHED, False)


def require_seams(module: Any, parameters: Names, calls: Names, tried: str) -> None:
    """Require functions of a module to be as in a tested version.

    Args:
        module: The module, or a class whose methods are checked.
        parameters: The parameters that each function must have at least.
        calls: The names that each function must look up when it runs.
        tried: The version from which the names are taken, for an error.

    Raises:
        ConfigError: A function is missing, or lacks one of these names.
    """
    for name, wanted in parameters.items():
        got = list(inspect.signature(_function(module, name)).parameters)
        _require_seam(
            module,
            name,
            "the parameters",
            [each for each in wanted if each not in got],
            tried,
        )
    for name, wanted in calls.items():
        # the code of a decorator calls none of these names
        function = inspect.unwrap(_function(module, name))
        missing = [each for each in wanted if each not in function.__code__.co_names]
        _require_seam(module, name, "calls of", missing, tried)


def _function(module: Any, name: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{module.__name__}.{name}: got nothing, wanted the function that training"
            " calls"
        )
    return function


def _require_seam(
    module: Any, name: str, kind: str, missing: Sequence[str], tried: str
) -> None:
    if missing:
        wanted = f"one with {kind} {', '.join(missing)}, as in {tried}"
        raise ConfigError(
            f"{module.__name__}.{name}: got another function than expected, wanted"
            f" {wanted}"
        )
