"""The page that holds the simulator to account: published cells, what is simulated of them, how far that is off.

`python -m launcher.simulate page=docs/simulator.md` writes all of it. benchmarks/published.csv has the cells, of one
published source: MoEvement (arXiv:2412.15411). Must not: choose which cells to show.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from launcher.config import CONF_DIR
from launcher.simulator.config import compose_machine
from launcher.simulator.runner import Result, Row, run_experiment
from launcher.simulator.servers_page import CASES, JOB, server_lines
from moe_ckpt.sim.hardware import ClusterConfig

CELLS = CONF_DIR.parent / "benchmarks" / "published.csv"
CLUSTERS = ("a100_azure", "h100_ib", "h200", "local")
NEAR = 0.02
EXACT = "table7_exact"
"""The experiment that takes Table 7's formats with the bytes that bit-exact snapshots need."""

OWN_RUNS = ("<!-- own runs: written by benchmarks/predicted.py -->", "<!-- end of own runs -->")
_GIGA = 1e9
_TEXT = """\
# The simulator, held against what was published

Written by `python -m launcher.simulate page=docs/simulator.md {arguments}`; do not edit. How it works stands in
[moe_ckpt/sim](../moe_ckpt/sim), how to use it in `python -m launcher.simulate --help`.

All cells of the MoEvement paper (arXiv:2412.15411, Tables 3, 6 and 7 and figures) that
[benchmarks/published.csv](../benchmarks/published.csv) has are below, with what is simulated of them. Nothing is tuned
cell by cell: there is one set of constants for each cluster, at the end, and one override list for each row and
column in [conf/experiment](../conf/experiment). Given are the seconds of an iteration in Tables 3 and 7 (a profile, as
the paper's own simulator takes one); that they hold whatever the number formats is the paper's, too. Predictions are
means over {runs} runs of 12 hours with Poisson faults, each of which takes a node; the published are one run each.

## How far off

{summary}

## Why

- **MoEvement** follows the paper's formula: overhead, and one and a half windows an MTBF. Here the windows come from
  Algorithm 1 as printed (`ckpt.paper_exact`), and a fault costs finding it, rebuilding groups, loading, and the replay
  of the lost stages alone.
- **W** follows Algorithm 1 only if the whole model is copied through one link (`cluster.copies_share=job`) of about
  21.5 GB/s. Then MoE-LLaVa's whole state fits into an iteration (W = 1, published 3), QWen-MoE needs 6 (published 5),
  and FP8/FP16/FP32+FP32 needs 6 (published 4): no one rate gives those with the others.
- **Recovery totals of MoEvement** are published as 1 to 3 iterations a fault, 3 to 8 times less than the paper's own
  formula, which its ETTR cells follow. Both cannot be; what is simulated lies between, and half of it is the time to
  find a fault and to meet again.
- **CheckFreq and Gemini** lie above what is published, by 0.04 on average. Published recovery totals are half an
  interval a fault for DeepSeek-MoE under Gemini, but several times that for the smaller models (MoE-LLaVa under
  CheckFreq: 211 s a fault, where a whole interval takes 97 s); published ETTRs are below what overhead and recovery of
  the same row make, at 10 minutes by up to 0.1. Simulated are half an interval trained again, and a reload of the whole
  state. Gemini's published stalls grow with their frequency (6 to 12 s a checkpoint for the same state); simulated is
  one copy rate, and the best interval by the policy's own arithmetic, near which ETTR is flat. MoE-LLaVa's published
  intervals would fit a state several times as large as that of its 2.9 billion parameters.
- **MoC** is the policy itself with its own settings: as many experts to host memory as an iteration hides, one of each
  layer to storage, and twice as many whenever lost tokens pass an equal part of 3.75 % (how the limit is divided, the
  paper does not say). A lost node takes all back to what is in storage. Published overheads rise to that of saving all
  experts within 12 faults; here that takes an MTBF of 10 to 20 minutes, and never happens to MoE-LLaVa, whose experts
  are few and soon saved.
- **Table 6**: 24 bytes a parameter for two whole states, published are 26. A window of W slots keeps 12 + (W - 1)
  bytes a parameter here. Logs hold all that crosses stages since the oldest window's start, in 16 bits: 20 to 70 times
  what is published, which is less than a single iteration's.
- **Figure 11**: machines, batch and precision are not stated. Here each rank has a link of its own, and windows are 1.
- **Figure 13**: the MTBF is not stated. No variant comes near 0.4 here, at 10 minutes, because replays are short; the
  order of the variants is the published one.

## Servers or sparse windows

ETTR of `ckpt=flowcheck` beside `ckpt=moevement` (`window=auto`) and `ckpt=gemini`, with
`{job}`;
each rank has its own node's server and one on another node, which are the training nodes' own processors.

{servers}

- **Servers that read a mirror port are better than windows** where copies to host memory are slow beside the state, so
  that a window has several slots: such servers cost no copies, a fault takes all ranks back one iteration, and no stage
  replays a window and a half. That takes expert-data parallelism above 1 (else no gradient of an expert crosses the
  network, and ranks hand experts over), few data-parallel ranks, since each steps the whole state of its parameters
  (a mirror sees gradients of an optimizer without shards only), and processors that take all steps of a rank and of its
  neighbour within an iteration.
- **Windows are better** with fast links, where a window has one slot and costs next to nothing; with EP = DP; where
  servers need more than an iteration; and where many data-parallel ranks had shared the optimizer's step.
- **Servers with the tap** never are: training waits each iteration for a copy of gradients, a third of the state, where
  a window's copies overlap with training. They save replays only, which with one slot are as short as an iteration.
- **Price.** These servers add no machine. The paper counts 1.37 USD an hour for a server with an RDMA card beside 30
  for eight A100: one such server a node makes an hour 4.6 % dearer. Beside sparse windows only the row of 1 GB/s and an
  MTBF of 600 s saves more than that.

## Own runs

{own}

{tables}
## Table 7 with exact bytes

ETTR of MoEvement where an operator in full has its compute weights as well, wherever they are not the rounding of the
stored master weights ([formats.md](formats.md)), beside the bytes that the paper counts.

{exact}

## Constants

[conf/cluster/h200.yaml](../conf/cluster/h200.yaml) explains each key.

{constants}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A published number, and the row of an experiment that it belongs to."""

    source: str
    experiment: str
    case: str
    policy: str
    variant: str
    metric: str
    value: float
    trust: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A cell, and what is simulated of it."""

    cell: Cell
    predicted: float

    @property
    def deviation(self) -> float:
        return self.predicted - self.cell.value


def read_cells(path: Path = CELLS) -> list[Cell]:
    """Return the published cells."""
    with path.open(newline="") as file:
        return [Cell(**{**line, "value": float(line["value"])}) for line in csv.DictReader(file)]


def compare_cells(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Compared]:
    """Return the cells of an experiment's rows with what is simulated of them."""
    results = {(row.case, row.policy, row.variant): row.result for row in rows}
    anywhere = {(row.case, row.policy, "*"): row.result for row in reversed(rows)}
    return [Compared(cell=cell, predicted=_predicted(cell, {**anywhere, **results})) for cell in cells]


