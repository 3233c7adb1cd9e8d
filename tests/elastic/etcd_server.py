"""A real etcd of one member on this machine, for tests."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ports import held_port
from tests.waits import WAIT_S

_NO_ETCD = (
    "etcd: got none on this machine, wanted one (Debian: apt-get install etcd-server)"
)


class EtcdServer:
    """An etcd process, which starts at once and ends with `stack`.

    The process keeps its data and its log in `folder`. On a machine without etcd, the
    test is skipped.
    """

    def __init__(self, stack: ExitStack, folder: Path, *options: str) -> None:
        binary = shutil.which("etcd")
        if binary is None:
            pytest.skip(_NO_ETCD)
        self.port, peers = held_port(stack), held_port(stack)
        client_url, peer_url = (
            f"http://127.0.0.1:{self.port}",
            f"http://127.0.0.1:{peers}",
        )
        self._command = [
            *(binary, "--name=test", f"--data-dir={folder / 'data'}", *options),
            *(
                f"--listen-client-urls={client_url}",
                f"--advertise-client-urls={client_url}",
            ),
            *(
                f"--listen-peer-urls={peer_url}",
                f"--initial-advertise-peer-urls={peer_url}",
            ),
            *(
                f"--initial-cluster=test={peer_url}",
                "--heartbeat-interval=20",
                "--election-timeout=200",
            ),
        ]
        self._log = folder / "etcd.log"
        self._process = self._started()
        stack.callback(self.kill)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def start_again(self) -> None:
        """Start another process with the data of the killed process."""
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)
