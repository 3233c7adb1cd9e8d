"""A part of a page that a benchmark writes, between two marks; what stands around it
stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def rewrite(path: Path, marks: tuple[str, str], change: Callable[[str], str]) -> None:
    """Put what `change` makes of the text between the marks in its place. Ends the
    program where they are not there.
    """
    before, _, rest = path.read_text().partition(marks[0])
    found, end, after = rest.partition(marks[1])
    if not end:
        sys.exit(
            f"{path}: got no {marks[0]} and {marks[1]}, wanted them around the table"
        )
    path.write_text(f"{before}{marks[0]}\n{change(found).strip()}\n{marks[1]}{after}")
