"""Requests to peers after each sequence of transitions of the ledger of copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import RLock

import pytest
from hypothesis import given

from moe_ckpt.errors import CheckpointSaveError, PeersLostError
from moe_ckpt.replication.copy_ledger import Copies, CopyLedger, CopyState, NoCopies
from moe_ckpt.replication.copy_waits import CopyWaits
from tests.properties import GENERATORS, MANY, PER_EXAMPLE, inputs
from tests.waits import WAIT_S


class Peers:
    """A fake of all peers, whose copies end when a test says so.

    Attributes:
        asked: The requests, such as "copy a" and "drop a b".
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._copies: dict[str, Future[None]] = {}

    def copy(self, keys: list[str]) -> Future[None]:
        self.asked.append(f"copy {' '.join(keys)}")
        (key,) = keys
        self._copies[key] = Future()
        return self._copies[key]

    def drop(self, keys: list[str]) -> None:
        self.asked.append(f"drop {' '.join(keys)}")

    def complete(self, key: str) -> None:
        """Complete the newest copy of a blob."""
        self._copies[key].set_result(None)

    def fail(self, key: str) -> None:
        """Let the newest copy of a blob fail."""
        self._copies[key].set_exception(CheckpointSaveError("no route"))


def ledger_of(peers: Copies, copy_s: float = WAIT_S) -> CopyLedger:
    return CopyLedger(peers, CopyWaits(copy_s, lambda _: None), RLock())


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def ledger(peers: Peers) -> CopyLedger:
    return ledger_of(peers)


def carry_out(script: str, ledger: CopyLedger, peers: Peers) -> None:
    """Carry out steps that are separated by commas. Each letter is a blob.

    Args:
        script: `begin ab of a/b` begins to copy the blobs a and b to two peers, of
            which the first has a and the second has b; peers then delete stale blobs,
            and keep these with `resume` in place of `begin`. Other steps are `stop`,
            `add a`, `drop a`, `ask a` (for the copy), `complete a` and `fail a`.
        ledger: The ledger.
        peers: The peers of the ledger.
    """
    for step in script.split(", "):
        name, _, rest = step.partition(" ")
        if name in ("begin", "resume"):
            keys, _, held = rest.partition("of")
            ledger.begin(
                list(keys.strip()),
                [set(each.strip()) for each in held.split("/")],
                drop_stale=name == "begin",
            )
        elif name == "stop":
            ledger.stop()
        elif name == "add":
            ledger.add(rest)
        elif name == "drop":
            ledger.drop([rest])
        elif name == "ask":
            ledger.copy_of(rest)
        elif name == "complete":
            peers.complete(rest)
        else:
            assert name == "fail", step
            peers.fail(rest)


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("add a, drop a, stop", []),
        ("resume of, add a", ["copy a"]),
        ("resume of, drop a", ["drop a"]),
        ("resume of, stop, add a, drop a", []),
        ("resume of, resume of, add a", ["copy a"]),
    ],
)
def test_peers_get_requests_while_copying_only(
    script: str, asked: list[str], ledger: CopyLedger, peers: Peers
) -> None:
    carry_out(script, ledger, peers)
    assert peers.asked == asked


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("resume a of", ["copy a"]),
        ("resume ab of ab/a", ["copy b"]),
        ("resume ab of ab/abc", []),
        # the blob has other contents than the blob that peers hold
        ("add a, resume a of a", ["copy a"]),
        ("add a, resume a of a, complete a, stop, resume a of a", ["copy a"]),
        # peers may still have the older contents when copying begins again
        ("add a, resume a of a, stop, resume a of a", ["copy a", "copy a"]),
        ("resume a of a, add a, stop, resume a of a", ["copy a", "copy a"]),
        ("resume a of a, add a, fail a, resume a of a", ["copy a", "copy a"]),
        ("add a, stop, resume a of a", ["copy a"]),
        # the copy is that of the blob that peers now hold
        ("resume a of, complete a, stop, resume a of a", ["copy a"]),
    ],
)
def test_copying_begins_with_what_a_peer_lacks(
    script: str, asked: list[str], ledger: CopyLedger, peers: Peers
) -> None:
    carry_out(script, ledger, peers)
    assert peers.asked == asked


@pytest.mark.parametrize(
    ("script", "has_all"),
    [
        ("resume of", True),
        ("resume ab of ab", True),
        ("resume ab of a", False),
        ("resume ab of a, complete b", True),
        ("resume ab of a, fail b", False),
        ("resume ab of a, drop b", True),
        # a new blob is not one that a loss has taken from peers
        ("resume a of a, add b", True),
        ("resume a of a, add a", False),
        ("resume a of a, add a, complete a", True),
        ("resume a of, complete a, resume ab of a", False),
    ],
)
def test_copies_are_complete_once_peers_have_what_copying_began_with(
    script: str, has_all: bool, ledger: CopyLedger, peers: Peers
) -> None:
    carry_out(script, ledger, peers)
    assert ledger.has_begun_blobs() is has_all


