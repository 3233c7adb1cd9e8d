"""Several hosts on one machine: network namespaces on one bridge, with a mirror port.

    python scripts/hosts.py up 4 [--rate 1gbit]      namespaces moe0 to moe3 with
                                                     10.77.0.1 to .4, and moe-mirror
    python scripts/hosts.py down                     remove them, and end the processes
                                                     in them
    python scripts/hosts.py link 2 LINK              LINK of the third host: up, cut,
                                                     deaf, or a rate such as 10mbit
    ip netns exec moe2 COMMAND                       COMMAND on the third host

Needs root and iproute2. The bridge forgets every address at once, so each frame goes to
every port, as to the mirror port of a switch. The interface e0 of moe-mirror has no
address and only listens. `--rate` limits each host's link in both directions. A cut
link carries no frame, like a link with the cable out. A deaf host sends frames and
receives none. Frames never leave the machine, because the bridge has no other port.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "moe"
INTERFACE = "e0"
MOST_HOSTS = 200
UP, CUT, DEAF = "up", "cut", "deaf"
_BRIDGE, _MIRROR, _MIRROR_END = f"{PREFIX}-br", f"{PREFIX}-mirror", f"{PREFIX}-vm"
_NAMESPACES = Path("/run/netns")
_MEMORY = Path("/dev/shm")

Command = tuple[str, ...]


def name_of(host: int) -> str:
    """Return the network namespace of a host."""
    return f"{PREFIX}{host}"


def address_of(host: int) -> str:
    """Return the IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def mirror_namespace() -> str:
    """Return the network namespace whose interface sees all frames."""
    return _MIRROR


def plan_up(num_hosts: int, rate: str | None = None) -> list[Command]:
    """Return the commands that make hosts, in order.

    Args:
        num_hosts: The number of hosts.
        rate: The rate of each host's link, as tc writes rates; None: unlimited.
    """
    commands: list[Command] = [
        ("ip", "link", "add", _BRIDGE, "type", "bridge", "ageing_time", "0"),
        ("ip", "link", "set", _BRIDGE, "up"),
    ]
    for host in range(num_hosts):
        end, inside = _end_of(host), ("ip", "-n", name_of(host))
        commands += _plan_port(name_of(host), end)
        commands += [
            (*inside, "addr", "add", f"{address_of(host)}/24", "dev", INTERFACE),
            (*inside, "link", "set", INTERFACE, "up"),
            (*inside, "link", "set", "lo", "up"),
        ]
        if rate:
            commands += plan_link(host, rate)
    commands += _plan_port(_MIRROR, _MIRROR_END)
    commands.append(
        ("ip", "-n", _MIRROR, "link", "set", INTERFACE, "up", "promisc", "on")
    )
    return commands


def _plan_port(namespace: str, end: str) -> list[Command]:
    """Return the commands that make a namespace and connect it to the bridge."""
    return [
        ("ip", "netns", "add", namespace),
        (
            "ip",
            "link",
            "add",
            end,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            namespace,
        ),
        ("ip", "link", "set", end, "master", _BRIDGE, "up"),
    ]


def plan_down(namespaces: Sequence[str]) -> list[Command]:
    """Return the commands that remove namespaces, with their links, and the bridge."""
    ends = [
        _MIRROR_END if name == _MIRROR else f"{PREFIX}-v{name.removeprefix(PREFIX)}"
        for name in namespaces
    ]
    return [
        # links first: a namespace exists until its processes have ended
        *(("ip", "link", "del", end) for end in ends),
        *(("ip", "netns", "del", name) for name in namespaces),
        ("ip", "link", "del", _BRIDGE),
    ]


def plan_link(host: int, link: str) -> list[Command]:
    """Return the commands that set the state of a host's link.

    Args:
        host: The number of the host, from 0.
        link: `up`, `cut`, `deaf`, or a rate for both directions.
    """
    end = _end_of(host)
    # with an explicit limit, because tc leaves a queue of the same kind unchanged if no
    # option is given
    whole = ("root", "pfifo", "limit", "1000")
    unlimited = [
        (*tc, "qdisc", "replace", "dev", device, *whole) for tc, device in _ends(host)
    ]
    if link == UP:
        return [*unlimited, ("ip", "link", "set", end, "up")]
    if link == CUT:
        return [("ip", "link", "set", end, "down")]
    # frames are dropped on the bridge: TCP takes a drop on its own host for congestion,
    # and gives up within 20 s
    if link == DEAF:
        return [("tc", "qdisc", "replace", "dev", end, "root", "pfifo", "limit", "0")]
    return [
        (*tc, "qdisc", "replace", "dev", device, "root", *_limit(link))
        for tc, device in _ends(host)
    ]


def _ends(host: int) -> list[tuple[Command, str]]:
    """Return both ends of a host's link, each after the beginning of tc's command."""
    return [(("tc",), _end_of(host)), (("tc", "-n", name_of(host)), INTERFACE)]


