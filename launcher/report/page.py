"""A report as one HTML file that needs nothing else: styles, plotly.js, data and tables, all inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from plotly.offline import get_plotlyjs

from launcher.report.facts import Facts
from launcher.report.figure import Plot
from launcher.report.plots_of_run import plots_of_run
from launcher.report.plots_of_runs import plots_of_runs
from launcher.report.summary import Quantity, headline, quantities, shown
from launcher.report.tables import (
    Column,
    Table,
    compared,
    faults,
    numbers_of,
    recoveries,
    text_of,
    time_of_ranks,
    time_of_runs,
)

_CARDS = ("ettr", "wall_s", "recoveries", "faults_cost_s", "stall_percent", "stall_ms", "memory_mib", "tokens_lost")
_WIDE = ("time", "ranks", "recoveries")
_LONG = 30


def to_html(runs: Sequence[Facts]) -> str:
    """Return the whole page."""
    together = plots_of_runs(runs)
    alone = [[_named(plot, number) for plot in plots_of_run(facts)] for number, facts in enumerate(runs)]
    all_plots = [*together, *(plot for of_run in alone for plot in of_run)]
    name = runs[0].run.name if len(runs) == 1 else f"{len(runs)} runs"
    sections = [_run_section(number, facts, alone[number]) for number, facts in enumerate(runs)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>Report: {escape(name)}</title>",
            f"<style>{_asset('page.css')}</style></head><body><main>",
            f"<h1>{escape(name)}</h1>",
            '<p class="faint">Hover over or tap dotted words and (i) for what they mean; headings sort on click.</p>',
            *(_summary(facts) for facts in runs),
            _table(compared(runs)) if len(runs) > 1 else "",
            "<h2>All runs</h2>" if len(runs) > 1 else "<h2>The run</h2>",
            _plots(together),
            _table(time_of_runs(runs)),
            f'<div class="runs">{"".join(sections)}</div>',
            *(_table(numbers_of(facts)) for facts in runs if len(runs) == 1),
            '</main><div id="tip" role="tooltip" hidden></div>',
            f'<script type="application/json" id="plots">{_data(all_plots)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{_asset('page.js')}</script></body></html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return files("launcher.report").joinpath(name).read_text()


def _named(plot: Plot, number: int) -> Plot:
    """Return a run's plot under a name of its own on the page."""
    return Plot(
        key=f"{plot.key}-{number}",
        title=plot.title,
        means=plot.means,
        choices=plot.choices,
        missing=plot.missing,
        note=plot.note,
    )


def _data(plots: Sequence[Plot]) -> str:
    """Return all figures by plot, safe inside a script element."""
    figures = {_id(plot): [each for _, each in plot.choices] for plot in plots if plot.choices}
    return json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _id(plot: Plot) -> str:
    return f"plot-{plot.key}"


def _summary(facts: Facts) -> str:
    run = facts.run
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    said = f'<div class="problems">This report is of what there is:<ul>{problems}</ul></div>' if problems else ""
    numbers = "".join(_number(each, each.of(facts)) for each in quantities() if each.key in _CARDS)
    first, rest = _first_sentence(headline(facts))
    what = f"ckpt={run.policy}, {run.world_size} ranks, {run.state}, {run.path}"
    return (
        f'<section class="card"><h3>{escape(run.name)}</h3><p class="faint">{escape(what)}</p>'
        f'<p class="headline"><b>{escape(first)}</b> {escape(rest)}</p>{said}'
        f'<div class="numbers">{numbers}</div></section>'
    )


def _number(quantity: Quantity, value: float | None) -> str:
    unit = f" {quantity.unit}" if quantity.unit else ""
    label = _tip(quantity.label, quantity.means)
    return "" if value is None else f'<div class="number"><b>{shown(value)}{unit}</b>{label}</div>'


def _first_sentence(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(". ")
    return (first + ".", rest) if rest else (text, "")


def _run_section(number: int, facts: Facts, plots: Sequence[Plot]) -> str:
    tables = "".join(_table(table, number) for table in (faults(facts), recoveries(facts), time_of_ranks(facts)))
    return f"<section><h2>{escape(facts.run.name)}</h2>{_plots(plots)}{tables}</section>"


def _plots(plots: Sequence[Plot]) -> str:
    """Return the plots, and a line each for those that there is no data for."""
    lines = [f"<li>{escape(plot.title)}: {escape(plot.missing)}</li>" for plot in plots if not plot.choices]
    missing = f'<div class="card faint">Not shown:<ul>{"".join(lines)}</ul></div>' if lines else ""
    return f'<div class="columns">{"".join(_plot(plot) for plot in plots if plot.choices)}{missing}</div>'


def _plot(plot: Plot) -> str:
    wide = " wide" if plot.key.rsplit("-", 1)[0] in _WIDE or plot.key in _WIDE else ""
    return f'<figure class="card{wide}"><h3>{escape(plot.title)}{_info(plot.means)}</h3>{_drawn(plot)}</figure>'


def _drawn(plot: Plot) -> str:
    labels = [label for label, _ in plot.choices]
    options = "".join(f"<option>{escape(label)}</option>" for label in labels)
    select = f'<select aria-label="{escape(plot.title)}: which">{options}</select>' if len(labels) > 1 else ""
    only = f'<p class="faint">{escape(labels[0])}</p>' if len(labels) == 1 and labels[0] else ""
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    height = max(shown["layout"]["height"] for _, shown in plot.choices)
    return f'{select}{only}<div class="plot" id="{_id(plot)}" style="min-height:{height}px"></div>{note}'


def _info(means: str) -> str:
    return (
        f'<span class="info" data-tip="{escape(means)}" tabindex="0" role="note" aria-label="{escape(means)}">i</span>'
    )


def _tip(word: str, means: str) -> str:
    return f'<span data-tip="{escape(means)}" tabindex="0">{escape(word)}</span>' if means else escape(word)


def _table(table: Table, number: int | None = None) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    has_words = [any(isinstance(cell, str) for cell in cells) for cells in zip(*table.rows, strict=True)]
    head = "".join(map(_heading, table.columns, has_words))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    table_id = f"table-{table.key}" if number is None else f"table-{table.key}-{number}"
    parts = (
        f'<div class="scroll"><table id="{table_id}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return f'<div class="card"><h3>{escape(table.title)}</h3>{parts if table.rows else ""}{note}</div>'


def _heading(column: Column, has_words: bool) -> str:
    unit = f"<small>{escape(column.unit)}</small>" if column.unit else ""
    tip = f' data-tip="{escape(column.means)}"' if column.means else ""
    of_words = ' class="word"' if has_words else ""
    return f'<th scope="col"{of_words}><button{tip}>{escape(column.label)}</button>{unit}</th>'


def _cell(cell: str | float | None) -> str:
    if isinstance(cell, str):
        return f'<td class="{"words" if len(cell) > _LONG else "word"}">{escape(cell)}</td>'
    return f'<td data-value="{"" if cell is None else cell}">{text_of(cell)}</td>'
