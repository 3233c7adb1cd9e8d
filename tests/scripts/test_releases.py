"""The table of tested releases, and the counts of a run.

Each set of releases and tests has one row.
"""

from __future__ import annotations

import pytest

from scripts.test_releases import (
    MARKS,
    PAGE,
    Row,
    counts_of,
    require_whole_run,
    with_row,
)

EMPTY = f"# Releases\n\n{MARKS[0]}\n{MARKS[1]}\n\nAfter.\n"


def row(
    torch: str = "2.15.0+cu132",
    tests: str = "groups",
    *,
    passed: int = 3,
    failed: int = 0,
) -> Row:
    return Row(
        torch=torch,
        megatron="0.16.1",
        python="3.11.7",
        tests=tests,
        day="2026-11-28",
        commit="0a1b2c3",
        passed=passed,
        failed=failed,
        skipped=1,
    )


def lines_of(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("| 2")]


def test_a_first_row_makes_the_table_and_leaves_the_rest_of_the_page() -> None:
    page = with_row(EMPTY, row())
    assert lines_of(page) == [
        "| 2.15.0+cu132 | 0.16.1 | 3.11.7 | groups | 2026-11-28 | 0a1b2c3 | 3 | 0 | 1 |"
    ]
    assert page.startswith("# Releases\n")
    assert page.endswith("\n\nAfter.\n")


def test_a_row_replaces_that_of_the_same_releases_and_tests_only() -> None:
    page = with_row(
        with_row(with_row(EMPTY, row(failed=2)), row(tests="default")), row(failed=0)
    )
    assert [line.split(" | ")[3] for line in lines_of(page)] == ["default", "groups"]
    assert lines_of(page)[1].endswith("| 3 | 0 | 1 |")


def test_rows_are_in_the_order_of_releases_not_of_letters() -> None:
    page = with_row(with_row(EMPTY, row("2.15.0")), row("2.9.1"))
    assert [line.split(" | ")[0] for line in lines_of(page)] == ["| 2.9.1", "| 2.15.0"]


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ('tests="7" failures="0" errors="0" skipped="2"', (5, 0, 2)),
        ('tests="7" failures="2" errors="1" skipped="0"', (4, 3, 0)),
    ],
)
def test_an_error_counts_as_a_failure(
    attributes: str, wanted: tuple[int, int, int]
) -> None:
    assert counts_of(f"<testsuites><testsuite {attributes}/></testsuites>") == wanted


@pytest.mark.parametrize("status", [2, 5, -9], ids=["interrupted", "no test", "killed"])
def test_a_run_that_did_not_end_is_no_row(status: int) -> None:
    for whole in (0, 1):
        require_whole_run(whole)
    with pytest.raises(RuntimeError, match="no row is written"):
        require_whole_run(status)


def test_the_page_has_the_table() -> None:
    """Without its marks the page would get another table at its end with each run."""
    assert all(PAGE.read_text().count(mark) == 1 for mark in MARKS)
