"""Copies by gradient over real sockets: a peer computes the owner's exact state.

If the peer's result differs, the peer gets the whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.flowcheck.mirror.captured_gradients import from_sums
from moe_ckpt.flowcheck.mirror.plan import BucketOffset, Mirrored, MirroredSums
from moe_ckpt.replication.copy_ledger import NoCopies
from moe_ckpt.replication.local_disk import copy_blobs
from moe_ckpt.replication.publisher import Publisher
from moe_ckpt.replication.sender import Replicator
from moe_ckpt.snapshot.adam_update import (
    AdamStep,
    Gradients,
    ObservedGradients,
    Update,
    update_from_bytes,
    update_to_bytes,
)
from moe_ckpt.snapshot.arriving_update import observes_nothing
from moe_ckpt.snapshot.blob_keys import is_update
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.capture import SnapshotEngine, SnapshotRequest
from moe_ckpt.snapshot.codec import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    PartKey,
    SnapshotHeader,
    UnitTag,
    checksum,
    header_from_json,
)
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.windows import HostBuffers
from tests.replication.blobs import buffers_of, content_of, payload_of
from tests.replication.peers import Ranks, ranks_in
from tests.snapshot import samples
from tests.snapshot.samples import SHARD, Piece
from tests.snapshot.updates import apply_update
from tests.waits import WAIT_S

UNIT = "layer 0 expert 1"
SIZES = {"fc1": 1003, "fc2": 70_001}
TAG = UnitTag(name=UNIT, epoch=0, on_peers=True, on_disk=False, seen_tokens=0)
HEADER = replace(
    samples.HEADER,
    iteration=0,
    window_start=0,
    slot=0,
    num_slots=1,
    full=(UNIT,),
    unit=TAG,
)


class Asked:
    """Hands copies on to a replicator, and keeps the requested keys."""

    def __init__(self, replicator: Replicator) -> None:
        self._replicator = replicator
        self.keys: list[str] = []

    def copy(self, keys: Sequence[str]) -> Future[Any]:
        self.keys += keys
        return self._replicator.copy(keys)

    def drop(self, keys: Sequence[str]) -> None:
        self._replicator.drop(keys)


class Owner:
    """Trains two tensors of one expert with torch's optimizer.

    A peer keeps copies of every iteration.
    """

    def __init__(
        self, ranks: Ranks, adam: type[torch.optim.Adam], **options: Any
    ) -> None:
        server = ranks.serve(1)
        self.peer = ranks.held(1, SHARD.global_rank)
        self.asked = Asked(ranks.replicate(SHARD.global_rank, server.address))
        self.own = ranks.own(SHARD.global_rank)
        self.publisher = Publisher(self.own, self.asked, WAIT_S, lambda _: None)
        self.publisher.begin_copying([set()], drop_stale=True)
        self.copier = HostCopier()
        self.engine = SnapshotEngine(self.copier, HostBuffers(self.own), self.publisher)
        self._random = torch.Generator().manual_seed(7)
        self.weights = {
            name: torch.nn.Parameter(self._draw(size)) for name, size in SIZES.items()
        }
        self.optimizer = adam(self.weights.values(), **{"lr": 1e-2, **options})
        self.header = HEADER
        self._step()

    def train(self, *, epoch: int = 0, learning_rate_told: float | None = None) -> str:
        """Take a step and a snapshot, wait for exact copies, and return their key.

        Args:
            epoch: The epoch of the snapshot.
            learning_rate_told: The learning rate in the update; None: the rate of the
                step.
        """
        group = self.optimizer.param_groups[0]
        group["lr"] *= 0.9
        told = AdamStep(
            learning_rate=learning_rate_told or group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=isinstance(self.optimizer, torch.optim.AdamW),
            steps=self.header.iteration + 1.0,
        )
        self._step()
        iteration = self.header.iteration + 1
        self.header = replace(
            HEADER,
            iteration=iteration,
            window_start=iteration,
            unit=replace(TAG, epoch=epoch),
        )
        self.engine.capture(
            [SnapshotRequest(self.header, self._pieces, (), self._gradients(told))]
        )
        taken = self.engine.collect(wait=True)
        assert taken
        (snapshot,) = taken.snapshots
        assert self.publisher.await_copies([snapshot])
        (key,) = (
            key
            for key in self.peer.keys()  # noqa: SIM118
            if key.startswith(f"snapshot-{iteration}-")
        )
        own = snapshot.payload[: snapshot.header.payload_bytes].numpy().tobytes()
        assert content_of(self.peer, key)[1] == own, (
            "the peer's copy is not the owner's state"
        )
        return key

    def _draw(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random)

    def _step(self) -> None:
        for weight in self.weights.values():
            weight.grad = self._draw(weight.numel())
        self.optimizer.step()

    def _pieces(self) -> list[Piece]:
        return [
            (
                PartKey(operator=UNIT, tensor=name, role=role),
                tensor.detach(),
                (0, tensor.numel()),
            )
            for name, weight in self.weights.items()
            for role, tensor in {
                MASTER: weight,
                EXP_AVG: self.optimizer.state[weight]["exp_avg"],
                EXP_AVG_SQ: self.optimizer.state[weight]["exp_avg_sq"],
            }.items()
        ]

    def _gradients(self, step: AdamStep) -> Gradients:
        return {
            PartKey(operator=UNIT, tensor=name, role=MASTER): (weight.grad, step)
            for name, weight in self.weights.items()
            if weight.grad is not None
        }


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ranks_in(tmp_path) as ranks:
        yield ranks


@pytest.fixture
def owner(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> Owner:
    caplog.set_level(logging.WARNING)
    return Owner(ranks, torch.optim.AdamW)


ADAMS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "no decay": (torch.optim.AdamW, {"weight_decay": 0.0, "eps": 1e-5}),
    "other betas": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
}


@pytest.mark.parametrize("name", ADAMS)
def test_a_peer_takes_the_steps_itself_and_comes_to_the_same_bits(
    name: str, ranks: Ranks
) -> None:
    adam, options = ADAMS[name]
    owner = Owner(ranks, adam, **options)
    for _ in range(5):
        owner.train()
    assert [is_update(key) for key in owner.asked.keys] == [
        False,
        True,
        True,
        True,
        True,
    ]
    # neither folder is a mapping
    assert not any(is_update(key) for key in owner.peer.keys())  # noqa: SIM118
    earlier = [key for key in owner.own.keys() if "-5-" not in key]  # noqa: SIM118
    assert not any(map(is_update, earlier)), "of no use any more"


def test_memory_of_gradients_is_used_again_on_both_sides(owner: Owner) -> None:
    for _ in range(9):
        owner.train()
    assert max(map(int, buffers_of(owner.peer))) == 9 + 1
    # the next update may be packed before the last one is confirmed
    assert max(map(int, buffers_of(owner.own))) <= 9 + 2


def test_a_gap_is_noticed_and_the_whole_state_sent(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.train()
    owner.peer.clear()
    owner.train()
    assert "wanted that of iteration 1" in caplog.text
    owner.train()
    assert [is_update(key) for key in owner.asked.keys] == [False, True, True], (
        "the stream goes on"
    )
    assert len(caplog.records) == 1


def test_a_copy_that_was_damaged_is_not_built_upon(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    payload_of(owner.peer.get(owner.train()))[100] ^= 1
    owner.train()
    assert "got a state with checksum" in caplog.text


def _following(before: SnapshotHeader, target: str, **fields: Any) -> Update:
    """Return the update that leads from a state to the next iteration.

    A rank hands such an update over to a checkpoint server.
    """
    header = replace(
        before,
        iteration=before.iteration + 1,
        window_start=before.iteration + 1,
        checksum=0,
    )
    steps = before.iteration + 1.0
    step = AdamStep(
        learning_rate=1e-2,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        decoupled=True,
        steps=steps,
        scale=0.5,
    )
    return Update(
        target=target, steps=(step,) * len(SIZES), header=header, seals=True, **fields
    )


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_server_seals_no_state_that_it_made_of_damage(
    owner: Owner, is_damaged: bool, tmp_path: Path
) -> None:
    """A checkpoint server computes the checksum of the state that the server makes.

    The server must therefore not start from a damaged state.
    """
    key, folder = owner.train(), BlobFolder(tmp_path / "server")
    copy_blobs(owner.peer, folder, [key])
    before = header_from_json(folder.get(key).header)
    update = _following(before, "snapshot-next", base=key)
    if is_damaged:
        payload_of(folder.get(key))[100] ^= 1
    gradients = folder.allocate(update.payload_bytes)
    gradients.zero_()
    take = lambda: apply_update(  # noqa: E731
        folder, update_to_bytes(update), gradients, update.payload_bytes
    )
    if is_damaged:
        with pytest.raises(CheckpointLoadError, match="got a state with checksum"):
            take()
        assert "snapshot-next" not in folder.keys()  # noqa: SIM118 - not a mapping
    else:
        take()
        made = folder.get("snapshot-next")
        assert header_from_json(made.header).checksum == checksum(
            payload_of(made), made.payload_bytes
        )


def test_a_peer_that_never_comes_to_the_same_gets_whole_states(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(6):
        owner.train(learning_rate_told=1.0)
    assert len(caplog.records) == 3, "then there is no other attempt"


def test_another_line_is_no_base(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.train()
    owner.train(epoch=1)
    assert "wanted the iteration before" in caplog.text


def test_updates_that_a_process_could_not_send_end_with_it(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path)
    folder.deposit("update-snapshot-3-0-12", b"", folder.allocate(100), 100)
    Publisher(folder, NoCopies(), 1.0, lambda _: None).adopt()
    assert (folder.keys(), buffers_of(folder)) == ([], [])


@given(
    data=st.binary()
    | st.sampled_from([b"{}\n", b'{"base":"a","target":"b","steps":[[1]]}\n{}'])
)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(CheckpointLoadError):
        update_from_bytes(data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_gradients_lead_to_the_state_that_tapped_ones_do(
    owner: Owner, dtype: str, tmp_path: Path
) -> None:
    """One of the two gradients lies in a bucket, behind five other elements."""
    key, folder = owner.train(), BlobFolder(tmp_path / "server")
    copy_blobs(owner.peer, folder, [key])
    before = header_from_json(folder.get(key).header)
    drawn = torch.randn(
        sum(SIZES.values()), generator=torch.Generator().manual_seed(3)
    ).to(getattr(torch, dtype))
    gradients = drawn.float()
    bucket = (
        torch.cat([torch.ones(5, dtype=drawn.dtype), drawn[SIZES["fc1"] :]])
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    sums = MirroredSums(
        group="ab" * 16, size=2, buckets=(8, len(bucket)), dtype=dtype, first=3, end=6
    )
    observed = _in_the_second_bucket(sums, start=5)
    opened = from_sums(
        lambda wanted: [bytearray(8), bytearray(bucket)] if wanted == sums else []
    )
    made = {}
    for target, share, others in (
        ("tapped", gradients, None),
        ("captured", gradients[: SIZES["fc1"]], observed),
    ):
        update = _following(before, f"snapshot-{target}", base=key, observed=others)
        assert update.payload_bytes == share.nbytes
        payload = folder.allocate(share.nbytes)
        payload.copy_(share.view(torch.uint8))
        apply_update(folder, update_to_bytes(update), payload, share.nbytes, opened)
        made[target] = content_of(folder, f"snapshot-{target}")
    assert made["tapped"] == made["captured"]
    far = _in_the_second_bucket(sums, start=6)
    none = replace(observed, source=Mirrored(groups=(sums,), offsets=()).to_json())
    for others, opens, says in (
        (far, opened, "wanted a place within"),
        (none, opened, "got 0 places, wanted 1"),
        (replace(observed, source=[]), opened, "captured gradients of an update"),
        (observed, observes_nothing, "got an update without 1 of its gradients"),
    ):
        update = _following(before, "snapshot-none", base=key, observed=others)
        payload = folder.allocate(update.payload_bytes)
        with pytest.raises(CheckpointLoadError, match=says):
            apply_update(
                folder, update_to_bytes(update), payload, update.payload_bytes, opens
            )
    assert "snapshot-none" not in folder.keys()  # noqa: SIM118 - not a mapping


def _in_the_second_bucket(sums: MirroredSums, *, start: int) -> ObservedGradients:
    """Return the second of two gradients, as servers capture the gradient."""
    offset = BucketOffset(group=0, bucket=1, start=start)
    mirrored = Mirrored(groups=(sums,), offsets=(offset,))
    return ObservedGradients(weights=(False, True), source=mirrored.to_json())


def test_an_update_with_a_fact_too_few_is_refused(owner: Owner) -> None:
    key = owner.train()
    update = _following(
        header_from_json(owner.peer.get(key).header), "snapshot-next", base=key
    )
    assert update_from_bytes(update_to_bytes(update)) == update
    observed = ObservedGradients(weights=(False,), source=None)
    with_one = replace(update, observed=observed)
    with pytest.raises(CheckpointLoadError, match="got 1 facts"):
        update_from_bytes(update_to_bytes(with_one))


@pytest.mark.parametrize(
    "names", [{"base": "../other"}, {"target": "a/b"}, {"target": ""}]
)
def test_an_update_names_no_files_outside_of_its_folder(
    owner: Owner, names: dict[str, str]
) -> None:
    key = owner.train()
    update = _following(
        header_from_json(owner.peer.get(key).header), "snapshot-next", base=key
    )
    with pytest.raises(CheckpointLoadError, match="wanted letters, digits"):
        update_from_bytes(update_to_bytes(replace(update, **names)))
