"""Keys of published blobs: what each key says, and the text that makes it."""

from __future__ import annotations

from moe_ckpt.snapshot.blob_keys import (
    BlobKey,
    BlobKind,
    is_local,
    is_record,
    is_snapshot,
    is_start,
    is_step,
    is_update,
    kind_of,
    new_snapshot_key,
    older_step_key,
    start_key,
    step_key,
    update_key,
)


def test_a_key_is_read_as_it_was_made() -> None:
    made = {
        "snapshot-8-2-1f03a7c2": (BlobKind.SNAPSHOT, 8, 2),
        # a random part: no parameters of the test, whose names have to be the same in
        # all of pytest's workers
        new_snapshot_key(8, 2): (BlobKind.SNAPSHOT, 8, 2),
        new_snapshot_key(8, 2, is_local=True): (BlobKind.LOCAL, 8, 2),
        start_key(9): (BlobKind.START, 9, 0),
        step_key(10): (BlobKind.STEP, 10, 0),
        older_step_key(11): (BlobKind.OLDER_STEP, 11, 0),
    }
    for text, (kind, iteration, slot) in made.items():
        key = BlobKey.parse(text)
        assert key == BlobKey(kind=kind, iteration=iteration, slot=slot)
        assert kind_of(text) is kind
        assert key.newest_iteration == iteration + slot


def test_two_snapshots_of_a_slot_have_different_keys() -> None:
    assert new_snapshot_key(8, 2) != new_snapshot_key(8, 2)


def test_each_question_is_true_of_its_kinds_only() -> None:
    keys = {
        "snapshot": new_snapshot_key(4, 0),
        "local": new_snapshot_key(4, 0, is_local=True),
        "start": start_key(4),
        "step": step_key(4),
        "record": older_step_key(4),
        "update": update_key(new_snapshot_key(4, 0)),
        "other": "snapshots-4-0-aa",
    }
    questions = {
        is_snapshot: {"snapshot", "local"},
        is_local: {"local"},
        is_start: {"start"},
        is_step: {"start", "step"},
        is_record: {"step", "record"},
        is_update: {"update"},
    }
    for question, kinds in questions.items():
        assert {kind for kind, key in keys.items() if question(key)} == kinds
    assert kind_of(keys["other"]) is None
