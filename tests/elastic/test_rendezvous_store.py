"""A wait in a `PollingStore` ends with its keys, its deadline or its generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.elastic.rendezvous_store import PollingStore
from moe_ckpt.errors import PeersLostError
from tests.waits import WAIT_S


def polling(
    client: dist.Store,
    *,
    is_over: Callable[[], bool] = lambda: False,
    timeout_s: float = WAIT_S,
) -> Any:
    return PollingStore(client, threading.Lock(), "7/", is_over, timeout_s)


def test_a_polling_store_is_a_part_of_its_client() -> None:
    client = dist.HashStore()
    store = polling(client)
    store.set("a", "1")
    assert (client.get("7/a"), store.get("a"), store.add("n", 2)) == (b"1", b"1", 2)
    assert (store.check(["a", "n"]), store.check(["a", "b"])) == (True, False)


def test_a_polling_store_waits_for_a_key_that_another_sets() -> None:
    client, asked = dist.HashStore(), threading.Event()
    store = polling(client, is_over=lambda: bool(asked.set()))
    setter = threading.Thread(
        target=lambda: asked.wait(WAIT_S) and client.set("7/a", "late")
    )
    setter.start()
    assert store.get("a") == b"late"
    setter.join()
    assert asked.is_set()


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=WAIT_S)])
def test_a_wait_in_a_polling_store_ends_when_others_are_lost(
    timeout: timedelta | None,
) -> None:
    answers = iter([False, False, True])
    store = polling(dist.HashStore(), is_over=lambda: next(answers))
    with pytest.raises(PeersLostError, match="rendezvous: other ranks were lost"):
        store.wait(["a"], timeout)


@pytest.mark.parametrize(
    ("own_s", "asked_s"), [(0.02, None), (0.02, WAIT_S), (WAIT_S, 0.02)]
)
def test_a_wait_in_a_polling_store_has_a_deadline(
    own_s: float, asked_s: float | None
) -> None:
    store = polling(dist.HashStore(), timeout_s=own_s)
    with pytest.raises(PeersLostError, match=r"got no \['a'\] in 0.02 s"):
        store.wait(["a"], None if asked_s is None else timedelta(seconds=asked_s))


@pytest.mark.parametrize(
    "ask", [lambda store: store.set("a", "1"), lambda store: store.add("a", 1)]
)
def test_a_polling_store_that_is_over_asks_nothing(
    ask: Callable[[Any], object],
) -> None:
    client = dist.HashStore()
    with pytest.raises(PeersLostError, match="rendezvous: other ranks were lost"):
        ask(polling(client, is_over=lambda: True))
    assert client.num_keys() == 0


def test_a_polling_store_asks_less_and_less_often() -> None:
    asked: list[float] = []
    store = polling(
        dist.HashStore(),
        is_over=lambda: bool(asked.append(time.monotonic())),
        timeout_s=0.4,
    )
    with pytest.raises(PeersLostError, match="got no"):
        store.wait(["a"])
    assert 10 < len(asked) < 60
    assert asked[1] - asked[0] < asked[-1] - asked[-2]
