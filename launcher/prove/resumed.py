"""The proof of a command without an attachment.

The command must repeat itself, and its own resume must be exact.

    first, second    from the same beginning: equal after each iteration, on each rank
    killed           a rank kills its process; the command is started again, unless its
                     launcher does that, and goes on from its own checkpoint: equal, too
    control          the same, but the resumed ranks damage their state after an
                     iteration, which the comparison must notice
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.output_folder import log_of
from launcher.prove.compare import (
    Difference,
    Digests,
    first_difference,
    loaded_otherwise,
    names_that_differ,
    read_digests,
    without,
)
from launcher.prove.runs import (
    DIFFERENT,
    EXACT,
    NOT_PROVEN,
    Ended,
    RunFailedError,
    print_end,
)
from moe_ckpt.config import require
from moe_ckpt.observation import Order
from moe_ckpt.observed_start import LINE, NAME

PLACEHOLDER = "{run}"
"""Placeholder in a command for a folder that each run has of its own."""

Execute = Callable[[Sequence[str], Path, Mapping[str, str]], Ended]
"""Runs a command to its end, given the file for its output and its environment."""

_MOST_NAMES = 5


@dataclass(frozen=True)
class ResumeProof:
    """The proof of one command.

    Raises:
        ConfigError: The command is empty, or has no placeholder for a folder of each
            run.
    """

    command: Sequence[str]
    """The words of the command, with `PLACEHOLDER` for the folder of each run."""

    folder: Path
    """The folder of all runs."""

    execute: Execute
    """Runs a command to its end."""

    resumes: bool = True
    """Whether the command's own resume is proven, too."""

    ignored: Collection[str] = ()
    """Names of tensors that are not compared."""

    def __post_init__(self) -> None:
        require(bool(self.command), "COMMAND", "nothing", "the command that trains")
        if self.resumes:
            has_placeholder = any(PLACEHOLDER in word for word in self.command)
            options = (
                f"the folder of its checkpoints as {PLACEHOLDER} (--save {PLACEHOLDER}"
                f" --load {PLACEHOLDER})"
            )
            wanted = f"{options}, which each run has of its own, or --no-resume"
            require(has_placeholder, "COMMAND", " ".join(self.command), wanted)

    def run(self) -> int:
        """Run and compare; print a line for each run and one for the outcome.

        Returns:
            The exit status.

        Raises:
            ConfigError: The command has too few iterations.
            RunFailedError: A run failed by itself, or has no digests.
        """
        first = self._digests("first")
        different = first_difference(first, self._digests("second"))
        if different:
            print(
                "different: two runs of the command, without a fault, differ"
                f" {different}"
            )
            return DIFFERENT
        if not self.resumes:
            print(f"{self._exact}: two runs are equal, all {len(first.states)} digests")
            return EXACT
        return self._prove_resume(first)

    def _prove_resume(self, first: Digests) -> int:
        rank, iteration = (
            first.num_ranks - 1,
            first.iterations[(len(first.iterations) - 1) // 2],
        )
        killed = self._digests("killed", kill_rank=rank, kill_iteration=iteration)
        if killed.resumed_after < first.iterations[0]:
            wanted = f"a checkpoint from before iteration {iteration} ended"
            print(f"not proven: the command began anew after the kill, wanted {wanted}")
            return NOT_PROVEN
        different = _difference(first, killed)
        if different and different.iteration <= killed.resumed_after:
            print(
                "different: two runs of the command, before the kill, differ"
                f" {different}"
            )
            return DIFFERENT
        if different:
            print(f"different: the resumed run differs {different}")
            print(*_as_loaded(first, killed), _in_all(first, killed), sep="\n")
            return DIFFERENT
        control = self._digests(
            "control", kill_rank=rank, kill_iteration=iteration, spoil_after_resume=True
        )
        found = _difference(first, control)
        # ranks damage their states after their first iteration
        if found is None or found.iteration <= control.resumed_after + 1:
            print(
                "not proven: a resumed state that was changed had the same digests, too"
            )
            return NOT_PROVEN
        equal = "two runs are equal, and so is the resumed one"
        print(
            f"{self._exact}: {equal}, all {len(first.states)} digests; the control's"
            " are not"
        )
        return EXACT

    def _digests(self, name: str, **faults: Any) -> Digests:
        """Run the command to its end, print a line, and return the digests.

        Args:
            name: The name of the run.
            **faults: Orders to the ranks beside training, as in `Order`.
        """
        run = self.folder / name
        order = Order(run=str(run), **faults)
        print(f"{name}:", end=" ", flush=True)
        started_s = time.monotonic()
        self._start(name, order)
        try:
            digests = self._compared(read_digests(run))
        except FileNotFoundError as error:
            loops = "the loop of Megatron-LM, Megatron-Bridge or ms-swift"
            wanted = (
                f"{loops}, or a script in which each rank calls"
                " moe_ckpt.observe.observe"
            )
            got = f"no digests ({error.filename})"
            raise RunFailedError(
                f"COMMAND: got {got}, wanted {wanted}; log: {log_of(run)}"
            ) from error
        if order.kill_rank is not None:
            what = (
                f"rank {order.kill_rank} killed after iteration {order.kill_iteration}"
            )
            print(f"{what}, resumed after iteration {digests.resumed_after}", end=" ")
        print_end(digests, started_s, log_of(run))
        return digests

    @property
    def _exact(self) -> str:
        names = ", ".join(self.ignored)
        return f"exact, except for {names}" if names else "exact"

    def _compared(self, digests: Digests) -> Digests:
        """Return digests without ignored tensors.

        Raises:
            ConfigError: An ignored tensor is unknown.
        """
        if not self.ignored:
            return digests
        known = {
            name
            for logged in digests.tensors.values()
            for tensors in logged
            for name in tensors
        }
        for name in self.ignored:
            require(
                name in known, "--except", name, "a name as `different:` lines have it"
            )
        return without(digests, self.ignored)

    def _start(self, name: str, order: Order) -> None:
        """Run the command, and once more if the kill has ended the command."""
        own = Path(order.run) / "own"
        own.mkdir(parents=True)
        words = [word.replace(PLACEHOLDER, str(own)) for word in self.command]
        environment = os.environ | order.environment() | self._python_path()
        ended = self.execute(words, log_of(Path(order.run)), environment)
        if order.kill_rank is not None:
            was_killed = order.killed.exists()
            # whatever the exit status is: a shell may hide the status, and a launcher
            # may have restarted its ranks
            if was_killed and not read_digests(Path(order.run)).loaded:
                again = self.folder / f"{name}-resumed.log"
                ended = self.execute(words, again, environment)
            elif not was_killed and not ended.status:
                what = (
                    f"rank {order.kill_rank} has not come to iteration"
                    f" {order.kill_iteration}"
                )
                raise RunFailedError(
                    f"{name}: {what}, where the kill was to be; log: {ended.log}"
                )
        if ended.status:
            why = (
                f"ended with status {ended.status}; log: {ended.log}\n{ended.last_line}"
            )
            raise RunFailedError(f"{name}: {why}")

    def _python_path(self) -> dict[str, str]:
        """Return the variable through which Python processes are observed."""
        start = self.folder / "start"
        start.mkdir(exist_ok=True)
        (start / f"{NAME}.py").write_text(LINE)
        others = os.environ.get("PYTHONPATH")
        return {
            "PYTHONPATH": os.pathsep.join([str(start), *([others] if others else [])])
        }


def _difference(first: Digests, killed: Digests) -> Difference | None:
    """Return the first difference of a run with a kill from the first run.

    When a rank dies, other ranks may not have logged the iteration that the checkpoint
    already has.
    """
    states = {
        (iteration, rank): digests
        for (iteration, rank), digests in first.states.items()
        if (iteration, rank) in killed.states or iteration > killed.resumed_after
    }
    return first_difference(replace(first, states=states), killed)


def _as_loaded(first: Digests, killed: Digests) -> list[str]:
    """Return a line about tensors that differ as soon as a checkpoint is loaded."""
    ranks: dict[str, int] = {}
    found = loaded_otherwise(first, killed)
    for each in found:
        ranks.setdefault(each.tensor, each.rank)
    names = [f"{name} (from rank {rank})" for name, rank in ranks.items()]
    return (
        [f"as loaded, after iteration {found[0].iteration}: {_shown(names)}"]
        if found
        else []
    )


def _in_all(first: Digests, killed: Digests) -> str:
    """Return a line about all tensors that differ after any iteration."""
    names = sorted(names_that_differ(first, killed))
    return f"tensors that differ after any iteration, on any rank: {_shown(names)}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
