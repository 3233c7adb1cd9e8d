"""A table in Markdown, for reports, the simulator's page and terminals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    A `|` within a cell is escaped.

    Args:
        head: The cells of the first row.
        rows: The cells of the other rows.
    """
    lines = [
        " | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)
    ]
    return [
        f"| {lines[0]} |",
        f"|{' --- |' * len(head)}",
        *(f"| {line} |" for line in lines[1:]),
    ]
