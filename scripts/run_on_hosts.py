"""Run a job on the hosts of scripts/hosts.py, one torchrun agent on each.

    python scripts/hosts.py up 4
    python scripts/run_on_hosts.py 4 launcher/train.py +ckpt=flowcheck run.dir=RUN
    python scripts/run_on_hosts.py --servers 2 2 launcher/train.py \\
        +ckpt=flowcheck ckpt.servers=hosts run.dir=RUN

With --servers, further hosts train nothing and hold checkpoints (ckpt.servers=hosts).
Agents meet at the first host's address; gloo uses the hosts' own interfaces. All hosts
share the machine's files, including /dev/shm, where the ranks of each agent have a
separate folder. If an agent fails, the script ends the other agents. The exit status is
that of the first agent that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import hosts

PORT = 29500
_ROOT = Path(__file__).resolve().parents[1]
_LOOK_EVERY_S = 0.1
_ENDING_S = 20.0


def agent_command(
    host: int, num_hosts: int, per_host: int, arguments: Sequence[str]
) -> list[str]:
    """Return the command of the agent of a host.

    Args:
        host: The number of the host, from 0.
        num_hosts: The number of hosts with an agent.
        per_host: The number of ranks on each host.
        arguments: The script and its arguments.
    """
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    environment = (
        f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        # with more threads, ranks would add up in another order than the ranks of a
        # job on one host
        "OMP_NUM_THREADS=1",
    )
    where = (f"--master-addr={hosts.address_of(0)}", f"--master-port={PORT}")
    of_job = (
        f"--nnodes={num_hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={per_host}",
    )
    return [
        "ip",
        "netns",
        "exec",
        hosts.name_of(host),
        "env",
        *environment,
        torchrun,
        *of_job,
        *where,
        *arguments,
    ]


def server_command(host: int, run: str) -> list[str]:
    """Return the command of a checkpoint server on a host.

    Args:
        host: The number of the host, from 0.
        run: The run folder of the job.
    """
    server = (sys.executable, "-m", "moe_ckpt.cli", "server", run)
    return ["ip", "netns", "exec", hosts.name_of(host), *server]


def run(
    num_hosts: int, per_host: int, arguments: Sequence[str], num_servers: int = 0
) -> int:
    """Run a job to its end.

    Args:
        num_hosts: The number of hosts with an agent.
        per_host: The number of ranks on each host.
        arguments: The script and its arguments.
        num_servers: The number of further hosts, each with a checkpoint server.

    Returns:
        0, or the exit status of the first agent that failed.
    """
    agents = [
        subprocess.Popen(
            agent_command(host, num_hosts, per_host, arguments), start_new_session=True
        )
        for host in range(num_hosts)
    ]
    of_servers = range(num_hosts, num_hosts + num_servers)
    servers = [
        subprocess.Popen(
            server_command(host, run_folder(arguments)),
            start_new_session=True,
            cwd=_ROOT,
        )
        for host in of_servers
    ]
    try:
        return _wait(agents)
    finally:
        _end([*agents, *servers])


def run_folder(arguments: Sequence[str]) -> str:
    """Return the run folder in a job's overrides; empty if no override names one."""
    return next(
        (word.partition("=")[2] for word in arguments if word.startswith("run.dir=")),
        "",
    )


def _wait(agents: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the status of the first agent that fails, or 0 if all have ended well."""
    while True:
        statuses = [agent.poll() for agent in agents]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0]
        if all(status == 0 for status in statuses):
            return 0
        # with several processes there is nothing to block on
        time.sleep(_LOOK_EVERY_S)


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run, each with its process group."""
    running = [agent for agent in agents if agent.poll() is None]
    for agent in running:
        os.killpg(agent.pid, signal.SIGTERM)
    for agent in running:
        try:
            agent.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("num_hosts", type=int, metavar="N")
    parser.add_argument(
        "--per-host", type=int, default=1, metavar="RANKS", help="ranks on each host"
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="N",
        help="more hosts, with a `moe-ckpt server` each",
    )
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    options = parser.parse_args(arguments)
    there = [
        name for name in hosts.our_namespaces() if name != hosts.mirror_namespace()
    ]
    wanted = options.num_hosts + options.servers
    if len(there) < wanted:
        print(
            f"error: hosts: got {len(there)}, wanted {wanted}: scripts/hosts.py up",
            file=sys.stderr,
        )
        return 1
    if options.servers and not run_folder(options.job):
        print(
            "error: run.dir: got none, wanted a folder where servers find the job",
            file=sys.stderr,
        )
        return 1
    if not options.job:
        parser.error("SCRIPT: got nothing, wanted a script for torchrun")
    return run(options.num_hosts, options.per_host, options.job, options.servers)


if __name__ == "__main__":
    sys.exit(main())
