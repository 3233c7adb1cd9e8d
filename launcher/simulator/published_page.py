"""The page that compares published numbers with simulations: docs/simulator.md.

`python -m launcher.simulate page=docs/simulator.md` writes the whole page.
benchmarks/published.csv has the published cells, from two sources: MoEvement
(arXiv:2412.15411) and FlowCheck (EuroSys 25). Must not: choose the cells to show.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Template

from launcher.config import CONF_DIR
from launcher.markdown_table import table_lines
from launcher.simulator.config import compose_machine
from launcher.simulator.runner import Result, Row, run_experiment
from launcher.simulator.servers_page import CASES, JOB, server_lines
from moe_ckpt.config import FlowcheckConfig

CELLS = CONF_DIR.parent / "benchmarks" / "published.csv"
"""File of the published cells."""

CLUSTERS = ("a100_azure", "h100_ib", "h200", "local")
"""Clusters whose constants the page lists."""

NEAR = 0.02
"""Largest deviation of a prediction that counts as near."""

EXACT = "table7_exact"
"""Experiment of Table 7's formats with the bytes that bit-exact snapshots need."""
_WITH_EXACT = ("Table 7", "MoEvement", "ettr")

OWN_RUNS = (
    "<!-- own runs: written by benchmarks/predicted.py -->",
    "<!-- end of own runs -->",
)
"""First and last line of the part about own runs, which other programs write."""

_STREAMS_OF_A_SERVER, _SERVER_USD_AN_HOUR, _NODE_USD_AN_HOUR = 2, 1.37, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A published number, and the row of an experiment that the number belongs to."""

    source: str
    """Table or figure of the paper."""

    experiment: str
    """Name of the experiment."""

    case: str
    """Case of the experiment."""

    policy: str
    """Policy of the experiment."""

    variant: str
    """Variant of the experiment; `*`: the first variant."""

    metric: str
    """Key of `METRICS`, or the name of a comparison, a colon and another policy."""

    value: float
    """Published number, in the unit of the metric."""

    trust: str
    """`include`; `flag` or `exclude` if the cell contradicts other cells of its row or
    table.
    """

    note: str
    """Remark on the number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A cell, and the prediction of a simulation."""

    cell: Cell
    predicted: float

    @property
    def deviation(self) -> float:
        return self.predicted - self.cell.value


def read_cells(path: Path = CELLS) -> list[Cell]:
    """Return the published cells.

    Args:
        path: The file.
    """
    with path.open(newline="") as file:
        return [
            Cell(**{**line, "value": float(line["value"])})
            for line in csv.DictReader(file)
        ]


def compare_cells(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Compared]:
    """Return the cells with the predictions.

    Args:
        cells: The cells of one experiment.
        rows: The results of the experiment.
    """
    # reversed, so that `*` is the first variant
    results = {(row.case, row.policy, "*"): row.result for row in reversed(rows)}
    results |= {(row.case, row.policy, row.variant): row.result for row in rows}
    return [Compared(cell=cell, predicted=_predicted(cell, results)) for cell in cells]


def write_page(
    path: Path,
    arguments: Sequence[str],
    cells: Sequence[Cell],
    say: Callable[[str], None] = print,
    server_cases: Collection[str] = tuple(CASES),
) -> None:
    """Simulate all rows that have cells, and write the page.

    The page's part about own runs stays.

    Args:
        path: The page.
        arguments: The overrides of each simulation.
        cells: The published cells.
        say: A function that gets a line before each experiment.
        server_cases: The cases of the table of servers.
    """
    compared: list[Compared] = []
    runs = 0
    for experiment in dict.fromkeys(cell.experiment for cell in cells):
        say(f"simulating {experiment}")
        of_it = [cell for cell in cells if cell.experiment == experiment]
        others = {cell.metric.partition(":")[2] for cell in of_it} - {""}
        names = {
            "cases": {cell.case for cell in of_it},
            "policies": {cell.policy for cell in of_it} | others,
        }
        rows = list(run_experiment([f"experiment={experiment}", *arguments], **names))
        runs = rows[0].result.simulation.general.runs
        compared += compare_cells(of_it, rows)
    own = path.read_text() if path.exists() else ""
    tables = {
        "summary": _summary(compared),
        "servers": server_lines(arguments, server_cases),
        "tables": _tables(compared),
        "exact": _exact(compared, arguments),
        "constants": _constants(),
    }
    page = Template(
        files("launcher.simulator").joinpath("published_page.md.jinja").read_text(),
        keep_trailing_newline=True,
    )
    text = page.render(
        arguments=" ".join(arguments),
        runs=runs,
        job=" ".join(JOB),
        own=OWN_RUNS[0]
        + own.partition(OWN_RUNS[0])[2].partition(OWN_RUNS[1])[0]
        + OWN_RUNS[1],
        **{name: "\n".join(lines) for name, lines in tables.items()},
    )
    path.write_text(text)


def _predicted(cell: Cell, results: Mapping[tuple[str, str, str], Result]) -> float:
    result = results[cell.case, cell.policy, cell.variant]
    metric, _, other = cell.metric.partition(":")
    if other:
        over = (
            result.prediction.ettr
            / results[cell.case, other, cell.variant].prediction.ettr
        )
        return over if metric == "ettr_over" else 100 * (over - 1)
    return METRICS[metric](result)


def _summary(compared: Sequence[Compared]) -> list[str]:
    """Return a table of the deviations of ETTR cells, by policy."""
    rows = []
    found = [
        one
        for one in compared
        if (one.cell.metric, one.cell.trust) == ("ettr", "include")
    ]
    counted = [one for one in found if one.cell.source in ("Table 3", "Table 7")]
    for policy in ("MoEvement", "Gemini", "CheckFreq", "MoC"):
        deviations = [one.deviation for one in counted if one.cell.policy == policy]
        if deviations:
            near = sum(abs(deviation) <= NEAR for deviation in deviations)
            ends = (
                f"{statistics.fmean(deviations):+.3f}",
                f"{max(deviations, key=abs):+.3f}",
            )
            rows.append([policy, str(len(deviations)), str(near), *ends])
    return table_lines(
        ["policy", "cells", f"within {NEAR}", "mean deviation", "largest"], rows
    )


def _tables(compared: Sequence[Compared]) -> Iterator[str]:
    head = (
        "row",
        "policy",
        "variant",
        "what",
        "published",
        "predicted",
        "deviation",
        "note",
    )
    for source in dict.fromkeys(one.cell.source for one in compared):
        yield f"## {source[0].upper()}{source[1:]}\n"
        yield from table_lines(
            head, [_row(one) for one in compared if one.cell.source == source]
        )
        yield ""


def _row(one: Compared) -> list[str]:
    cell = one.cell
    notes = "; ".join(
        text
        for text in ("" if cell.trust == "include" else cell.trust, cell.note)
        if text
    )
    relative = f" ({one.deviation / cell.value:+.0%})" if cell.value else ""
    numbers = (
        f"{cell.value:g}",
        f"{one.predicted:.4g}",
        f"{one.deviation:+.3g}{relative}",
    )
    return [cell.case, cell.policy, cell.variant, cell.metric, *numbers, notes]


def _exact(compared: Sequence[Compared], arguments: Sequence[str]) -> list[str]:
    """Return a table of MoEvement's ETTR in Table 7, with the bytes of both counts."""
    both = [
        one
        for one in compared
        if (one.cell.source, one.cell.policy, one.cell.metric) == _WITH_EXACT
    ]
    cases = {one.cell.case for one in both}
    results = (
        run_experiment([f"experiment={EXACT}", *arguments], cases=cases)
        if cases
        else ()
    )
    exact = {(row.case, row.variant): row.result.prediction.ettr for row in results}
    rows = []
    for one in both:
        cell, predicted = one.cell, exact[one.cell.case, one.cell.variant]
        rows.append(
            [
                cell.case,
                cell.variant,
                f"{cell.value:g}",
                f"{one.predicted:.4f}",
                f"{predicted:.4f}",
            ]
        )
    return table_lines(
        ["formats", "MTBF", "published", "the paper's bytes", "exact bytes"], rows
    )


