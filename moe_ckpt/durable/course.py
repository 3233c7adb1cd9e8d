"""The settings on which the states of a run depend: the run's course.

Owns: course.json (settings, and position in the data) in the run folder and in each
whole checkpoint, and the comparison with the settings of a later start. A window on a
local disk is replayed under the settings of the run that saved the window. So a run
keeps its course, and another course is another run, which may begin from a checkpoint
of the first run. Every method of `RunCourse` is collective, unless its docstring says
otherwise. Must not: know the meaning of a setting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from moe_ckpt.collectives import Ranks, broadcast_result
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.exact_json import ExactDecoder
from moe_ckpt.private_files import open_private

FILE = "course.json"

Setting = str | int | float | bool | None


class Change(NamedTuple):
    """A setting that differs between two courses."""

    name: str
    """Name of the setting."""

    first: str
    """Value in the earlier course, as text."""

    mine: str
    """Value in the later course, as text."""

    def as_error(self) -> str:
        """Return the text of the change for an error that forbids the change."""
        return f"{self.name}: got {self.mine}, wanted {self.first}"

    def __str__(self) -> str:
        return f"{self.name}: {self.first} becomes {self.mine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The settings that decide a run's states, and the run's position in its data."""

    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Values of settings, by name.

    The value of a setting `auto` is resolved. Content identities of inputs are
    settings, too.
    """

    settings_of_replays: Mapping[str, Setting] = field(default_factory=dict)
    """Values of settings that decide the states of replays only, by name.

    A run may continue from a whole checkpoint with other values.
    """

    samples_an_iteration: int = 0
    """Samples that an iteration consumes. 0: the loop finds its samples by itself."""

    began_after: int = 0
    """Iteration of the checkpoint from which this run began. 0: a new model.

    The checkpoint is another run's.
    """

    began_samples: int = 0
    """Samples that were consumed before this run began."""

    def consumed(self, done: int) -> int:
        """Return the samples that are consumed after `done` iterations."""
        return (
            self.began_samples + (done - self.began_after) * self.samples_an_iteration
        )

    def changes_since(self, first: Course) -> list[Change]:
        """Return the settings that differ from an earlier course.

        Settings of replays are left out.
        """
        return _changes(first.settings, self.settings)

    def changes_of_replays_since(self, first: Course) -> list[Change]:
        """Return the settings of replays that differ from an earlier course."""
        return _changes(first.settings_of_replays, self.settings_of_replays)


def _changes(first: Mapping[str, Setting], mine: Mapping[str, Setting]) -> list[Change]:
    names = dict.fromkeys([*first, *mine])
    # values, not texts: 1 and 1.0 are one learning rate
    differ = [name for name in names if _of(first, name) != _of(mine, name)]
    return [Change(name, _shown(first, name), _shown(mine, name)) for name in differ]


def _of(settings: Mapping[str, Setting], name: str) -> tuple[bool, Setting]:
    return name in settings, settings.get(name)


def _shown(settings: Mapping[str, Setting], name: str) -> str:
    return repr(settings[name]) if name in settings else "nothing"


_COURSES = ExactDecoder(Course)


def read_course(folder: Path) -> Course | None:
    """Return the course in a run folder or a checkpoint.

    Returns:
        The course. None if the folder has no course, as after a run of an older
        version.

    Raises:
        CheckpointLoadError: The file is damaged, or cannot be read.
    """
    path = folder / FILE
    try:
        return _COURSES.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        wanted = (
            "the settings with which the run began; without the file no setting is"
            " compared"
        )
        raise CheckpointLoadError(f"{path}: got {error}, wanted {wanted}") from error


def write_course(folder: Path, course: Course) -> None:
    """Write a whole course, in place of an earlier course.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = folder / f"{FILE}.tmp"
    with open(temporary, "wb", opener=open_private) as file:
        file.write(msgspec.json.format(msgspec.json.encode(course)))
        file.flush()
        # a machine that dies must not leave an empty file under the final name
        os.fsync(file.fileno())
    temporary.replace(folder / FILE)


