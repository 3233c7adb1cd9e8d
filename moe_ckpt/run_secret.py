"""RUN/secret: a secret of the job's processes that no stranger has.

A stranger may read everything that crosses torchrun's store. Owns: the file, with mode
0600, and the ticket derived from the secret for one start of a job. Must not: send the
secret, or put the secret into a store.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from moe_ckpt.errors import ConfigError
from moe_ckpt.private_files import is_private, open_private, replace_private, user_in
from moe_ckpt.replication.messages import Ticket
from moe_ckpt.replication.tls import TlsEnds

SECRET_FILE = "secret"
_SECRET_BYTES = 32
_RUN_ID_CHARS = 8
# a user
_ROOT = 0


def make_secret(run: Path) -> None:
    """Create a run's secret unless there is one.

    For the process that has the run's folder.

    Raises:
        OSError: The folder cannot be written.
    """
    path = run / SECRET_FILE
    if not path.exists():
        replace_private(path, secrets.token_hex(_SECRET_BYTES))


def read_secret(path: Path, setting: str = "run.dir") -> str:
    """Return the secret in a file.

    Args:
        path: The file, in the run folder or a copy.
        setting: The setting that names the folder, or the copy, which may be a link to
            a file of root's.

    Returns:
        The secret.

    Raises:
        ConfigError: The file cannot be read, other users could read the file, or the
            file is empty.
    """
    is_copy = setting != "run.dir"
    try:
        owners = (os.geteuid(), _ROOT) if is_copy else (user_in(path.parent),)
        with open(path.resolve() if is_copy else path, opener=open_private) as file:
            is_safe = any(is_private(os.fstat(file.fileno()), user) for user in owners)
            secret = file.read()
    except OSError as error:
        raise ConfigError(
            f"{setting}: the run's secret {str(path)!r} cannot be read ({error})"
        ) from error
    wanted = "one of this user's that no other can read (mode 0600)"
    if not is_safe:
        raise ConfigError(
            f"{setting}: got the run's secret {str(path)!r} of another user or mode,"
            f" wanted {wanted}"
        )
    if not secret:
        raise ConfigError(
            f"{setting}: got the run's secret {str(path)!r}, which is empty, wanted"
            f" {wanted}: remove it"
        )
    return secret


def ticket_of(secret: str, job_id: str, tls: TlsEnds | None) -> Ticket:
    """Return the ticket of one start of a job.

    The ticket's token is the HMAC-SHA-256 of the job's number under the secret.

    Args:
        secret: The run's secret.
        job_id: The job's number in its store, which is not secret.
        tls: The ends of connections to other nodes, if these use TLS.

    Returns:
        The ticket.
    """
    token = hmac.new(secret.encode(), job_id.encode(), hashlib.sha256).hexdigest()
    return Ticket(run_id=job_id[:_RUN_ID_CHARS], token=token, tls=tls)
