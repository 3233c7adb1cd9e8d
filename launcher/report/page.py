"""A report as one HTML file that needs no other file.

Styles, plotly.js, data and tables are inside.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from launcher.report.facts import Facts
from launcher.report.plots_of_run import plots_of_run
from launcher.report.plots_of_runs import plots_of_runs
from launcher.report.summary import QUANTITIES, headline, shown
from launcher.report.tables import (
    compared,
    faults,
    numbers_of,
    recoveries,
    time_of_ranks,
    time_of_runs,
)

_CARDS = (
    "ettr",
    "wall_s",
    "launch_s",
    "recoveries",
    "faults_cost_s",
    "stall_percent",
    "stall_ms",
    "memory_mib",
    "tokens_lost",
)
_WIDE = ("time", "ranks", "recoveries")


def to_html(runs: Sequence[Facts]) -> str:
    """Return the whole page."""
    together = plots_of_runs(runs)
    alone = [  # keys are unique on the page
        [replace(plot, key=f"{plot.key}-{number}") for plot in plots_of_run(facts)]
        for number, facts in enumerate(runs)
    ]
    shown_plots = [
        plot for plots in (together, *alone) for plot in plots if plot.choices
    ]
    figures = {
        f"plot-{plot.key}": [each for _, each in plot.choices] for plot in shown_plots
    }
    # without `<` the data cannot end the script element
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    # StrictUndefined makes a mistyped name in the template an error, not an empty cell
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined
    )
    environment.globals.update(
        asset=lambda name: Markup(_asset(name)),
        cards=[quantity for quantity in QUANTITIES if quantity.key in _CARDS],
        wide=_WIDE,
        **{
            each.__name__: each
            for each in (
                headline,
                shown,
                compared,
                faults,
                numbers_of,
                recoveries,
                time_of_ranks,
            )
        },
        time_of_runs=time_of_runs,
    )
    return environment.get_template("page.html.jinja").render(
        name=runs[0].run.name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        together=together,
        alone=alone,
        data=Markup(data),
        plotly=Markup(get_plotlyjs()),
    )


def _asset(name: str) -> str:
    return files("launcher.report").joinpath(name).read_text()