def write_page(
    path: Path,
    arguments: Sequence[str],
    cells: Sequence[Cell],
    say: Callable[[str], None] = print,
    server_cases: Collection[str] = tuple(CASES),
) -> None:
    """Simulate all rows that there are cells of, and write the page. `arguments` go to each simulation.

    The page's part about own runs stays.
    """
    compared: list[Compared] = []
    runs = ""
    for experiment in dict.fromkeys(cell.experiment for cell in cells):
        say(f"simulating {experiment}")
        of_it = [cell for cell in cells if cell.experiment == experiment]
        others = {cell.metric.partition(":")[2] for cell in of_it} - {""}
        names = {"cases": {cell.case for cell in of_it}, "policies": {cell.policy for cell in of_it} | others}
        rows = list(run_experiment([f"experiment={experiment}", *arguments], **names))
        runs = str(rows[0].result.simulation.general.runs)
        compared += compare_cells(of_it, rows)
    cases = {one.cell.case for one in compared if _has_exact(one.cell)}
    exact = list(run_experiment([f"experiment={EXACT}", *arguments], cases=cases)) if cases else []
    own = path.read_text() if path.exists() else ""
    text = _TEXT.format(
        own=OWN_RUNS[0] + own.partition(OWN_RUNS[0])[2].partition(OWN_RUNS[1])[0] + OWN_RUNS[1],
        arguments=" ".join(arguments),
        runs=runs,
        summary="\n".join(_summary(compared)),
        tables="\n".join(_tables(compared)),
        job=" ".join(JOB),
        servers="\n".join(server_lines(arguments, server_cases)),
        exact="\n".join(_exact(compared, {(row.case, row.variant): row.result for row in exact})),
        constants="\n".join(_constants()),
    )
    path.write_text(text.replace(" `;", "`;"))


