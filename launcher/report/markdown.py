"""A report as Markdown: sentences and tables, for a terminal or an issue."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.markdown_table import table_lines
from launcher.report.facts import Facts
from launcher.report.summary import headline
from launcher.report.tables import (
    Table,
    compared,
    faults,
    recoveries,
    text_of,
    time_of_ranks,
    time_of_runs,
)


def to_markdown(runs: Sequence[Facts]) -> str:
    """Return the whole report."""
    lines = ["# Report", ""]
    for facts in runs:
        lines += [
            f"**{facts.run.name}** (ckpt={facts.run.policy}): {headline(facts)}",
            "",
        ]
        lines += [f"- {problem}" for problem in facts.run.problems]
        lines += [""] if facts.run.problems else []
    lines += _section(compared(runs), is_turned=True) + _section(time_of_runs(runs))
    for facts in runs:
        heading = f"{facts.run.name}: " if len(runs) > 1 else ""
        for table in (faults(facts), recoveries(facts), time_of_ranks(facts)):
            lines += _section(table, heading)
    return "\n".join(lines).rstrip() + "\n"


def _section(table: Table, heading: str = "", *, is_turned: bool = False) -> list[str]:
    """Return a table below its title.

    Args:
        table: The table.
        heading: The start of the title.
        is_turned: Whether rows become columns, for many quantities of a few runs.
    """
    labels = [
        f"{column.label}, {column.unit}" if column.unit else column.label
        for column in table.columns
    ]
    rows = [labels, *([text_of(cell) for cell in row] for row in table.rows)]
    if is_turned:
        rows = list(map(list, zip(*rows, strict=True)))
    shown = [*table_lines(rows[0], rows[1:]), ""] if table.rows else []
    note = [table.note, ""] if table.note else []
    return [f"## {heading}{table.title}", "", *([*shown, *note] or [""])]
