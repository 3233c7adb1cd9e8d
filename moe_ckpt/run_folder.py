"""The folder of a run: one for all ranks and all restarts of a job.

run.json                identity of the run, clock origin, command line, versions
config.yaml             the configuration as composed
events/rankNNNN.jsonl   events of each rank, over all restarts
checkpoints/            whole checkpoints
snapshots/rankNNNN/     snapshots on disk, unless `ckpt.disk_path` names another folder
course.json             settings that decide the states of the run
tensorboard/            scalars
result.json             at the end: losses, wall time, digest
lock                    the job that uses the folder: `run_lock`
secret                  a secret of the run's processes: `run_secret`
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import stat
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks, broadcast_result
from moe_ckpt.config import RunFolderConfig
from moe_ckpt.elastic.job_store import agent_store
from moe_ckpt.elastic.torchrun_variables import Launch, has_agent_store
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import EventLog
from moe_ckpt.private_files import make_private, replace_private, user_in
from moe_ckpt.run_lock import release_lock, take_lock
from moe_ckpt.run_secret import make_secret

_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "hydra-core",
    "omegaconf",
    "numpy",
    "moe-ckpt",
)
_log = logging.getLogger(__name__)

JOB = "job"
"""The part of the job's store that survives restarts of the job."""

JOB_ID = "id"
"""The key of the job's number in that part."""

_FOLDER = "run_folder"
"""The key of the run folder's path in that part."""

