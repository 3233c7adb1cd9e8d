"""Failure traces: three formats, events sorted by time, bursts kept.

Errors name the malformed line.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.traces import Removals, read_removals

NODES = "0,add,a\n0,add,b\n4000,remove,a\n1500,remove,c\n4000,remove,b\n6000,add,d\n"
COUNTS = (
    "2021-12-10, 23:59:30, 80\n2021-12-11, 00:00:30, 75\n2021-12-11, 00:00:10,"
    " 80\n2021-12-11, 00:01:00, 78\n"
)
SUMMARY = "t_s,event,arg\n100,add,9\n160,remove,4\n130,remove,2\n160,add,3\n"


def removals(*pairs: tuple[float, int]) -> tuple[Removals, ...]:
    return tuple(Removals(at_s=at_s, count=count) for at_s, count in pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NODES, removals((1.5, 1), (4.0, 2))),
        (NODES.replace("\n", "\r\n"), removals((1.5, 1), (4.0, 2))),
        ("5000,remove,a\n\n", removals((0.0, 1))),
        ("7000,add,a\n9000,remove,a", removals((2.0, 1))),
        ("0,add,a", removals()),
        (COUNTS, removals((60.0, 5))),
        (
            "2021-12-10, 10:00:00, 8\n2021-12-10, 10:00:05, 6\n2021-12-10, 10:00:05, 3",
            removals((5.0, 5)),
        ),
        (
            "2021-12-10, 10:00:00, 8\n2021-12-10, 10:00:05, 9\n2021-12-10, 10:00:06, 8",
            removals((6.0, 1)),
        ),
        (SUMMARY, removals((30.0, 2), (60.0, 4))),
    ],
)
def test_removals_are_read(text: str, expected: tuple[Removals, ...]) -> None:
    assert read_removals(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: got '', wanted a line for each event"),
        (
            "t_s,event,arg\n",
            (
                "trace: got 't_s,event,arg\\n', wanted lines like '2679,remove,4' below"
                " the header"
            ),
        ),
        (
            "0,add,a\n\n5,drop,b",
            (
                "trace: line 3: got '5,drop,b', wanted a line like"
                " '480000,add|remove,node1'"
            ),
        ),
        ("0,add", "trace: line 1: got '0,add', wanted"),
        ("0,add,", "trace: line 1: got '0,add,', wanted"),
        ("0,add,a,b", "trace: line 1: got '0,add,a,b', wanted"),
        ("soon,add,a", "trace: line 1: got 'soon,add,a', wanted"),
        (
            "2021-13-10, 13:07:45, 80",
            (
                "trace: line 1: got '2021-13-10, 13:07:45, 80', wanted a line like"
                " '2021-12-10, 13"
            ),
        ),
        (
            "2021-12-10, 13:07:45, 80\n480000,add,a",
            "trace: line 2: got '480000,add,a', wanted a line like '2021-12-10",
        ),
        (
            "2021-12-10, 13:07:45, -1",
            "trace: line 1: got '2021-12-10, 13:07:45, -1', wanted",
        ),
        ("2021-12-10, 13:07:45, many", "trace: line 1: got"),
        (
            "t_s,event,arg\n1,remove,x",
            "trace: line 2: got '1,remove,x', wanted a line like '2679,remove,4'",
        ),
        ("t_s,event,arg\nnan,remove,1", "trace: line 2: got 'nan,remove,1'"),
    ],
)
def test_a_malformed_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_removals(text)
    assert str(caught.value).startswith(message)


EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["add", "remove"])),
    min_size=1,
    max_size=30,
)


@given(events=EVENTS, seed=st.integers(0, 9))
def test_every_removal_is_counted_whatever_the_order_of_lines(
    events: list[tuple[int, str]], seed: int
) -> None:
    shuffled = random.Random(seed).sample(events, len(events))
    got = read_removals("\n".join(f"{at},{event},n" for at, event in shuffled))
    first = min(at for at, _ in events)
    gone = [at - first for at, event in events if event == "remove"]
    assert got == removals(*((at / 1000, gone.count(at)) for at in sorted(set(gone))))


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_the_falls_of_a_count_add_up(counts: list[int]) -> None:
    got = read_removals(
        "\n".join(
            f"2021-12-10, 10:00:{at:02d}, {count}" for at, count in enumerate(counts)
        )
    )
    rises = sum(max(0, after - before) for before, after in pairwise(counts))
    assert counts[0] + rises - sum(removal.count for removal in got) == counts[-1]
    assert [removal.at_s for removal in got] == sorted(
        {removal.at_s for removal in got}
    )
