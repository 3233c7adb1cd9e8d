"""A table in Markdown, for reports, the simulator's page and terminals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; a `|` within a cell does not end it."""
    lines = [
        " | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)
    ]
    return [
        f"| {lines[0]} |",
        f"|{' --- |' * len(head)}",
        *(f"| {line} |" for line in lines[1:]),
    ]
