"""A training loop as an attachment expects it: what to install, the check of its
functions, the mark of an attachment.

Functions of these loops call each other as module globals, so an attribute of a module
is a seam. A seam that moved would leave a run that looks protected and is not
(Megatron-Bridge issue 6086): it is an error by name before training.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moe_ckpt.errors import ConfigError

Names = Mapping[str, Sequence[str]]
Python = tuple[int, int]
"""Major and minor version."""
_ATTACHED = "_moe_ckpt_attached"
_THIS = sys.version_info[:2]


def what_to_install(
    requirement: str, python: Python, *, or_newer: bool, this: Python = _THIS
) -> str:
    """Return what gives a package, and on which Python if this is another one.

    On another Python, pip silently takes an older release of the package, which does
    not have the seams.

    Args:
        requirement: The package and its releases, for pip.
        python: The Python for which pip has these releases.
        or_newer: Whether newer ones have them, too.
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
    """Mark a loop's module as attached. Raises ConfigError for a second attachment."""
    if is_attached(module):
        package = module.__name__.rpartition(".")[0]
        raise ConfigError(
            f"moe_ckpt.run: got a second attachment to {package}, wanted one a process"
        )
    setattr(module, _ATTACHED, True)


def is_attached(module: Any) -> bool:
    """Return whether a loop's module, in this process, has an attachment."""
    return getattr(module, _ATTACHED, False)


def require_seams(module: Any, parameters: Names, calls: Names, tried: str) -> None:
    """Require functions of a module, by name, to have at least these parameters and to
    find these names when they run.

    The same holds for methods of a class. `tried` names the version that the names are
    from. Raises ConfigError.
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
        # a decorator's own code calls none of these names
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
