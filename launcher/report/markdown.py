"""A report as Markdown: the sentences and the tables, for a terminal or an issue."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.facts import Facts
from launcher.report.summary import headline
from launcher.report.tables import Table, compared, faults, recoveries, text_of, time_of_ranks, time_of_runs


def to_markdown(runs: Sequence[Facts]) -> str:
    """Return the whole report."""
    lines = ["# Report", ""]
    for facts in runs:
        lines += [f"**{facts.run.name}** (ckpt={facts.run.policy}): {headline(facts)}", ""]
        lines += [f"- {problem}" for problem in facts.run.problems]
        lines += [""] if facts.run.problems else []
    lines += _turned(compared(runs)) + _table(time_of_runs(runs))
    for facts in runs:
        heading = f"{facts.run.name}: " if len(runs) > 1 else ""
        for table in (faults(facts), recoveries(facts), time_of_ranks(facts)):
            lines += _table(table, heading)
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table, heading: str = "") -> list[str]:
    labels = [f"{column.label}, {column.unit}" if column.unit else column.label for column in table.columns]
    return _lines(f"{heading}{table.title}", [labels, *([text_of(cell) for cell in row] for row in table.rows)], table)


def _turned(table: Table) -> list[str]:
    """Return a table with its rows as columns: many quantities of a few runs."""
    labels = [f"{column.label}, {column.unit}" if column.unit else column.label for column in table.columns]
    rows = [[label, *(text_of(row[i]) for row in table.rows)] for i, label in enumerate(labels)]
    return _lines(table.title, rows, table)


def _lines(title: str, rows: Sequence[Sequence[str]], table: Table) -> list[str]:
    head, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    shown = [f"| {head} |", f"|{' --- |' * len(rows[0])}", *(f"| {row} |" for row in body)] if table.rows else []
    note = [table.note] if table.note else []
    return [f"## {title}", "", *shown, *([""] if shown and note else []), *note, ""]
