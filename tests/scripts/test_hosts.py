"""Hosts on one machine: plans of commands, and frames that reach the mirror.

Frames are tested only where namespaces can be made.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ckpt.flowcheck.mirror.frames import segment_of
from scripts import hosts, run_on_hosts
from tests.harness.jobs.hosts_job import hosts_of_one_test

_LISTEN = (
    "import socket, sys; s = socket.create_server(('', 5000)); print('ready',"
    " flush=True); s.accept()[0].recv(99)"
)
_CALL = (
    f"import socket; socket.create_connection(('{hosts.address_of(0)}',"
    " 5000)).sendall(b'across the bridge')"
)
_JOB = """
import os, socket, sys, threading
if len(sys.argv) > 2:
    sys.exit(3) if os.environ["RANK"] == "1" else threading.Event().wait()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((os.environ["MASTER_ADDR"], 1))
    open(os.path.join(sys.argv[1], probe.getsockname()[0]), "w").close()
"""
_HEAR = """
import socket, sys
port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
port.bind(('e0', 0)); print('ready', flush=True); sys.stdin.readline(); port.setblocking(False)
try:
    while True: print(port.recv(1 << 17).hex())
except BlockingIOError: pass
"""


def test_each_host_has_an_address_and_a_limited_link_in_both_directions() -> None:
    plan = [" ".join(command) for command in hosts.plan_up(2, "1gbit")]
    for host in range(2):
        assert f"ip -n moe{host} addr add 10.77.0.{host + 1}/24 dev e0" in plan
        assert sum(f"moe-v{host} root tbf rate 1gbit" in line for line in plan) == 1
        assert (
            f"tc -n moe{host} qdisc replace dev e0 root tbf rate 1gbit burst 128kbit"
            " latency 50ms" in plan
        )
    assert "ip link add moe-br type bridge ageing_time 0" in plan, "a hub"
    assert not any("tbf" in " ".join(command) for command in hosts.plan_up(2))


@pytest.mark.parametrize(
    ("link", "plan"),
    [
        ("cut", ["ip link set moe-v2 down"]),
        ("deaf", ["tc qdisc replace dev moe-v2 root pfifo limit 0"]),
        (
            "up",
            [
                "tc qdisc replace dev moe-v2 root pfifo limit 1000",
                "tc -n moe2 qdisc replace dev e0 root pfifo limit 1000",
                "ip link set moe-v2 up",
            ],
        ),
        (
            "10mbit",
            [
                (
                    "tc qdisc replace dev moe-v2 root tbf rate 10mbit burst 128kbit"
                    " latency 50ms"
                ),
                (
                    "tc -n moe2 qdisc replace dev e0 root tbf rate 10mbit burst 128kbit"
                    " latency 50ms"
                ),
            ],
        ),
    ],
)
def test_a_link_can_be_cut_in_one_direction_or_both_or_limited(
    link: str, plan: list[str]
) -> None:
    assert [" ".join(command) for command in hosts.plan_link(2, link)] == plan


def test_all_that_was_made_is_removed() -> None:
    made = [
        command[3]
        for command in hosts.plan_up(3)
        if command[1:3] in [("netns", "add"), ("link", "add")]
    ]
    namespaces = [
        name for name in made if name == hosts.mirror_namespace() or "-" not in name
    ]
    removed = [command[3] for command in hosts.plan_down(namespaces)]
    assert sorted(namespaces) == ["moe-mirror", "moe0", "moe1", "moe2"]
    assert sorted(made) == sorted(removed)


@pytest.mark.parametrize(
    ("number", "says"), [("0", "N: got 0"), ("999", "N: got 999"), ("x", "invalid int")]
)
def test_a_wrong_number_of_hosts_is_named(
    number: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        hosts.main(["up", number])
    assert says in capsys.readouterr().err


def test_each_host_runs_an_agent_of_the_same_job() -> None:
    commands = [
        " ".join(run_on_hosts.agent_command(host, 3, 2, ["train.py", "a=1"]))
        for host in range(3)
    ]
    for host, command in enumerate(commands):
        assert command.startswith(f"ip netns exec moe{host} env GLOO_SOCKET_IFNAME=e0 ")
        assert (
            f"--nnodes=3 --node-rank={host} --nproc-per-node=2 --master-addr=10.77.0.1"
            in command
        )
        assert command.endswith("train.py a=1")


def test_a_job_without_enough_hosts_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_on_hosts.main(["150", "train.py"]) == 1
    assert "wanted 150: scripts/hosts.py up" in capsys.readouterr().err


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Make two hosts for a test; skip the test where that is impossible."""
    with hosts_of_one_test():
        reason = hosts.why_impossible() or (
            "there are hosts already" if hosts.is_up() else None
        )
        if reason:
            pytest.skip(reason)
        assert hosts.main(["up", "2", "--rate", "1gbit"]) == 0
        yield
        assert hosts.main(["down"]) == 0
        assert not hosts.is_up()


def _inside(namespace: str, program: str) -> subprocess.Popen[str]:
    """Start a Python program in a network namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_the_mirror_port_sees_what_hosts_send_each_other(
    two_hosts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        _inside(hosts.mirror_namespace(), _HEAR) as mirror,
        _inside("moe0", _LISTEN) as listener,
    ):
        assert mirror.stdout
        assert listener.stdout
        assert (mirror.stdout.readline(), listener.stdout.readline()) == (
            "ready\n",
            "ready\n",
        )
        with _inside("moe1", _CALL) as caller:
            assert caller.wait(20) == 0
        assert listener.wait(20) == 0
        said, _ = mirror.communicate("now\n", timeout=20)
    segments = [segment_of(bytes.fromhex(line)) for line in said.split()]
    streams = {
        (segment.stream.source, segment.payload)
        for segment in segments
        if segment and segment.payload
    }
    assert streams == {(socket.inet_aton(hosts.address_of(1)), b"across the bridge")}
    assert hosts.main(["up", "1"]) == 1, "they are there already"
    assert "wanted none: hosts.py down" in capsys.readouterr().err


@pytest.mark.full
def test_a_job_on_hosts_ends_with_its_agents(two_hosts: None, tmp_path: Path) -> None:
    """Each rank writes the address from which the rank reaches the first host.

    A rank that fails ends the other ranks.
    """
    job = tmp_path / "job.py"
    job.write_text(_JOB)
    assert run_on_hosts.main(["2", str(job), str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("10.*")) == [
        hosts.address_of(0),
        hosts.address_of(1),
    ]
    assert run_on_hosts.main(["2", str(job), str(tmp_path), "fails"]) == 1
