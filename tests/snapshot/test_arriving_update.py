"""An update takes steps while the bytes of its gradients arrive.

The first step begins before the last byte has arrived. No result counts before all
bytes are intact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.snapshot import arriving_update
from moe_ckpt.snapshot.adam_update import AdamStep, Update, update_to_bytes
from moe_ckpt.snapshot.arriving_update import ArrivingUpdate
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import (
    MASTER,
    MOMENTS,
    PartKey,
    checksum,
    header_to_json,
    layout_parts,
)
from tests.replication.blobs import buffers_of, content_of
from tests.snapshot.samples import HEADER
from tests.snapshot.updates import apply_update

SIZES = {"first": 3000, "second": 70_000}
FIRST_BYTES, ALL_BYTES = 4 * SIZES["first"], 4 * sum(SIZES.values())
STEP = AdamStep(
    learning_rate=1e-2,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.1,
    decoupled=True,
    steps=3.0,
    scale=0.5,
)


class Arriving:
    """A folder with a state, and the update that leads to the next state."""

    def __init__(self, path: Path) -> None:
        self.folder = BlobFolder(path)
        random = torch.Generator().manual_seed(1)
        pieces = [
            (
                PartKey(operator="layer 0", tensor=name, role=role),
                torch.rand(size, generator=random),
                (0, size),
            )
            for name, size in SIZES.items()
            for role in (MASTER, *MOMENTS)
        ]
        parts, payload_bytes = layout_parts(pieces)
        tensors = {key: tensor for key, tensor, _ in pieces}
        payload = self.folder.allocate(payload_bytes)
        payload.copy_(
            torch.cat([tensors[part.key] for part in parts]).view(torch.uint8)
        )
        numbers = {
            "iteration": 3,
            "window_start": 3,
            "slot": 0,
            "num_slots": 1,
            "unit": None,
        }
        of_parts: dict[str, Any] = {"parts": parts, "payload_bytes": payload_bytes}
        base = replace(
            HEADER, **numbers, **of_parts, checksum=checksum(payload, payload_bytes)
        )
        self.folder.deposit("base", header_to_json(base), payload, payload_bytes)
        following = replace(base, iteration=4, window_start=4, checksum=0)
        update = Update(
            base="base", target="next", steps=(STEP, STEP), header=following, seals=True
        )
        self.head = update_to_bytes(update)
        self.gradients = torch.randn(sum(SIZES.values()), generator=random)

    def payload(self) -> torch.Tensor:
        """Return memory for gradients, as a receiver allocates it."""
        return self.folder.allocate(ALL_BYTES)

    def fill(self, payload: torch.Tensor, start: int, end: int) -> None:
        payload[start:end] = self.gradients.view(torch.uint8)[start:end]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield executor


@pytest.fixture
def arriving(tmp_path: Path) -> Arriving:
    return Arriving(tmp_path)


def test_a_step_is_taken_while_later_gradients_arrive(
    arriving: Arriving, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the updater waits for bytes, the next gradient arrives.

    The updater waits for a gradient only after the step before.
    """
    taken: list[torch.optim.AdamW] = []
    step = torch.optim.AdamW.step
    taken_at_waits: list[int] = []

    class NextGradient(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            start, end = ((0, FIRST_BYTES), (FIRST_BYTES, ALL_BYTES))[
                len(taken_at_waits)
            ]
            taken_at_waits.append(len(taken))
            arriving.fill(payload, start, end)
            update.arrived(end)
            return True

    def counted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        taken.append(self)
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    monkeypatch.setattr(arriving_update, "Condition", NextGradient)
    payload = arriving.payload()
    update = ArrivingUpdate(
        arriving.folder, "update", arriving.head, payload, ALL_BYTES
    )
    update.start(executor)
    update.keep()
    assert taken_at_waits == [0, 1]
    made = content_of(arriving.folder, "next")
    arriving.folder.discard("next")
    at_once = arriving.payload()
    arriving.fill(at_once, 0, ALL_BYTES)
    apply_update(arriving.folder, arriving.head, at_once, ALL_BYTES)
    assert made == content_of(arriving.folder, "next"), (
        "bit for bit as of gradients that were all there"
    )


@pytest.mark.parametrize("arrived_bytes", [0, FIRST_BYTES, ALL_BYTES])
def test_an_update_that_is_abandoned_leaves_nothing(
    arrived_bytes: int, arriving: Arriving, executor: ThreadPoolExecutor
) -> None:
    held = buffers_of(arriving.folder)
    payload = arriving.payload()
    update = ArrivingUpdate(
        arriving.folder, "update", arriving.head, payload, ALL_BYTES
    )
    update.start(executor)
    arriving.fill(payload, 0, arrived_bytes)
    update.arrived(arrived_bytes)
    update.abandon()
    arriving.folder.free(payload)
    assert arriving.folder.keys() == ["base"]
    assert buffers_of(arriving.folder) == held


def test_a_damaged_head_fails_only_what_is_kept(
    arriving: Arriving, executor: ThreadPoolExecutor
) -> None:
    """The receiver compares hashes first.

    Garbled bytes are sent again, and a wrong head is refused.
    """
    payload = arriving.payload()
    update = ArrivingUpdate(arriving.folder, "update", b"garbled", payload, ALL_BYTES)
    update.start(executor)
    update.arrived(ALL_BYTES)
    with pytest.raises(CheckpointLoadError, match="an update's head"):
        update.keep()
    update.abandon()