@pytest.mark.parametrize(
    ("script", "dropped"),
    [
        ("begin a of ax/y, complete a", ["drop x y"]),
        ("begin a of x", []),
        ("begin ab of x, complete a", []),
        ("begin ab of x, complete a, complete b", ["drop x"]),
        ("begin ab of x, complete a, fail b", []),
        ("begin ab of x, fail a, add c, complete c, complete b", []),
        # nothing of the withdrawn blob is left to send
        ("begin ab of x, drop b, complete a", ["drop b", "drop x"]),
        # the blob has been published again
        ("begin ab of x, add b, complete a, complete b", ["drop x"]),
        ("begin a of ax", ["drop x"]),
        # each copy that is done asks for the rest of the stale blobs
        ("begin ab of abx", ["drop x", "drop "]),
        ("resume a of x, complete a", []),
        # only the blobs with which copying began count
        ("begin a of x, add b, complete a", ["drop x"]),
        # the blob is sent meanwhile
        ("begin a of xy, add x, complete a", ["drop y"]),
        # peers' copies may be the last ones again
        ("begin a of x, stop, complete a", []),
        ("begin a of x, resume b of ax, complete a, complete b", []),
        # peers may still receive copies of the withdrawn blob
        ("drop x, begin a of a", ["drop x"]),
        ("drop x, resume of, stop, begin of", ["drop x"]),
        ("drop x, begin of, stop, begin of", ["drop x", "drop "]),
        ("drop x, begin x of", []),
        # a copy of the blob may arrive after peers have listed their blobs again
        ("begin a of x, stop, begin of", ["drop x"]),
        ("begin a of x, stop, begin x of", []),
    ],
)
def test_stale_blobs_go_once_all_others_have_arrived(
    script: str, dropped: list[str], ledger: CopyLedger, peers: Peers
) -> None:
    carry_out(script, ledger, peers)
    assert [each for each in peers.asked if each.startswith("drop")] == dropped


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("resume ab of", ["copy a"]),
        ("resume ab of, complete a", ["copy a", "copy b"]),
        ("resume ab of, add c, complete a", ["copy a", "copy c"]),
        ("resume ab of, add c, complete a, complete c", ["copy a", "copy c", "copy b"]),
        ("resume ab of, add c, complete c", ["copy a", "copy c"]),
        ("resume ab of, add b, complete a, complete b", ["copy a", "copy b"]),
        ("resume ab of, drop b, complete a", ["copy a", "drop b"]),
        ("resume ab of, drop a, complete a", ["copy a", "drop a", "copy b"]),
        ("resume ab of, stop, complete a", ["copy a"]),
        # whoever asks for the copy needs it
        ("resume ab of, ask b", ["copy a", "copy b"]),
        ("resume ab of, ask b, complete a, complete b", ["copy a", "copy b"]),
        # a later copy shows that peers can be reached
        ("resume ab of, fail a", ["copy a"]),
        ("resume ab of, fail a, add c, complete c", ["copy a", "copy c", "copy b"]),
    ],
)
def test_blobs_from_before_are_sent_while_no_other_copy_is_under_way(
    script: str, asked: list[str], ledger: CopyLedger, peers: Peers
) -> None:
    """Training waits for new blobs, and must not wait for whole earlier windows.

    After the loss of a node all windows of a rank go to another peer.
    """
    carry_out(script, ledger, peers)
    assert peers.asked == asked


def test_a_wait_for_blobs_from_before_sends_them(peers: Peers) -> None:
    ledger = ledger_of(peers, copy_s=0.01)
    carry_out("resume abc of", ledger, peers)
    assert not ledger.wait_until_copied(["c"])
    assert peers.asked == ["copy a", "copy c"]
    peers.complete("c")
    assert ledger.wait_until_copied(["c"])


def test_the_state_follows_the_transitions(ledger: CopyLedger) -> None:
    assert ledger.state is CopyState.STOPPED
    ledger.begin([], [set(), set()], drop_stale=True)
    assert (ledger.state, ledger.num_peers) == (CopyState.COPYING, 2)
    ledger.stop()
    assert (ledger.state, ledger.num_peers) == (CopyState.STOPPED, 2)


def test_a_blob_may_be_sent_as_another(ledger: CopyLedger, peers: Peers) -> None:
    assert ledger.add("a", by="update") is None
    ledger.begin([], [set()], drop_stale=False)
    copy = ledger.add("a", by="update")
    assert peers.asked == ["copy update"]
    assert ledger.copy_of("a") is copy
    assert ledger.copy_of("update") is None


@pytest.mark.parametrize(
    ("script", "is_done"),
    [
        ("add a", None),
        ("resume of a", None),
        ("resume a of a", True),
        ("resume a of", False),
        ("resume of, add a", False),
        ("resume of, add a, complete a", True),
        ("resume of, add a, fail a", True),
        ("resume a of a, add a", False),
        ("resume a of a, drop a", None),
        ("resume a of a, stop", None),
        ("resume a of a, resume of a", None),
    ],
)
def test_the_copy_of_a_blob(
    script: str, is_done: bool | None, ledger: CopyLedger, peers: Peers
) -> None:
    carry_out(script, ledger, peers)
    copy = ledger.copy_of("a")
    assert (None if copy is None else copy.done()) is is_done
    if ledger.state is CopyState.COPYING:
        assert ledger.is_under_way(["a"]) == (is_done is False)


