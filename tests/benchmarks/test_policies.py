"""The table of all policies: new rows go to their places, and other rows stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policies import COLUMNS, MARKS, VARIANTS, write


def row(name: str, value: str) -> list[str]:
    return [name, *[value] * (len(COLUMNS) - 1)]


def test_rows_are_in_the_order_of_policies_and_the_newest_counts(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\n{MARKS[1]}\nafter\n")
    names = [variant.name for variant in VARIANTS[:3]]
    for name, value in [
        (names[2], "1 (0 to 2)"),
        (names[0], "3"),
        (names[1], "4"),
        (names[0], "5"),
    ]:
        write(page, row(name, value))
    first, *table, last = page.read_text().split("\n")[:-1]
    assert (first, last) == ("before", "after")
    assert (table[0], table[-1]) == MARKS
    assert [line.split(" | ")[:2] for line in table[3:-1]] == [
        [f"| {names[0]}", "5"],
        [f"| {names[1]}", "4"],
        [f"| {names[2]}", "1 (0 to 2)"],
    ]


def test_a_page_without_a_place_for_the_table_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="wanted them around the table"):
        write(page, row("none", "1"))
    assert page.read_text() == "nothing here\n"