class RunCourse:
    """The course of this run, compared with run folder and checkpoints.

    Attributes:
        course: The course in this process. Once training has begun, the course of the
            run folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        ranks: Ranks,
        *,
        settings_of_replays: Mapping[str, object] | None = None,
        samples_an_iteration: int = 0,
    ) -> None:
        """Begin with the position in the data that the run folder names.

        A replacement worker needs the position in the data. Not collective.

        Args:
            folder: The run folder.
            settings: The settings of this start. A value that JSON cannot hold counts
                as text.
            ranks: All ranks of the job.
            settings_of_replays: The settings of this start on which a whole checkpoint
                does not depend.
            samples_an_iteration: The samples that an iteration consumes.

        Raises:
            CheckpointLoadError: The run folder's course is damaged.
        """
        self._folder = folder
        self._ranks = ranks
        mine = Course(
            settings=_plain(settings),
            settings_of_replays=_plain(settings_of_replays or {}),
            samples_an_iteration=samples_an_iteration,
        )
        first = read_course(folder)
        self.course = _continued(mine, first) if first else mine

    def begin_anew(self) -> None:
        """Reset the position in the data at a start that has loaded no state yet.

        Not collective.
        """
        self.course = replace(self.course, began_after=0, began_samples=0)

    def require_kept(self, *, for_replays: bool) -> Sequence[str]:
        """Require the course with which this run has saved its states.

        Args:
            for_replays: Whether iterations will be replayed. If not, only a whole state
                is loaded.

        Returns:
            The settings of replays that have changed since, each as a text.

        Raises:
            ConfigError: Settings have changed since; on all ranks.
        """
        # rank 0's settings, as in the file: optimizers of other stages may have other
        # settings
        kept = broadcast_result(
            self._ranks, lambda: self._compare(for_replays=for_replays), ConfigError
        )
        if kept is None:
            return ()
        first, changed = kept
        self.course = _continued(self.course, first)
        return changed

    def changes_since(self, checkpoint: Path) -> Sequence[Change]:
        """Return the settings that differ from the settings of a checkpoint.

        Settings of replays are included.

        Raises:
            CheckpointLoadError: The checkpoint's course is damaged; on all ranks.
        """

        def compare() -> Sequence[Change]:
            first = read_course(checkpoint)
            return (
                [
                    *self.course.changes_since(first),
                    *self.course.changes_of_replays_since(first),
                ]
                if first
                else []
            )

        return broadcast_result(self._ranks, compare, CheckpointLoadError)

    def _compare(self, *, for_replays: bool) -> tuple[Course, Sequence[str]] | None:
        first = read_course(self._folder)
        if first is None:
            return None
        of_replays = self.course.changes_of_replays_since(first)
        if changes := [
            *self.course.changes_since(first),
            *(of_replays if for_replays else ()),
        ]:
            way_out = (
                "to go on with another setting, begin another run from a checkpoint of"
                " this one: another run.dir, and train.resume=CHECKPOINT or the loop's"
                " own option"
            )
            lines = [
                "settings differ from those with which this run has saved its states:"
            ]
            raise ConfigError(
                "\n  ".join(
                    [*lines, *(change.as_error() for change in changes), way_out]
                )
            )
        return first, [str(change) for change in of_replays]

    def begin_from(self, checkpoint: Path, iteration: int) -> None:
        """Begin this run from a checkpoint of another run.

        Args:
            checkpoint: Directory of the checkpoint.
            iteration: Iteration of the checkpoint.

        Raises:
            CheckpointLoadError: The checkpoint's course is damaged; on all ranks.
        """
        first = (
            broadcast_result(
                self._ranks, lambda: read_course(checkpoint), CheckpointLoadError
            )
            or self.course
        )
        self.course = replace(
            self.course, began_after=iteration, began_samples=first.consumed(iteration)
        )

    def write(self) -> None:
        """Write the course into the run folder as training begins.

        Raises:
            ConfigError: The file cannot be written; on all ranks.
        """
        broadcast_result(self._ranks, self._write, ConfigError)

    def _write(self) -> None:
        try:
            write_course(self._folder, self.course)
        except OSError as error:
            raise ConfigError(
                f"run.dir: {FILE} could not be written to {str(self._folder)!r}"
                f" ({error})"
            ) from error


def _plain(settings: Mapping[str, object]) -> dict[str, Setting]:
    """Return settings as JSON holds them.

    NumPy's numbers become Python's numbers; any other value becomes text.
    """
    return {name: _plain_value(value) for name, value in settings.items()}


def _plain_value(value: object) -> Setting:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    # JSON has neither infinity nor NaN
    return (
        float(value)
        if isinstance(value, float) and math.isfinite(value)
        else str(value)
    )


def _continued(mine: Course, first: Course) -> Course:
    return replace(
        mine, began_after=first.began_after, began_samples=first.began_samples
    )
