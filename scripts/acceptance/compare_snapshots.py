"""Train as launcher/train.py does, and compare each snapshot with copies of the state.

At the beginning of a capture, each piece of the capture is cloned on its device. Once
the snapshot in host memory is complete, the snapshot's bytes must equal those of the
clones. A copy that raced with a kernel would differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from launcher.train import main
from moe_ckpt.snapshot.capture import SnapshotEngine, SnapshotRequest

_counted = {"snapshots": 0, "bytes": 0}


def compare_captures() -> None:
    """Compare every capture of this process, and of processes that are forked later."""
    capture, collect = SnapshotEngine.capture, SnapshotEngine.collect
    clones: dict[int, list[dict[Any, torch.Tensor]]] = {}

    def capture_and_clone(
        engine: SnapshotEngine, wanted: Sequence[SnapshotRequest], **options: Any
    ) -> None:
        clones[id(engine)] = [
            {
                key: tensor.detach().clone()
                for key, tensor, _ in [*each.pieces(), *each.changing]
            }
            for each in wanted
        ]
        capture(engine, wanted, **options)

    def collect_and_compare(engine: SnapshotEngine, *, wait: bool) -> Any:
        captured = collect(engine, wait=wait)
        if captured is None:
            return None
        for snapshot, wanted in zip(
            captured.snapshots, clones.pop(id(engine)), strict=True
        ):
            for part in snapshot.header.parts:
                got, want = (
                    snapshot.part(part).reshape(-1),
                    wanted[part.key].cpu().reshape(-1),
                )
                same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
                assert same, (
                    f"iteration {snapshot.header.iteration}: {part.key} differs from"
                    " its copy on the device"
                )
                _counted["bytes"] += want.nbytes
            _counted["snapshots"] += 1
        print(
            f"compared {_counted['snapshots']} snapshots,"
            f" {_counted['bytes'] / 1e9:.3f} GB",
            flush=True,
        )
        return captured

    SnapshotEngine.capture = capture_and_clone  # type: ignore[method-assign]
    SnapshotEngine.collect = collect_and_compare  # type: ignore[method-assign]


if __name__ == "__main__":
    compare_captures()
    sys.exit(main(sys.argv[1:]))
