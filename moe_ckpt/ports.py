"""The interfaces between the engine and its surroundings.

Each interface has at least two implementations, including those of tests.
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
    """The hooks that a training loop calls in each iteration, from iteration 1 on.

    Every rank calls the hooks in the order below. If `gradients_ready` returns False,
    the loop calls the first three again.
    """

    def iteration_started(self, iteration: int) -> None:
        """Called before the forward pass of the first micro-batch.

        The state is the one after `iteration - 1` steps.
        """
        ...

    def loss_known(self, iteration: int, loss: float) -> None:
        """Called before `gradients_ready`, with the mean loss of the iteration's batch.

        Args:
            iteration: The iteration, counted from 1.
            loss: The loss, equal on all ranks.

        Raises:
            RolledBackError: On all ranks: the loss shows that the state from which the
                ranks continued was bad.
        """
        ...

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        """Called after the reduction, before any parameter changes.

        Gradients are reduced and unscaled, and the norm is known.

        Returns:
            Whether the loop may update. If not, the state is again the one after
            `iteration - 1` steps, and the loop starts the iteration over.
        """
        ...

    def update_applied(self, iteration: int) -> None:
        """Called when this rank's shard is updated.

        The weights that other ranks updated may not be gathered yet.
        """
        ...

    def step_committed(self, iteration: int) -> None:
        """Called when the whole state is the one after `iteration` steps.

        The state consists of parameters, optimizer and schedule. From here to the start
        of the next iteration the loop changes no state. The loop may evaluate, under
        `torch.no_grad()`.
        """
        ...


class Policy(Protocol):
    """Decides which snapshots to take.

    A policy is pure: the same calls give the same answers. Ranks of one stage get equal
    plans. Plans of different stages may differ only in the operators that they name,
    because saves and measurements are collective over all ranks of the job.
    """

    def plan(self, iteration: int, measure: Callable[[], Measured]) -> SnapshotPlan:
        """Return the plan for the state after `iteration` optimizer steps.

        A policy without snapshots in host memory lives as long as the process, and is
        called after each iteration.

        A policy with snapshots in host memory is built anew in each generation. The
        first call of a generation comes before the generation's first iteration. The
        first plan takes all operators in one slot, and its `durable` is ignored. The
        policy may leave this snapshot out if `measure().kept_since` is not None: all
        ranks then keep a window of the last generation. If a window has several slots,
        each operator is in full in one slot, and its compute weight is in all slots
        before that one.

        Args:
            iteration: Number of optimizer steps.
            measure: Returns measurements. The call is collective: on all ranks or on
                none.
        """
        ...


class DurableState(Protocol):
    """Writes and reads the whole training state as one directory.

    Every call is collective over all ranks, except calls about abandoned saves, which
    some ranks may not have.
    """

    def start_save(self, directory: Path, iteration: int) -> None:
        """Begin writing the state into an existing empty directory.

        Afterwards the state may change again.

        Raises:
            CheckpointSaveError: On all ranks, if the start failed on any rank.
        """
        ...

    def finish_save(self, *, wait: bool) -> Sequence[FileRecord] | None:
        """Return the file records of the started save once it is complete on all ranks.

        The records name the large files that this rank wrote, which are on disk by
        then. The few other files are small; the caller syncs and describes them.

        Args:
            wait: Whether to block until the save is complete.

        Returns:
            The records, or None while the save is not complete.

        Raises:
            CheckpointSaveError: On all ranks, if the save failed on any rank.
        """
        ...

    def abandon_save(self) -> None:
        """Give up the save in flight, if there is one. Does not wait.

        The save will not be complete.
        """
        ...

    def is_writing(self) -> bool:
        """Return whether this rank may still write to a directory.

        While a rank writes, no other save may start on any rank.
        """
        ...

    def load(
        self, directory: Path, resharded_from: ParallelLayout | None = None
    ) -> int:
        """Replace the training state by the saved one, and return its iteration.

        Args:
            directory: The saved state.
            resharded_from: The layout of the save, if it differs. Then everything is
                restored except the random generators: these belong to the ranks of that
                layout, and are seeded for the iteration instead.

        Raises:
            CheckpointLoadError: On all ranks, if the load failed on any rank.
        """
        ...
