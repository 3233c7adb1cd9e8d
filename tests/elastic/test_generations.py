"""Ranks end one generation and begin the next, over stores and in processes.

First come the keys in the store, then members over a real store, then members that must
end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.elastic.generations import (
    FENCED,
    STORE_LOST,
    SUPERVISOR,
    Generations,
    Late,
    Member,
    Membership,
)
from moe_ckpt.elastic.process_failure import Death, FaultClass
from moe_ckpt.elastic.process_groups import ElasticGroups
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.errors import PeersLostError, RanksMissingError
from moe_ckpt.types import Phase
from tests.harness.gloo.ranks import run_ranks
from tests.harness.gloo.workers import (
    GRACE_S,
    NotingStore,
    caused,
    meet,
    open_membership,
    open_store,
    own_rank,
)
from tests.waits import WAIT_S

Both = tuple[Generations, Generations]


@pytest.fixture(scope="module")
def connections() -> tuple[dist.Store, dist.Store]:
    """Return two connections to one store of the kind that torchrun has.

    A new connection can take seconds, so all tests of the module share these two.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server, dist.TCPStore("127.0.0.1", server.port, is_master=False)


@pytest.fixture
def both(
    connections: tuple[dist.Store, dist.Store], request: pytest.FixtureRequest
) -> Both:
    """Return the keys as two processes see them."""
    one, other = (
        Generations(dist.PrefixStore(request.node.name, store)) for store in connections
    )
    return one, other


def death_of(global_rank: int) -> Death:
    return Death(
        fault=FaultClass.SIGNAL,
        global_rank=global_rank,
        pid=4711,
        signal="SIGKILL",
        why="died of SIGKILL",
        iteration=3,
        phase="backward",
        last_seen_unix_s=10.0,
        found_unix_s=10.25,
    )


# The keys.


def test_a_generation_ends_once_and_for_the_first_reason(both: Both) -> None:
    one, other = both
    assert (one.current(), other.current()) == (1, 1)
    other.end(1, "the first reason")
    one.end(1, "another")
    assert (one.current(), other.current()) == (2, 2)
    assert (one.wait_for_end(1), other.wait_for_end(1)) == ("the first reason",) * 2
    one.end(2, "the next")
    other.end(1, "late")
    assert (one.current(), one.wait_for_end(2)) == (3, "the next")


class OvertakenStore(dist.HashStore):
    """A store in which another process acts right after a swap of `key`.

    The process that has sent the swap has just received the answer. `overtake` receives
    the other process's keys.
    """

    def __init__(self, key: str, overtake: Callable[[Generations], object]) -> None:
        super().__init__()
        self._key = key
        self._overtake = overtake

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        answer = super().compare_set(key, expected_value, desired_value)
        if key == self._key:
            self._key = ""
            self._overtake(Generations(self))
        return answer


def test_the_first_reason_stays_where_a_second_process_is_faster() -> None:
    one = Generations(
        OvertakenStore("1/outcome", lambda other: other.end(1, "the second reason"))
    )
    assert one.current() == 1
    assert one.end(1, "the first reason")
    assert (one.wait_for_end(1), one.current()) == ("the first reason", 2)


def test_all_may_end_a_generation_at_once(both: Both) -> None:
    start = threading.Barrier(2)

    def end(mine: Generations) -> list[str]:
        reasons = []
        for generation in range(1, 50):
            mine.current()
            start.wait(WAIT_S)
            mine.end(generation, f"of {mine}")
            reasons.append(mine.wait_for_end(generation))
        return reasons

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(end, both)
    assert one == other
    assert both[0].current() == 50


def test_the_last_rank_to_arrive_lets_all_go(both: Both) -> None:
    one, other = both
    with ThreadPoolExecutor(1) as thread:
        one.arrive(1, 2)
        waiting = thread.submit(other.goes, 1, WAIT_S)
        with pytest.raises(
            PeersLostError,
            match=r"generation 1: got 1 ranks in runtime.join_s=0.05 seconds",
        ):
            one.goes(1, 0.05)
        assert not waiting.done()
        one.arrive(1, 2)
        assert waiting.result(WAIT_S)
    assert one.goes(1, WAIT_S)


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_generation_goes_unless_it_ends_before_all_have_arrived(
    both: Both, ends_first: bool
) -> None:
    """A generation that has begun is not called back.

    Otherwise some ranks would begin the generation, and some would not.
    """
    one, other = both
    one.current()
    one.arrive(1, 2)
    for step in (lambda: one.end(1, "a death"), lambda: other.arrive(1, 2))[
        :: 1 if ends_first else -1
    ]:
        step()
    assert one.goes(1, WAIT_S) == other.goes(1, WAIT_S) == (not ends_first)