def _constants() -> list[str]:
    columns = [asdict(compose_machine([f"cluster={name}"])[0]) for name in CLUSTERS]
    rows = (
        [
            f"`{key}`",
            *(value if isinstance(value, str) else f"{value:g}" for value in values),
        ]
        for key, *values in zip(
            columns[0], *(column.values() for column in columns), strict=True
        )
        if key != "name"
    )
    return table_lines(["key", *CLUSTERS], rows)


def _server_share(result: Result) -> float:
    """Return the share of an iteration in which servers compute a state.

    FlowCheck's deadline is 1.
    """
    return result.saving.served_s / result.simulation.setup.costs.iteration_s


def _server_usd_a_day(result: Result) -> float:
    """Return the price of a day of servers, and of the time that faults take, in USD.

    There is one server for each two mirrored streams. FlowCheck, section 8.5, has the
    prices, and section 7 the two network cards of a server.
    """
    policy, setup = result.simulation.policy, result.simulation.setup
    assert isinstance(policy, FlowcheckConfig)
    layout = setup.job.layout
    num_servers = policy.captures * layout.pp * layout.tp / _STREAMS_OF_A_SERVER
    lost_usd = (1 - result.prediction.ettr) * setup.cluster.nodes * _NODE_USD_AN_HOUR
    return 24 * (lost_usd + num_servers * _SERVER_USD_AN_HOUR)


def _memory_gb(result: Result, part: str) -> float:
    """Return host memory of the whole job in GB, without copies for peers."""
    memory, setup = result.saving.memory, result.simulation.setup
    assert memory is not None
    num_bytes = getattr(memory, part)
    if part == "total_bytes":
        num_bytes -= memory.copies_bytes
    is_of_job = result.saving.sizes_are_of_job
    return num_bytes / 1e9 * (1 if is_of_job else setup.job.layout.world_size)


METRICS: Mapping[str, Callable[[Result], float]] = {
    "ettr": lambda result: result.prediction.ettr,
    "recovery_total_s": lambda result: result.prediction.recovery_s,
    "overhead_s_per_iter": lambda result: (
        result.prediction.overhead * result.simulation.setup.costs.iteration_s
    ),
    "interval_iters": lambda result: result.saving.settled.interval_iters,
    "server_share": _server_share,
    "server_usd_a_day": _server_usd_a_day,
    "w_sparse": lambda result: result.saving.settled.repeat[0].num_slots,
    "snapshots_GB": lambda result: _memory_gb(result, "snapshots_bytes"),
    "logs_GB": lambda result: _memory_gb(result, "boundary_log_bytes"),
    "host_GB": lambda result: _memory_gb(result, "total_bytes"),
}
"""Functions that take a published metric from a result, by the metric's name."""