def _limit(rate: str) -> Command:
    return ("tbf", "rate", rate, "burst", "128kbit", "latency", "50ms")


def set_link(host: int, link: str) -> None:
    """Set the state of a host's link; see `plan_link`.

    Raises:
        subprocess.CalledProcessError: A command failed.
    """
    _run_all(plan_link(host, link))


def processes_of(host: int) -> list[int]:
    """Return the pids of the processes on a host."""
    return _processes_in(name_of(host))


def _processes_in(namespace: str) -> list[int]:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in found.stdout.split()]


def host_of(pid: int) -> int:
    """Return the number of the host on which a process runs.

    Raises:
        ValueError: The process runs on no host, or has ended.
    """
    found = subprocess.run(
        ["ip", "netns", "identify", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return int(found.stdout.strip().removeprefix(PREFIX))


def signal_all(host: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a host."""
    _signal_each(processes_of(host), number)


def lose(*lost: int) -> None:
    """Kill all processes of hosts at once, and delete the hosts' memory.

    Args:
        lost: The numbers of the hosts.
    """
    pids = [pid for host in lost for pid in processes_of(host)]
    memory = [path for pid in pids for path in _MEMORY.glob(f"moe_ckpt-{pid}-*")]
    # all are stopped first, so that no process acts on the death of another. The
    # youngest die first: the kernel lets a stopped group go on once its oldest has died
    _signal_each(pids, signal.SIGSTOP)
    _signal_each(pids[::-1], signal.SIGKILL)
    for path in memory:
        shutil.rmtree(path, ignore_errors=True)


def _signal_each(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.kill(pid, number)


def our_namespaces() -> list[str]:
    """Return the existing namespaces of hosts and of the mirror port."""
    there = (
        sorted(path.name for path in _NAMESPACES.iterdir())
        if _NAMESPACES.is_dir()
        else []
    )
    return [
        name
        for name in there
        if name == _MIRROR
        or (name.startswith(PREFIX) and name[len(PREFIX) :].isdigit())
    ]


def is_up() -> bool:
    """Return whether there are hosts, or remains of a failed `up`."""
    return bool(our_namespaces()) or Path("/sys/class/net", _BRIDGE).exists()


def why_impossible() -> str | None:
    """Return the reason why this process cannot make hosts; None if there is none."""
    if os.geteuid() != 0:
        return (
            "network namespaces: got a process without root's privileges, wanted root"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces: got no {' and no '.join(missing)}, wanted iproute2"
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    return (
        None if tried.returncode == 0 else f"network namespaces: {tried.stderr.strip()}"
    )


def up(num_hosts: int, rate: str | None = None) -> None:
    """Make the hosts.

    Args:
        num_hosts: The number of hosts.
        rate: The rate of each host's link, as tc writes rates; None: unlimited.

    Raises:
        subprocess.CalledProcessError: A command failed. Nothing of the hosts is left.
    """
    try:
        _run_all(plan_up(num_hosts, rate))
    except subprocess.CalledProcessError:
        down()
        raise


def down() -> None:
    """Remove the hosts, and end the processes in them."""
    namespaces = our_namespaces()
    for name in namespaces:
        _signal_each(_processes_in(name), signal.SIGKILL)
    for command in plan_down(namespaces):
        # a failed `up` may have made no bridge
        subprocess.run(command, capture_output=True, check=False)


def _run_all(commands: Sequence[Command]) -> None:
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, text=True)


def _end_of(host: int) -> str:
    return f"{PREFIX}-v{host}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    upwards = actions.add_parser("up", help="make hosts")
    upwards.add_argument("num_hosts", type=int, metavar="N")
    upwards.add_argument(
        "--rate", help="of each host's link, as tc writes it: 1gbit, 200mbit"
    )
    upwards.add_argument("--dry-run", action="store_true", help="print the commands")
    actions.add_parser("down", help="remove them")
    linking = actions.add_parser("link", help="change the link of a host")
    linking.add_argument("host", type=int, metavar="N")
    linking.add_argument(
        "link", metavar="LINK", help=f"{UP}, {CUT}, {DEAF}, or a rate as tc writes it"
    )
    options = parser.parse_args(arguments)
    if options.action == "up" and not 1 <= options.num_hosts <= MOST_HOSTS:
        parser.error(f"N: got {options.num_hosts}, wanted 1 to {MOST_HOSTS}")
    if options.action == "up" and options.dry_run:
        print(
            "\n".join(
                " ".join(command)
                for command in plan_up(options.num_hosts, options.rate)
            )
        )
        return 0
    return _act(options)


def _act(options: argparse.Namespace) -> int:
    reason = why_impossible()
    if reason is None and options.action == "up" and is_up():
        reason = (
            f"hosts: got {', '.join(our_namespaces()) or _BRIDGE} there already, wanted"
            " none: hosts.py down"
        )
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        match options.action:
            case "up":
                up(options.num_hosts, options.rate)
            case "down":
                down()
            case _:
                set_link(options.host, options.link)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
