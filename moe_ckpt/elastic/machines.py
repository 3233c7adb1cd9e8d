"""The machines of a job with spare nodes, and the nodes that they are.

A *machine* is an agent of torchrun with its processes. A *node* is a number, whose
ranks train. A job of N nodes and S spare nodes has N + S machines; machines that are no
node are spares. Once the machine of a node is lost, a spare becomes this node.

    holder/NODE      the name of the machine that is the node; only swapped
    machine/NAME     the address of a machine: `Machine`
    newest/NUMBER    the name of the newest machine that torchrun has given the number
    sign/NAME        the newest sign of life of a machine: a time by its own clock
    call/NAME        the newest call of a machine's supervisors: `Call`
    over             the exit status of a job that has ended; only swapped

Owns: these keys in the job's store, whose swaps decide which machine is a node. Must
not: find out which machines are lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch.distributed as dist

from moe_ckpt.elastic.machine_calls import Call

_FOR_EVER = timedelta(days=365)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine that may be a node."""

    name: str
    """Name that no other machine of the job has, and no later start of this one."""

    number: int
    """torchrun's number of the machine, from 0."""

    host: str
    """Address of the machine."""

    port: int
    """Port at which the machine listens as long as any of its processes lives."""


_MACHINES = msgspec.json.Decoder(Machine)
_CALLS = msgspec.json.Decoder(Call)


class MachineBoard:
    """The keys of the protocol in the store, for supervisors and watchers."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def register(self, machine: Machine) -> None:
        """Publish the address of a machine."""
        written = msgspec.json.encode(machine).decode()
        self._store.set(f"machine/{machine.name}", written)
        self._store.set(f"newest/{machine.number}", machine.name)

    def machine(self, name: str) -> Machine:
        """Return a machine that has registered."""
        return _MACHINES.decode(self._store.get(f"machine/{name}"))

    def newest(self, number: int) -> Machine | None:
        """Return the newest machine with a number of torchrun; None: none has come."""
        key = f"newest/{number}"
        if not self._store.check([key]):
            return None
        return self.machine(self._store.get(key).decode())

    def sign(self, name: str) -> None:
        """Write a sign of life of a machine."""
        self._store.set(f"sign/{name}", f"{time.time()}")

    def signs(self, names: Iterable[str]) -> dict[str, float]:
        """Return the newest signs of life: times by the clocks of the machines.

        Machines without a sign are left out.
        """
        keys = {name: f"sign/{name}" for name in names}
        return {
            name: float(self._store.get(key))
            for name, key in keys.items()
            if self._store.check([key])
        }

    def holder(self, node: int) -> str:
        """Return the name of the machine that is a node; empty if none has been."""
        key = f"holder/{node}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def become(self, node: int, name: str, *, after: str) -> bool:
        """Make a machine a node if the node's present machine is the expected one.

        Args:
            node: The node.
            name: The machine.
            after: The machine that is the node at present; empty: none has been.

        Returns:
            Whether the machine is the node now.
        """
        return self._store.compare_set(f"holder/{node}", after, name) == name.encode()

    def note_call(self, name: str, call: Call) -> None:
        """Record how a machine is to call its supervisors once it is a node.

        Call before `become`: the watcher of the machine may die right after.
        """
        self._store.set(f"call/{name}", msgspec.json.encode(call).decode())

    def noted_call(self, name: str) -> Call | None:
        """Return the newest recorded call of a machine; None: there is none.

        The machine is the node of the call only if the node's holder is the machine.
        """
        key = f"call/{name}"
        return _CALLS.decode(self._store.get(key)) if self._store.check([key]) else None

    def end(self, status: int) -> None:
        """Record that the job has ended, unless it is recorded.

        Args:
            status: The exit status of the job.
        """
        self._store.compare_set("over", "", str(status))

    def require_store(self) -> None:
        """Check that the store answers, which raises the store's error otherwise."""
        self._store.check(["over"])

    def wait_for_end(self) -> int:
        """Block until the job has ended, without limit, and return its exit status."""
        self._store.wait(["over"], _FOR_EVER)
        return int(self._store.get("over"))