def test_a_wait_fails_if_one_blob_is_missing_anywhere(
    ledger: CopyLedger, peers: Peers
) -> None:
    carry_out("resume ab of a, complete b", ledger, peers)
    assert ledger.wait_until_copied(["a", "b"])
    assert not ledger.has_failed
    carry_out("add b, fail b", ledger, peers)
    for keys in (["a", "b"], ["a", "never added"]):
        assert not ledger.wait_until_copied(keys)
        assert ledger.has_failed
        carry_out("stop, resume ab of ab, add b, fail b", ledger, peers)
        assert not ledger.has_failed


def test_a_copy_that_takes_too_long_has_failed(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = ledger_of(peers, copy_s=0.01)
    carry_out("resume a of", ledger, peers)
    assert not ledger.wait_until_copied(["a"])
    assert "no answer in 0.01 s" in caplog.text


def test_copying_that_begins_allows_waits(peers: Peers) -> None:
    waits = CopyWaits(WAIT_S, lambda _: None)
    ledger = CopyLedger(peers, waits, RLock())
    carry_out("resume a of", ledger, peers)
    waits.interrupt()
    with pytest.raises(PeersLostError):
        ledger.wait_until_copied(["a"])
    assert not ledger.has_failed, "the wait ended, the copy did not fail"
    carry_out("stop, resume a of", ledger, peers)
    waits.copy_s = 0.01
    assert not ledger.wait_until_copied(["a"])
    peers.complete("a")
    assert ledger.wait_until_copied(["a"])


def test_a_wait_before_copying_is_a_bug(ledger: CopyLedger) -> None:
    for ask in (ledger.wait_until_copied, ledger.is_under_way):
        with pytest.raises(AssertionError):
            ask(["a"])


def test_without_peers_all_blobs_count_as_copied() -> None:
    ledger = ledger_of(NoCopies())
    ledger.begin(["a"], [set()], drop_stale=True)
    ledger.add("b")
    assert ledger.wait_until_copied(["a", "b"])


def test_a_failure_does_not_wait_for_the_lock(peers: Peers) -> None:
    """The holder of the lock may wait for the thread that reports the failure."""
    lock = RLock()
    ledger = CopyLedger(peers, CopyWaits(WAIT_S, lambda _: None), lock)
    carry_out("begin a of x", ledger, peers)
    with ThreadPoolExecutor() as answers, lock:
        answers.submit(peers.fail, "a").result(WAIT_S)


class Peer:
    """A fake of one peer that carries out requests in order, when a test says so.

    Attributes:
        held: The number of the contents that the peer has, by key.
    """

    def __init__(self, own: dict[str, int]) -> None:
        self.held: dict[str, int] = {}
        self._own = own
        self._requests: list[Callable[[], None]] = []

    def copy(self, keys: list[str]) -> Future[None]:
        copied: Future[None] = Future()
        sent = {key: self._own[key] for key in keys}

        def arrive() -> None:
            self.held |= sent
            copied.set_result(None)

        self._requests.append(arrive)
        return copied

    def drop(self, keys: list[str]) -> None:
        def forget() -> None:
            for key in keys:
                self.held.pop(key, None)

        self._requests.append(forget)

    def answer(self, most: int = 1000) -> None:
        for _ in range(most):
            if self._requests:
                self._requests.pop(0)()


STEPS = ["add a", "add b", "drop a", "drop b", "stop", "begin", "resume", "answer"]


@inputs(MANY)
@given(GENERATORS)
def test_peers_have_exactly_the_owners_blobs_in_the_end(chosen: random.Random) -> None:
    for _ in range(PER_EXAMPLE):
        steps = chosen.choices(STEPS, k=16)
        held, own = after([*steps, "stop", "begin"])
        assert held == own, steps


def after(steps: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Carry out steps, and let the peer carry out all requests.

    As in a recovery, copying begins only while copying is stopped, with the keys that
    the peer had when copying stopped. Requests from before may arrive later.

    Returns:
        The contents that the peer has, and those that the owner has.
    """
    own: dict[str, int] = {}
    peer = Peer(own)
    ledger = ledger_of(peer)
    listed = set[str]()
    for number, step in enumerate(steps):
        name, _, key = step.partition(" ")
        if name == "add":
            own[key] = number
            ledger.add(key)
        elif name == "drop" and own.pop(key, None) is not None:
            ledger.drop([key])
        elif name == "stop":
            ledger.stop()
            listed = set(peer.held)
        elif name == "answer":
            peer.answer(1)
        elif name in ("begin", "resume") and ledger.state is CopyState.STOPPED:
            ledger.begin(list(own), [listed], drop_stale=name == "begin")
    peer.answer()
    return peer.held, own