def test_deaths_are_kept_by_generation(both: Both) -> None:
    one, other = both
    one.record_death(1, death_of(2))
    other.record_death(1, death_of(0))
    one.record_death(2, death_of(1))
    assert other.num_deaths() == 3
    assert [other.deaths(generation) for generation in (1, 2, 3)] == [
        [death_of(2), death_of(0)],
        [death_of(1)],
        [],
    ]


class CutOffStore(dist.HashStore):
    """A store whose client dies with the request after `num_answers` others."""

    num_answers = 0

    def add(self, key: str, value: int) -> int:
        self._answer()
        return super().add(key, value)

    def set(self, key: str, value: str) -> None:
        self._answer()
        super().set(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._answer()
        return super().compare_set(key, expected_value, desired_value)

    def _answer(self) -> None:
        if not self.num_answers:
            raise InterruptedError
        self.num_answers -= 1


@pytest.mark.parametrize("num_answers", range(5))
def test_half_a_record_of_a_death_keeps_none_from_reading(num_answers: int) -> None:
    """A supervisor may be killed between any two requests."""
    store = CutOffStore()
    store.set_timeout(timedelta(seconds=0.01))
    generations = Generations(store)
    store.num_answers = num_answers
    with contextlib.suppress(InterruptedError):
        generations.record_death(1, death_of(2))
    store.num_answers = 100
    generations.record_death(1, death_of(1))
    assert generations.deaths(1)[-1] == death_of(1)
    assert len(generations.deaths(1)) == 1 + min(num_answers, 1)


def test_a_generation_finishes_for_good_when_the_last_rank_is_done(both: Both) -> None:
    one, other = both
    one.current()
    one.done(1, 2)
    assert not other.has_finished(1)
    other.done(1, 2)
    assert (one.has_finished(1), other.finishes(1)) == (True, True)
    assert not one.end(1, "too late")
    assert other.current() == 1


def test_a_generation_that_has_ended_cannot_finish(both: Both) -> None:
    one, other = both
    one.current()
    one.done(1, 2)
    assert other.end(1, "a death")
    other.done(1, 2)
    assert (one.has_finished(1), one.finishes(1), one.current()) == (False, False, 2)
    one.done(2, 2)
    assert not one.has_finished(2), "a rank that was done before is not done any more"


def test_ranks_that_are_started_again_meet_in_another_generation(both: Both) -> None:
    one, other = both
    one.current()
    one.done(1, 1)
    one.begin_anew("rank 0 was started again")
    assert (other.current(), other.has_finished(1), other.has_finished(2)) == (
        2,
        True,
        False,
    )
    other.begin_anew("rank 1 was started again")
    assert (one.current(), one.wait_for_end(2)) == (3, "rank 1 was started again")


def test_the_life_that_may_join_is_the_last_one_set(both: Both) -> None:
    one, other = both
    assert other.incarnation(3) == -1
    for incarnation in (0, 1):
        assert one.claim(3, incarnation)
        assert one.incarnation(3) == incarnation
        assert other.incarnation(3) == incarnation


def test_one_of_two_claims_of_a_life_succeeds(both: Both) -> None:
    """A supervisor on a node that was given up may claim beside its successor."""
    one, other = both
    assert [each.claim(3, 0) for each in (one, other)] == [True, False]
    assert [each.claim(3, 1) for each in (other, one)] == [True, False]
    assert not one.claim(3, 3), "an incarnation is missing"
    assert one.incarnation(3) == 1


# Members. Ranks run the functions below. Rank 2 is no member, and stands for a
# supervisor.


def open_first_life(
    folder: str, world_size: int, *, grace_s: float = GRACE_S
) -> tuple[Generations, Membership]:
    """Make this process the first incarnation of its rank."""
    generations = Generations(open_store(folder))
    generations.claim(own_rank(), 0)
    return generations, open_membership(folder, own_rank(), world_size, grace_s=grace_s)


def sum_of_ranks() -> float:
    dist.all_reduce(total := torch.tensor([1.0 + own_rank()]))
    return total.item()


def wait_for_the_end(membership: Membership) -> str:
    """Wait for data that no rank sends; return why the generation ended."""
    with pytest.raises(PeersLostError) as lost:
        dist.recv(torch.zeros(1), 1 - own_rank())
    assert membership.lost(lost.value)
    return membership.leave()


REASONS = ["rank 0 said so", "rank 1 said so", "a supervisor said so"]


def go_through_generations(folder: str) -> list[Any]:
    """Join one generation after another.

    Rank 0, rank 1 and a supervisor (rank 2) end the first three generations, in turn.
    """
    keys = open_store(folder)
    if own_rank() == 2:
        generations = Generations(open_store(folder))
        keys.wait(["all are in 3/all"])
        generations.record_death(3, death_of(1))
        generations.end(3, REASONS[2])
        return []
    generations, membership = open_first_life(folder, 2, grace_s=WAIT_S)
    seen: list[Any] = []
    for reason in REASONS:
        generation = membership.join()
        total = sum_of_ranks()
        if generation == 2:
            membership.entered()
        meet(keys, f"all are in {generation}", 2)
        if generation == 1 + own_rank():
            generations.record_death(generation, death_of(own_rank()))
            generations.end(generation, reason)
        seen.append((generation, total, wait_for_the_end(membership)))
    return [
        *seen,
        membership.join(),
        sum_of_ranks(),
        membership.deaths(),
        membership.page.waiting,
    ]


def test_all_leave_a_generation_that_any_process_ends_and_join_the_next(
    tmp_path: Path,
) -> None:
    members = run_ranks(3, go_through_generations, str(tmp_path))[:2]
    wanted = [
        (generation, 3.0, reason) for generation, reason in enumerate(REASONS, start=1)
    ]
    assert members == [[*wanted, 4, 3.0, [death_of(1), death_of(1)], False]] * 2
    for rank in range(2):
        page = StatusPage(tmp_path / f"page{rank}")
        assert (page.generation, page.phase) == (4, Phase.JOIN)


def join_though_a_peer_died_on_the_way(folder: str) -> Any:
    """Join although rank 1 dies between its arrival and the forming of groups.

    The next incarnation of rank 1 joins the next generation.
    """
    generations = Generations(open_store(folder))
    incarnation = own_rank()
    begun_s = time.monotonic()
    if own_rank() == 1:
        for each in range(incarnation + 1):
            assert generations.claim(1, each)
        open_store(folder).wait(["1/arrived"])
        generations.arrive(1, 2)
        generations.record_death(1, death_of(1))
        generations.end(1, "died on the way")
    else:
        generations.claim(0, incarnation)
        generations.current()
    membership = open_membership(folder, own_rank(), 2, incarnation=incarnation)
    found = membership.join(), sum_of_ranks(), membership.deaths()
    return *found, time.monotonic() - begun_s < WAIT_S / 3


def test_a_death_while_groups_are_formed_costs_a_generation_and_no_more(
    tmp_path: Path,
) -> None:
    found = run_ranks(2, join_though_a_peer_died_on_the_way, str(tmp_path))
    assert found == [(2, 3.0, [death_of(1)], True)] * 2


def judge_errors(folder: str) -> list[bool]:
    """Return whether errors count as the loss of other ranks, and end a generation.

    The errors come before a loss, by a loss, and after a loss.
    """
    generations, membership = open_first_life(folder, 1)
    membership.join()
    before = [membership.lost(ValueError("its own")), generations.current() > 1]
    of_peers = caused(ValueError("its own"), PeersLostError("a connection was closed"))
    lost = [membership.lost(of_peers), generations.current() > 1]
    after = [membership.lost(ValueError("made of what was cut off"))]
    assert generations.wait_for_end(1) == "rank 0: its own"
    return before + lost + after


def test_only_errors_of_communication_end_a_generation(tmp_path: Path) -> None:
    assert run_ranks(1, judge_errors, str(tmp_path)) == [
        [False, False, True, True, True]
    ]


def join_in_vain(folder: str) -> tuple[str, int, Phase, bool]:
    """Wait for a third rank, which does not come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generations = Generations(store)
    generations.claim(0, 0)
    membership = open_membership(folder, 0, 3, join_s=0.05, connect=lambda _: store)
    generations.arrive(1, 3)
    with pytest.raises(PeersLostError) as lost:
        membership.join()
    page = membership.page
    return str(lost.value), page.generation, page.phase, page.waiting


def test_a_rank_that_joins_in_vain_says_how_many_came(tmp_path: Path) -> None:
    wanted = "generation 1: got 2 ranks in runtime.join_s=0.05 seconds, wanted all"
    assert run_ranks(1, join_in_vain, str(tmp_path)) == [(wanted, 1, Phase.JOIN, False)]


def finish_at_second_try(folder: str) -> list[Any]:
    """Finish in the second generation.

    In the first generation, rank 0 is done when rank 1 ends the generation. In the
    second generation, rank 1 is done while rank 0 still has work.
    """
    keys = open_store(folder)
    generations, membership = open_first_life(folder, 2)
    membership.join()
    if own_rank() == 1:
        keys.wait(["1/done"])
        generations.end(1, "lost once more")
        wait_for_the_end(membership)
    else:
        with pytest.raises(
            PeersLostError, match="other ranks were lost before all had finished"
        ) as lost:
            membership.finish()
        assert membership.lost(lost.value)
        assert membership.leave() == "lost once more"
    generation = membership.join()
    if own_rank() == 0:
        keys.wait(["2/done"])
        keys.set("the last thing", "")
    membership.finish()
    return [generation, keys.check(["the last thing"]), membership.page.waiting]


def test_a_rank_that_has_finished_is_there_until_all_have(tmp_path: Path) -> None:
    assert run_ranks(2, finish_at_second_try, str(tmp_path)) == [[2, True, False]] * 2


def finish_in_each_life(folder: str, incarnation: int) -> tuple[float, bool, str]:
    """Join, and finish the job.

    From incarnation 1 on, torchrun has started the ranks again.

    Returns:
        The sum over the ranks, whether a later error counts as a loss, and the error of
        another join.
    """
    generations = Generations(open_store(folder))
    generations.claim(own_rank(), incarnation)
    if incarnation:
        generations.begin_anew("was started again")
    membership = open_membership(folder, own_rank(), 2, incarnation=incarnation)
    membership.join()
    total = sum_of_ranks()
    membership.finish()
    is_lost = membership.lost(PeersLostError("too late"))
    ElasticGroups.form = raise_error  # type: ignore[method-assign]
    with pytest.raises(PeersLostError) as lost:
        membership.join()
    return total, is_lost, str(lost.value)


def raise_error(*_: object) -> None:
    raise PeersLostError("connections of another life")


def test_a_job_that_is_started_again_after_its_end_goes_to_its_end_again(
    tmp_path: Path,
) -> None:
    """A script's own work after the last iteration has failed.

    torchrun has then started all ranks again.
    """
    for incarnation in range(2):
        found = run_ranks(2, finish_in_each_life, str(tmp_path), incarnation)
        assert found == [(3.0, False, "connections of another life")] * 2


def lose_again_and_again(folder: str) -> dict[str, str]:
    """Lose one generation after another.

    Returns:
        The outcome, by the event that happens in each of the generations.
    """
    generations, membership = open_first_life(folder, 1)

    def lose(number: int, what: str) -> None:
        generation = membership.join()
        if what == "a death":
            generations.record_death(generation, death_of(0))
        if what == "an iteration":
            membership.page.enter(Phase.STEP, number)
        generations.end(
            generation,
            f"{SUPERVISOR}: its daemon" if what == "a supervisor" else f"loss {number}",
        )
        membership.leave()

    def lose_often(what: str) -> str:
        for number in range(1, 8):
            try:
                lose(number, what)
            except PeersLostError as error:
                return f"{number - 1} losses: {error}"
        return "goes on"

    return {
        what: lose_often(what)
        for what in ("a death", "an iteration", "a supervisor", "nothing")
    }


def test_losses_without_a_death_or_progress_are_an_error_in_the_end(
    tmp_path: Path,
) -> None:
    [found] = run_ranks(1, lose_again_and_again, str(tmp_path))
    said = found.pop("nothing")
    assert found == dict.fromkeys(found, "goes on")
    assert (
        said
        == "5 losses: connections were lost 5 times in a row though no rank died, the"
        " last time: loss 5"
    )


# Members that may not continue. The tests check the exit statuses of their processes.


def join_and_stay(connection: Connection, folder: str, port: int | None = None) -> None:
    """Join as the first incarnation of the only rank; join again at each message.

    The store is a file in `folder` or, with `port`, a TCP store.
    """

    def connect(folder: str) -> dist.Store:
        return (
            dist.TCPStore("127.0.0.1", port, is_master=False)
            if port
            else open_store(folder)
        )

    membership = open_membership(folder, 0, 1, connect=connect)
    while True:
        connection.send(membership.join())
        connection.recv()
        membership.leave()


def test_a_life_that_was_replaced_may_not_join(tmp_path: Path, start) -> None:
    store = open_store(str(tmp_path))
    generations = Generations(store)
    generations.claim(0, 0)
    member = start(join_and_stay, str(tmp_path))
    assert member.hear() == 1
    generations.claim(0, 1)
    generations.end(1, "replaced")
    member.tell("join again")
    assert member.exit_status() == FENCED
    assert not store.check(["2/arrived"])


def serve_store(connection: Connection) -> None:
    """Act as torchrun's agent: serve a store in which one rank may join."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Generations(store).claim(0, 0)
    connection.send(store.port)
    connection.recv()


def test_a_member_whose_store_is_lost_ends(tmp_path: Path, start) -> None:
    agent = start(serve_store)
    member = start(join_and_stay, str(tmp_path), agent.hear())
    assert member.hear() == 1
    agent.kill()
    assert member.exit_status() == STORE_LOST


def only_member(
    store: dist.Store,
    page: StatusPage,
    *,
    world_size: int = 1,
    join_s: float = WAIT_S,
    late: Late | None = None,
) -> tuple[Generations, Membership]:
    """Return keys and membership of the only process, without process groups."""
    generations = Generations(store)
    generations.claim(0, 0)
    member = Member(global_rank=0, world_size=world_size, incarnation=0)
    calls = dict.fromkeys(("form", "cut", "abandon", "leave"), lambda *_: None)
    groups: Any = SimpleNamespace(**calls)
    limits: Any = {"join_s": join_s, "grace_s": GRACE_S, "late": late}
    return generations, Membership(member, store, store, groups, page, **limits)


def test_the_end_of_each_generation_runs_what_waits_for_it(tmp_path: Path) -> None:
    generations, membership = only_member(
        dist.HashStore(), StatusPage(tmp_path / "page")
    )
    ends = [threading.Event(), threading.Event()]
    remaining = iter(ends)
    membership.at_end(lambda: next(remaining).set())
    for generation, end in enumerate(ends, 1):
        assert membership.join() == generation
        assert not end.is_set()
        generations.end(generation, "a test")
        assert end.wait(WAIT_S)
        membership.leave()


@pytest.mark.parametrize("comes", [True, False])
def test_missing_ranks_are_late_once_and_after_the_first_generation(
    tmp_path: Path, comes: bool
) -> None:
    """Rank 1 has arrived in the second generation, and rank 2 may come late."""
    seen: list[Sequence[int]] = []

    def act(missing: Sequence[int]) -> None:
        seen.append(missing)
        if comes:
            generations.arrive(2, 3)
            generations.done(2, 3)

    generations, membership = only_member(
        dist.HashStore(),
        StatusPage(tmp_path / "page"),
        world_size=3,
        join_s=0.2,
        late=Late(after_s=0.05, act=act),
    )
    in_vain = pytest.raises(RanksMissingError, match=r"in runtime.join_s=0.2 seconds")
    with in_vain:
        membership.join()
    assert seen == [], "all ranks build their models before the first generation"
    generations.end(1, "a death")
    generations.sign_in(2, 1)
    generations.arrive(2, 3)
    generations.done(2, 3)
    with contextlib.nullcontext() if comes else in_vain:
        membership.join()
        membership.finish()
    assert seen == [[2]]


def test_a_worker_that_asks_the_store_counts_as_waiting(tmp_path: Path) -> None:
    """A store that is cut off answers much later."""
    page = StatusPage(tmp_path / "page")
    store = NotingStore(page)
    _, membership = only_member(store, page)
    store.seen.clear()  # drops the supervisor's requests
    membership.join()
    assert membership.lost(PeersLostError("connections were lost"))
    membership.leave()
    membership.join()
    membership.finish()
    assert set(store.seen) == {("compare_set", True), ("add", True), ("wait", True)}
    assert not page.waiting
