"""The seams between the engine and its surroundings.

Each has at least two implementations, including those of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from moe_ckpt.types import (
    FileRecord,
    Measured,
    ParallelLayout,
    ReadyGradients,
    SnapshotPlan,
)


class TrainingHooks(Protocol):
    """The hooks that a training loop calls in each iteration, from iteration 1, on
    every rank, in this order.

    The first three are called again where `gradients_ready` returns False.
    """

    def iteration_started(self, iteration: int) -> None:
        """Before the first micro-batch's forward. The state is that after `iteration -
        1` steps.
        """
        ...

    def loss_known(self, iteration: int, loss: float) -> None:
        """The mean loss of the iteration's batch, the same on all ranks, before
        `gradients_ready`.

        Raises RolledBackError on all ranks if the loss shows that the state they
        continued from was bad.
        """
        ...

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        """Gradients are reduced and unscaled, the norm is known, no parameter has
        changed yet.

        Returns whether the loop may update. If not, the state is again that after
        `iteration - 1` steps, and the loop starts the iteration over.
        """
        ...

    def update_applied(self, iteration: int) -> None:
        """This rank's shard is updated; the weights that other ranks updated may not be
        gathered yet.
        """
        ...

    def step_committed(self, iteration: int) -> None:
        """Parameters, optimizer state and schedule are those after `iteration` steps.

        From here to the next iteration's start the loop changes no state; it may
        evaluate, under `torch.no_grad()`.
        """
        ...


class Policy(Protocol):
    """A pure decision maker: the same calls give the same answers, on every rank."""

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return the plan for the state after `iteration` optimizer steps.

        Each generation builds its policy anew. The first plan takes all operators in a
        slot, unless all ranks keep a window of the last generation, which the next one
        follows. In a window each operator is taken in full once, and its compute weight
        in all slots before. A policy that needs measurements calls `measure`, which is
        collective: on all ranks alike or on none.
        """
        ...


class DurableState(Protocol):
    """Writes and reads the whole training state as one directory.

    Every call is collective over all ranks, except those about abandoned saves, which
    some ranks may not have.
    """

    def start_save(self, directory: Path, iteration: int) -> None:
        """Begin writing the state into an existing empty directory. Afterwards the
        state may change again.

        Raises CheckpointSaveError on all ranks if it failed on any.
        """
        ...

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        """Return this rank's file records of the started save, or None until it is
        complete on all ranks.

        With `wait`, block until it is. Each rank returns the large files that it wrote,
        which are synced by then; the few other files are small, and the caller syncs
        and describes them. Raises CheckpointSaveError on all ranks if it failed on any.
        """
        ...

    def abandon_save(self) -> None:
        """Give up the save in flight, if there is one: it will not be complete. Does
        not wait.
        """
        ...

    def is_writing(self) -> bool:
        """Return whether this rank may still write to a directory: until then no other
        save may start, on any rank.
        """
        ...

    def load(
        self, directory: Path, resharded_from: ParallelLayout | None = None
    ) -> int:
        """Replace the training state by the saved one and return its iteration.

        `resharded_from` is the layout of the save if it differs: then everything is
        restored but the generators, which belong to the ranks of that layout; they are
        seeded for the iteration. Raises CheckpointLoadError on all ranks if it failed
        on any.
        """
        ...
