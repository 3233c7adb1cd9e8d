"""The part of a page between two marks, which a benchmark writes.

The text around the marks stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def rewrite(path: Path, marks: tuple[str, str], change: Callable[[str], str]) -> None:
    """Replace the text between two marks of a page.

    Ends the program if the page lacks the marks.

    Args:
        path: The page.
        marks: The mark before the text, and the mark after the text.
        change: Returns the new text, given the text between the marks.
    """
    before, _, rest = path.read_text().partition(marks[0])
    found, end, after = rest.partition(marks[1])
    if not end:
        sys.exit(
            f"{path}: got no {marks[0]} and {marks[1]}, wanted them around the table"
        )
    path.write_text(f"{before}{marks[0]}\n{change(found).strip()}\n{marks[1]}{after}")
