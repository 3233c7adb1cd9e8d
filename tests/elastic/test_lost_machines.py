"""A machine is lost once its processes have ended, or after a long silence.

The connections are real; the clock is the test's.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from moe_ckpt.elastic.lost_machines import LostMachines
from moe_ckpt.elastic.machines import Machine
from tests.ports import held_port
from tests.waits import WAIT_S

NODE_S = 10.0
LOCAL, UNREACHABLE = "127.0.0.1", "255.255.255.255"


class Watched:
    """A machine, and its watch from another machine whose clock is `now_s`."""

    def __init__(self, stack: ExitStack) -> None:
        self.now_s = 0.0
        self.port = held_port(stack)
        self.listening = stack.enter_context(self.listen())
        self.machine = Machine(name="a", number=0, host=LOCAL, port=self.port)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self.lost = LostMachines(NODE_S, self._selector, lambda: self.now_s)
        stack.callback(self.lost.close)

    def listen(self) -> socket.socket:
        return socket.create_server((LOCAL, self.port))

    def watch(self) -> None:
        self.lost.watch({"a": self.machine})
        while self._act(0):
            pass

    def is_lost(self, sign: float | None = 1.0) -> bool:
        self.watch()
        return "a" in self.lost.look({} if sign is None else {"a": sign})

    def accept(self) -> socket.socket:
        """Return the machine's end of the connection to it."""
        return self.listening.accept()[0]

    def note_end(self) -> None:
        """Wait for the end of the connection, and for the next attempt."""
        assert self._act(WAIT_S)
        self.watch()

    def _act(self, timeout_s: float) -> bool:
        events = self._selector.select(timeout_s)
        for key, _ in events:
            key.data(key.fileobj)
        return bool(events)


@pytest.fixture
def watched(stack: ExitStack) -> Watched:
    return Watched(stack)


def test_a_machine_whose_processes_end_is_lost_at_once(watched: Watched) -> None:
    before_unix_s = time.time()
    watched.watch()
    with watched.accept():
        assert not watched.is_lost()
        watched.listening.close()
    watched.note_end()
    [loss] = watched.lost.look({"a": 1.0}).values()
    assert loss.why == "its processes on 127.0.0.1 have ended"
    assert before_unix_s <= loss.last_seen_unix_s <= time.time()


def test_a_refusal_alone_is_no_loss(watched: Watched) -> None:
    """A firewall may refuse, and the machine may be healthy."""
    watched.listening.close()
    assert not watched.is_lost()


def test_a_machine_that_accepts_again_is_watched_again(watched: Watched) -> None:
    watched.watch()
    watched.accept().close()
    watched.note_end()
    assert not watched.is_lost()
    with watched.accept():
        watched.listening.close()
    watched.note_end()
    assert watched.is_lost()


def test_a_machine_that_moves_to_another_port_is_not_lost(
    watched: Watched, stack: ExitStack
) -> None:
    watched.watch()
    with watched.accept():
        watched.listening.close()
    watched.note_end()
    assert watched.is_lost()
    elsewhere = stack.enter_context(socket.create_server((LOCAL, 0)))
    watched.machine = replace(watched.machine, port=elsewhere.getsockname()[1])
    assert not watched.is_lost()


Look = tuple[float, float | None]
"""Time of a look, and the newest sign of life by then."""

LOOKS: dict[str, tuple[Sequence[Look], Sequence[bool]]] = {
    "gives signs": ([(4, 1), (8, 2), (12, 3), (16, 3)], [False] * 4),
    "falls silent": (
        [(4, 1), (8, 1), (12, 1), (13.5, 1), (14, 1)],
        [False, False, False, False, True],
    ),
    "has never given a sign": (
        [(4, None), (8, None), (9.5, None), (10, None)],
        [False, False, False, True],
    ),
    "is late": ([(4, 1), (9, 1), (14, 1), (15, 2)], [False, False, True, False]),
    "was not seen in a pause of the watching machine": (
        [(4, 1), (9.5, 1), (14, 1), (19, 1), (19.5, 1)],
        [False, False, False, False, True],
    ),
}


@pytest.mark.parametrize("host", [LOCAL, UNREACHABLE])
@pytest.mark.parametrize("row", LOOKS)
def test_a_silent_machine_is_lost_after_node_s(
    watched: Watched, row: str, host: str
) -> None:
    """An address to which there is no way decides nothing."""
    watched.machine = replace(watched.machine, host=host)
    watched.watch()
    looks, wanted = LOOKS[row]
    seen = list[bool]()
    for watched.now_s, sign in looks:
        seen.append(watched.is_lost(sign))
    assert seen == wanted


@pytest.mark.parametrize("sign", [None, 7.0, 1e12], ids=["no sign", "slow", "fast"])
def test_the_reason_names_the_setting_and_the_time_is_of_the_watching_machine(
    watched: Watched, sign: float | None
) -> None:
    """The clock of the lost machine may be slow or fast."""
    before_unix_s = time.time()
    watched.watch()
    signs = {} if sign is None else {"a": sign}
    watched.lost.look(signs)
    after_unix_s = time.time()
    for watched.now_s in (5.0, 10.0):
        losses = watched.lost.look(signs)
    assert losses["a"].why == (
        "127.0.0.1 has given no sign of life for runtime.node_s=10 seconds"
    )
    assert before_unix_s <= losses["a"].last_seen_unix_s <= after_unix_s
