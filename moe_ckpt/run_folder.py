"""The folder of a run: one for all ranks and all restarts of a job.

run.json            identity of the run, clock origin, command line, versions
config.yaml         the configuration as composed
events/rankNNNN.jsonl   what happened, per rank, over all restarts
checkpoints/        what `ckpt` saves
tensorboard/        scalars
result.json         at the end: losses, wall time, digest
lock                the job that uses the folder: `run_lock`
secret              what its processes know and no stranger: `run_secret`
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
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
from moe_ckpt.elastic.torchrun import Launch, has_agent_store
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import EventLog
from moe_ckpt.private_files import make_private, user_in, write_private
from moe_ckpt.run_lock import release_lock, take_lock
from moe_ckpt.run_secret import make_secret

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "hydra-core", "omegaconf", "numpy", "moe-ckpt")
JOB = "job"
"""The part of the job's store that outlives its restarts."""

JOB_ID = "id"
"""The key of the job's number in that part."""

_ROOT = 0  # a user


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The paths of this run's files, and its identity."""

    path: Path
    run_id: str
    clock_origin_unix_s: float

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def events(self, global_rank: int) -> Path:
        return self.path / "events" / f"rank{global_rank:04d}.jsonl"

    def open_events(self, global_rank: int) -> EventLog:
        """Open a rank's event file, to append to it.

        Raises:
            OSError: The file cannot be opened.
        """
        return EventLog(self.events(global_rank), global_rank=global_rank, clock_origin_unix_s=self.clock_origin_unix_s)

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json; after that, other jobs may use the folder.

        Raises ConfigError, naming run.dir, if it cannot be written.
        """
        try:
            _write_whole(self.path / "result.json", json.dumps(result, indent=1) + "\n")
            release_lock(self.path)
        except OSError as error:
            raise ConfigError(f"run.dir: result.json could not be written to {str(self.path)!r} ({error})") from error


def require_lasting(run: RunFolderConfig) -> None:
    """Raise ConfigError if a restart by torchrun could not find the folder: a new name is stored nowhere.

    A store that the job hosts itself ends with the supervisor of global rank 0.
    """
    if run.dir is None and not has_agent_store():
        wanted = "a folder that all nodes see, where the job hosts its own store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
        raise ConfigError(f"run.dir: got null, wanted {wanted}")


def open_run_folder(run: RunFolderConfig, launch: Launch) -> RunFolder:
    """Create the run folder, or find that of an earlier attempt of this job; the same on all ranks. Collective.

    Raises ConfigError, naming run.dir, if it cannot be written, or belongs to another running job.
    """
    return broadcast_result(TorchRanks(), lambda: _create_or_find(run, launch), ConfigError)


def find_run_folder(run: RunFolderConfig, launch: Launch, timeout_s: float) -> RunFolder:
    """Return the run folder without a collective: global rank 0 makes it, others wait for it.

    Args:
        run: The settings of the folder.
        launch: This rank's place in the job.
        timeout_s: The time to wait.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder cannot be written, belongs to another running job or to another user, or was not
            made in time; the message names run.dir.
    """
    if launch.global_rank == 0:
        return _create_or_find(run, launch)
    store = agent_store(JOB)
    assert store is not None
    try:
        store.wait(["run_folder"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise ConfigError(f"run.dir: got no folder from rank 0 in {timeout_s:g} s") from error
    # not that in the store, which has no authentication, where a setting names the folder
    folder = read_run_folder(Path(run.dir).resolve() if run.dir else Path(store.get("run_folder").decode()))
    _require_own(folder.path)
    return folder


def job_id() -> str:
    """Return the number of this start of the job, the same for all its processes; empty where it has no store."""
    store = agent_store(JOB)
    return "" if store is None else store.compare_set(JOB_ID, "", uuid.uuid4().hex).decode()


def _create_or_find(run: RunFolderConfig, launch: Launch) -> RunFolder:
    store = agent_store(JOB)
    path = _remembered_folder(store, run) or _choose_path(run)
    try:
        make_private(path)
        _require_own(path)
        take_lock(path, job_id())
        make_secret(path)
        if not (path / "run.json").exists():
            _write_whole(path / "config.yaml", run.configuration)
            # last: an attempt that dies before it leaves no run, and the next one writes both files
            _write_whole(path / "run.json", json.dumps(_describe_run(launch), indent=1) + "\n")
        _point_latest(path)
    except OSError as error:
        raise ConfigError(f"run.dir: got {str(path)!r}, wanted a folder that can be written ({error})") from error
    if store is not None:
        store.set("run_folder", str(path))
    return read_run_folder(path)


def _require_own(path: Path) -> None:
    """Raise ConfigError for a folder of another user, who reads and changes all in it; OSError if it is read only."""
    owner = path.stat().st_uid
    if owner not in (user_in(path), _ROOT):
        raise ConfigError(f"run.dir: got {str(path)!r} of user {owner}, wanted a folder of this user's")


def read_run_folder(path: Path) -> RunFolder:
    """Return an existing run folder; raises ConfigError if run.json is missing or damaged."""
    try:
        described = json.loads((path / "run.json").read_text())
        return RunFolder(
            path=path, run_id=described["run_id"], clock_origin_unix_s=float(described["clock_origin_unix_s"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"run.dir: {str(path)!r} is not the folder of a run ({error!r})") from error


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
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _point_latest(path: Path) -> None:
    """Let outputs/latest name this run; also for a run elsewhere, if there is an outputs folder."""
    outputs = Path("outputs")
    if not outputs.is_dir():
        return
    temporary = outputs / f".latest-{os.getpid()}"
    # a new link that takes the old one's place: at every moment `latest` names a whole run
    temporary.symlink_to(os.path.relpath(path, outputs.resolve()))
    temporary.replace(outputs / "latest")


def _write_whole(path: Path, content: str) -> None:
    # other ranks, and tools beside the job, read these files as soon as they are there
    temporary = path.with_name(path.name + ".tmp")
    write_private(temporary, content)
    temporary.replace(path)


def _remembered_folder(store: dist.Store | None, run: RunFolderConfig) -> Path | None:
    """Return the folder that an earlier attempt of this job has chosen, where no setting names it."""
    if run.dir is not None or store is None or not store.check(["run_folder"]):
        return None
    return Path(store.get("run_folder").decode())