_ROOT = 0
"""The user id of root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The paths of this run's files, and its identity."""

    path: Path
    """The run folder."""

    run_id: str
    """Id that distinguishes runs."""

    clock_origin_unix_s: float
    """Clock origin of the run, in seconds since the epoch."""

    @property
    def checkpoints(self) -> Path:
        """The folder of whole checkpoints."""
        return self.path / "checkpoints"

    def events(self, global_rank: int) -> Path:
        """Return the path of a rank's event file."""
        return self.path / "events" / f"rank{global_rank:04d}.jsonl"

    def open_events(self, global_rank: int) -> EventLog:
        """Open a rank's event file, to append events.

        Raises:
            OSError: The file cannot be opened.
        """
        return EventLog(
            self.events(global_rank),
            global_rank=global_rank,
            clock_origin_unix_s=self.clock_origin_unix_s,
        )

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json; after that, other jobs may use the folder.

        Raises:
            ConfigError: The file cannot be written; the message names run.dir.
        """
        try:
            replace_private(
                self.path / "result.json", json.dumps(result, indent=1) + "\n"
            )
            release_lock(self.path)
        except OSError as error:
            raise ConfigError(
                f"run.dir: result.json could not be written to {str(self.path)!r}"
                f" ({error})"
            ) from error


def require_lasting(run: RunFolderConfig) -> None:
    """Raise ConfigError if a restart by torchrun could not find the folder.

    A new name is stored nowhere: a store that the job hosts itself ends with the
    supervisor of global rank 0.

    Raises:
        ConfigError: The folder has no fixed name, and the job hosts its own store.
    """
    if run.dir is None and not has_agent_store():
        wanted = (
            "a folder that all nodes see, where the job hosts its own store"
            " (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
        )
        raise ConfigError(f"run.dir: got null, wanted {wanted}")


def open_run_folder(run: RunFolderConfig, launch: Launch) -> RunFolder:
    """Create the run folder, or find that of an earlier attempt. Collective.

    All ranks get the same folder.

    Raises:
        ConfigError: The folder cannot be written, or belongs to another running job;
            the message names run.dir.
    """
    return broadcast_result(
        TorchRanks(), lambda: _create_or_find(run, launch), ConfigError
    )


def find_run_folder(
    run: RunFolderConfig, launch: Launch, timeout_s: float
) -> RunFolder:
    """Return the run folder without a collective.

    Global rank 0 creates the folder, and the other ranks wait for that.

    Args:
        run: The settings of the folder.
        launch: This rank's position in the job.
        timeout_s: Longest wait, in seconds.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder cannot be written, belongs to another running job or
            another user, or was not created in time; the message names run.dir.
    """
    if launch.global_rank == 0:
        return _create_or_find(run, launch)
    store = agent_store(JOB)
    assert store is not None
    try:
        store.wait([_FOLDER], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise ConfigError(
            f"run.dir: got no folder from rank 0 in {timeout_s:g} s"
        ) from error
    # a path in the settings takes precedence over the one in the store, which has no
    # authentication
    path = Path(run.dir).resolve() if run.dir else Path(store.get(_FOLDER).decode())
    try:
        _require_own(path, is_of_settings=run.dir is not None)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {str(path)!r} is not the folder of a run ({error!r})"
        ) from error
    return read_run_folder(path)


def job_id() -> str:
    """Return the number of this start of the job, the same for all its processes.

    Empty if the job has no store.
    """
    store = agent_store(JOB)
    return (
        ""
        if store is None
        else store.compare_set(JOB_ID, "", uuid.uuid4().hex).decode()
    )


def _create_or_find(run: RunFolderConfig, launch: Launch) -> RunFolder:
    store = agent_store(JOB)
    path = _remembered_folder(store, run) or _choose_path(run)
    try:
        make_private(path)
        _require_own(path, is_of_settings=run.dir is not None)
        take_lock(path, job_id())
        make_secret(path)
        if not (path / "run.json").exists():
            replace_private(path / "config.yaml", run.configuration)
            # last: an attempt that dies earlier leaves no run, and the next attempt
            # writes both files
            replace_private(
                path / "run.json", json.dumps(_describe_run(launch), indent=1) + "\n"
            )
    except OSError as error:
        raise ConfigError(
            f"run.dir: got {str(path)!r}, wanted a folder that can be written ({error})"
        ) from error
    _point_latest(path)
    if store is not None:
        store.set(_FOLDER, str(path))
    return read_run_folder(path)


def _require_own(path: Path, *, is_of_settings: bool) -> None:
    """Check that no other user has created a folder.

    Another user could read and change all files there.

    Args:
        path: The folder.
        is_of_settings: Whether a setting names the folder, which root may have created.
            Otherwise this job created the folder, or a stranger named it in the job's
            store.

    Raises:
        ConfigError: The folder is another user's.
        OSError: The folder is missing, or cannot be written.
    """
    about, user = path.stat(), user_in(path)
    is_own = about.st_uid == user and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_own and not (is_of_settings and about.st_uid in (user, _ROOT)):
        raise ConfigError(
            f"run.dir: got {str(path)!r} of user {about.st_uid}, wanted a folder of"
            " this user's"
        )


def read_run_folder(path: Path) -> RunFolder:
    """Return an existing run folder.

    Raises:
        ConfigError: run.json is missing or damaged.
    """
    try:
        described = json.loads((path / "run.json").read_text())
        return RunFolder(
            path=path,
            run_id=described["run_id"],
            clock_origin_unix_s=float(described["clock_origin_unix_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run.dir: {str(path)!r} is not the folder of a run ({error!r})"
        ) from error


def _choose_path(run: RunFolderConfig) -> Path:
    if run.dir is not None:
        return Path(run.dir).resolve()
    now = datetime.now()
    base = Path("outputs").resolve() / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{run.name}"
    others = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], others) if not path.exists())


def _describe_run(launch: Launch) -> dict[str, Any]:
    return {
        "run_id": uuid.uuid4().hex,
        "clock_origin_unix_s": time.time(),
        "command": sys.argv,
        "world_size": launch.world_size,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {
            name: version for name in _PACKAGES if (version := _version(name))
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _point_latest(path: Path) -> None:
    """Make outputs/latest a link to this run.

    The link is made even for a run elsewhere, if there is an outputs folder.
    """
    outputs = Path("outputs")
    if not outputs.is_dir():
        return
    temporary = outputs / f".latest-{uuid.uuid4().hex}"
    try:
        # the new link replaces the old one atomically, so that `latest` always names a
        # whole run
        temporary.symlink_to(os.path.relpath(path, outputs.resolve()))
        temporary.replace(outputs / "latest")
    # a convenience, in a folder that may be another user's
    except OSError as error:
        _log.warning("outputs/latest does not name this run: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _remembered_folder(store: dist.Store | None, run: RunFolderConfig) -> Path | None:
    """Return the folder that an earlier attempt chose, if no setting names one."""
    if run.dir is not None or store is None or not store.check([_FOLDER]):
        return None
    return Path(store.get(_FOLDER).decode())
