"""Tables as values, for every format. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.fault_classes import EXPLAINED as FAULT_CLASSES
from launcher.report.episodes import Episode
from launcher.report.facts import Facts
from launcher.report.parts import EXPLAINED, OF_FAULTS, PagePart
from launcher.report.summary import MIB, QUANTITIES, shown

_MOST_ROWS = 500


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column."""

    label: str
    """Name of the column."""

    unit: str = ""
    """Unit of the numbers; empty for words and counts."""

    means: str = ""
    """Explanation, shown on hover."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of numbers and words."""

    key: str
    """Identifier, unique among the tables of a run."""

    title: str
    """Title above the table."""

    columns: tuple[Column, ...]
    """Heads of the columns."""

    rows: tuple[tuple[str | float | None, ...], ...]
    """Cells of each row. None: there is no data."""

    note: str = ""
    """Rows left out, or the reason why there are none."""


def text_of(cell: str | float | None) -> str:
    return cell if isinstance(cell, str) else shown(cell)


def compared(runs: Sequence[Facts]) -> Table:
    """Return the runs side by side, with the quantities that any run has."""
    values = {each: [each.of(facts) for facts in runs] for each in QUANTITIES}
    there = [
        each
        for each, of_runs in values.items()
        if any(value is not None for value in of_runs)
    ]
    return Table(
        key="runs",
        title="Runs",
        columns=(
            Column("run"),
            Column("policy", means="ckpt=, the checkpoint policy"),
            Column("state", means="finished, still running, or ended without a result"),
            Column("ranks", means="how many the run has"),
            *(Column(each.label, unit=each.unit, means=each.means) for each in there),
        ),
        rows=tuple(
            (
                facts.run.name,
                facts.run.policy,
                facts.run.state,
                float(facts.run.world_size),
                *(values[each][number] for each in there),
            )
            for number, facts in enumerate(runs)
        ),
    )


def numbers_of(facts: Facts) -> Table:
    """Return all known quantities of one run, a row for each."""
    values = [(each, each.of(facts)) for each in QUANTITIES]
    return Table(
        key="numbers",
        title="All numbers",
        columns=(
            Column("quantity"),
            Column("value"),
            Column("unit"),
            Column("what it is"),
        ),
        rows=tuple(
            (each.label, value, each.unit, each.means)
            for each, value in values
            if value is not None
        ),
    )


def time_of_runs(runs: Sequence[Facts]) -> Table:
    """Return where the time of each run went, mean over ranks."""
    parts = [part for part in PagePart if any(facts.mean_us(part) for facts in runs)]
    return Table(
        key="parts",
        title="Where the time went, mean over ranks",
        columns=(Column("run"), *_seconds(parts), _WALL),
        rows=tuple(
            (
                facts.run.name,
                *(facts.mean_us(part) / 1e6 for part in parts),
                facts.end_us / 1e6,
            )
            for facts in runs
        ),
    )


_WALL = Column("wall time", unit="s", means="the sum of all parts")


def _seconds(parts: Sequence[PagePart]) -> list[Column]:
    return [Column(part.label, unit="s", means=EXPLAINED[part]) for part in parts]


def time_of_ranks(facts: Facts) -> Table:
    """Return where each rank's time went."""
    parts = [part for part in PagePart if facts.mean_us(part)]
    totals = sorted(facts.totals_us.items())
    return Table(
        key="time-of-ranks",
        title="Time of each rank",
        columns=(Column("rank"), *_seconds(parts), _WALL),
        rows=tuple(
            (float(rank), *(of[part] / 1e6 for part in parts), sum(of.values()) / 1e6)
            for rank, of in totals[:_MOST_ROWS]
        ),
        note=_cut(len(totals), "ranks"),
    )


def faults(facts: Facts) -> Table:
    """Return the number of faults by class."""
    return Table(
        key="faults",
        title="Faults by class",
        columns=(Column("class"), Column("faults"), Column("what it is")),
        rows=tuple(
            (
                name,
                float(count),
                FAULT_CLASSES.get(name, "deaths in a log without classes"),
            )
            for name, count in facts.faults.items()
        ),
        note="" if facts.faults else "no fault",
    )


def recoveries(facts: Facts) -> Table:
    """Return the recoveries, with the time of each part."""
    return Table(
        key="recoveries",
        title="Recoveries",
        columns=(
            Column("no."),
            Column("what failed", means="as told by the surest witness there is"),
            Column("at", unit="s", means="since the start of the run"),
            Column(
                "took",
                unit="s",
                means="from the last sign of life until the last rank went on",
            ),
            *(
                Column(
                    part.label, unit="s", means=f"{EXPLAINED[part]}; mean over ranks"
                )
                for part in OF_FAULTS
            ),
            Column(
                "goes on after", means="the iteration whose state all ranks had then"
            ),
            Column(
                "replayed",
                unit="iterations",
                means="run again to rebuild state, on the ranks that did",
            ),
            Column("by ranks", means="which ranks loaded or replayed"),
            Column("fetched", unit="MiB", means="got out of other ranks' memory"),
        ),
        rows=tuple(_row(each) for each in facts.episodes[:_MOST_ROWS]),
        note=_cut(len(facts.episodes), "recoveries")
        if facts.episodes
        else "no rank had to recover",
    )


def _row(episode: Episode) -> tuple[str | float | None, ...]:
    return (
        float(episode.number),
        "; ".join(episode.causes),
        episode.start_us / 1e6,
        (episode.end_us - episode.start_us) / 1e6,
        *(episode.mean_us[part] / 1e6 for part in OF_FAULTS),
        None if episode.iteration is None else float(episode.iteration),
        float(episode.replayed_iters),
        ", ".join(map(str, episode.replaying_ranks)) or "none",
        episode.fetched_bytes / MIB,
    )


def _cut(there: int, what: str) -> str:
    return f"the first {_MOST_ROWS} of {there:,} {what}" if there > _MOST_ROWS else ""