def _predicted(cell: Cell, results: Mapping[tuple[str, str, str], Result]) -> float:
    result = results[cell.case, cell.policy, cell.variant]
    metric, _, other = cell.metric.partition(":")
    if other:
        over = result.prediction.ettr / results[cell.case, other, cell.variant].prediction.ettr
        return over if metric == "ettr_over" else 100 * (over - 1)
    return METRICS[metric](result)


def _summary(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield a table of how near the ETTR cells are, by policy."""
    yield "ETTR cells of Tables 3 and 7 (those that contradict their own rows left out: marked in the tables):\n"
    yield f"| policy | cells | within {NEAR} | mean deviation | largest |"
    yield "| --- | --- | --- | --- | --- |"
    for policy in ("MoEvement", "Gemini", "CheckFreq", "MoC"):
        deviations = [one.deviation for one in compared if _counts(one.cell, policy)]
        near = sum(abs(deviation) <= NEAR for deviation in deviations)
        if not deviations:
            continue
        largest = max(deviations, key=abs)
        yield f"| {policy} | {len(deviations)} | {near} | {statistics.fmean(deviations):+.3f} | {largest:+.3f} |"


def _counts(cell: Cell, policy: str) -> bool:
    is_table = cell.source in ("Table 3", "Table 7")
    return is_table and cell.metric == "ettr" and cell.policy == policy and cell.trust == "include"


def _tables(compared: Sequence[Compared]) -> Iterator[str]:
    for source in dict.fromkeys(one.cell.source for one in compared):
        yield f"## {source[0].upper()}{source[1:]}\n"
        yield "| row | policy | variant | what | published | predicted | deviation | note |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
        yield from (_line(one) for one in compared if one.cell.source == source)
        yield ""


def _line(one: Compared) -> str:
    cell = one.cell
    notes = "; ".join(text for text in ("" if cell.trust == "include" else cell.trust, cell.note) if text)
    relative = f" ({one.deviation / cell.value:+.0%})" if cell.value else ""
    numbers = f"{cell.value:g} | {one.predicted:.4g} | {one.deviation:+.3g}{relative}"
    return f"| {cell.case} | {cell.policy} | {cell.variant} | {cell.metric} | {numbers} | {notes} |"


def _exact(compared: Sequence[Compared], exact: Mapping[tuple[str, str], Result]) -> Iterator[str]:
    """Yield a table of MoEvement's ETTR in Table 7, with both counts of bytes."""
    yield "| formats | MTBF | published | the paper's bytes | exact bytes |"
    yield "| --- | --- | --- | --- | --- |"
    for one in compared:
        cell = one.cell
        if _has_exact(cell):
            predicted = exact[cell.case, cell.variant].prediction.ettr
            yield f"| {cell.case} | {cell.variant} | {cell.value:g} | {one.predicted:.4f} | {predicted:.4f} |"


def _has_exact(cell: Cell) -> bool:
    return (cell.source, cell.policy, cell.metric) == ("Table 7", "MoEvement", "ettr")


def _constants() -> Iterator[str]:
    clusters = [compose_machine([f"cluster={name}"])[0] for name in CLUSTERS]
    yield f"| key | {' | '.join(CLUSTERS)} |"
    yield "| --- " * (len(CLUSTERS) + 1) + "|"
    for name in (field.name for field in fields(ClusterConfig) if field.name != "name"):
        values = [getattr(cluster, name) for cluster in clusters]
        yield f"| `{name}` | {' | '.join(value if isinstance(value, str) else f'{value:g}' for value in values)} |"


def _interval(result: Result) -> float:
    later = result.saving.later
    return later.period / sum(take.slot == 0 for take in later.repeat)


def _memory_gb(result: Result, part: str) -> float:
    """Return host memory of the whole job, without copies for peers."""
    memory, setup = result.saving.memory, result.simulation.setup
    assert memory is not None
    num_bytes = getattr(memory, part) - (memory.copies_bytes if part == "total_bytes" else 0)
    return num_bytes / _GIGA * (1 if result.saving.sizes_are_of_job else setup.job.layout.world_size)


METRICS: Mapping[str, Callable[[Result], float]] = {
    "ettr": lambda result: result.prediction.ettr,
    "recovery_total_s": lambda result: result.prediction.recovery_s,
    "overhead_s_per_iter": lambda result: result.prediction.overhead * result.simulation.setup.costs.iteration_s,
    "interval_iters": _interval,
    "w_sparse": lambda result: result.saving.later.repeat[0].num_slots,
    "snapshots_GB": lambda result: _memory_gb(result, "snapshots_bytes"),
    "logs_GB": lambda result: _memory_gb(result, "boundary_log_bytes"),
    "host_GB": lambda result: _memory_gb(result, "total_bytes"),
}
