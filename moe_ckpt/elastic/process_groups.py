"""Process groups that outlive a fault: stable handles around replaceable inner groups.

Megatron keeps dozens of references to process groups. So Megatron gets handles, and
only the inner groups are replaced. Owns: the handles of this process, forming their
inner groups, and ending every operation when a generation ends. Must not: decide when a
generation ends (`elastic.generations` does).

    alone      while a process builds its model: every collective has only this rank's
               contribution
    formed     gloo or NCCL inside
    cut        operations raise PeersLostError, including those that wait, until
               groups are formed again
    kept       the inner gloo group was idle as its generation ended, and waits for a
               vote of its members (`elastic.idle_groups`): the group continues in
               the next generation, or another group is formed
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from moe_ckpt.elastic.backends import Backend, GlooBackend, die, register_groups
from moe_ckpt.elastic.batched_transfers import batch_transfers_of
from moe_ckpt.elastic.cancellable_wait import Helper, HostWaits, WaitResult
from moe_ckpt.elastic.device_waits import DeviceWaits
from moe_ckpt.elastic.idle_groups import agree_to_keep
from moe_ckpt.elastic.operations import (
    OPERATIONS,
    SURVIVE_TIMEOUTS,
    TRANSFERS,
    BackendAbilities,
)
from moe_ckpt.elastic.rendezvous_store import PollingStore
from moe_ckpt.elastic.solo_group import FinishedWork, SoloGroup
from moe_ckpt.elastic.staged_group import StagedWork
from moe_ckpt.errors import PeersLostError

ELASTIC, ELASTIC_CPU = "elastic", "elastic_cpu"
"""Names by which torch.distributed knows these groups.

The first are for tensors on the device of training, the second for tensors on the host.
"""

_FORMING_THREADS = 4
_LEAST_SUMMAND = 1 << 40
_NO_BACKWARD = -1  # autograd's number for a thread that computes no gradients
_BATCH = "batched transfers"
_FINISHED = FinishedWork()
_UNREPORTED = contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTimeouts:
    """Time limits of process groups."""

    form_s: float
    """Limit for forming all groups, in seconds."""

    operation_s: float
    """Limit for one operation, in seconds."""

    abort_s: float
    """Limit for a device to become quiet after its groups were aborted, in seconds."""


class Guards:
    """The summands with which the ranks of an inner group confirm earlier operations.

    A guard is a sum over all ranks. A rank adds its summand once the rank's device has
    finished the operations that the guard confirms. If an abort cuts the sum off, the
    sum completes with the contents of its buffers: nothing, some of the summands, or
    the sum of an earlier guard. So summands are positive, and each guard of each
    generation has a different summand.
    """

    def __init__(self, members: str, generation: int) -> None:
        """Begin the guards of a generation.

        Args:
            members: The name of the group's members, the same on all ranks.
            generation: The generation.
        """
        self._name = f"{generation}/{members}"
        self._num_begun = 0

    def next(self) -> int:
        """Return the summand of the next guard, which is the same on all ranks.

        Returns:
            An integer from 2^40 up to 2^41: sums over 2^22 ranks are below 2^63.
        """
        self._num_begun += 1
        guard = f"{self._name}/{self._num_begun}"
        return (
            _LEAST_SUMMAND + xxhash.xxh3_64_intdigest(guard.encode()) % _LEAST_SUMMAND
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Operations that an inner group collects, to begin them together."""

    inner: InnerGroup
    """The inner group."""

    device: torch.device
    """Device of the tensors."""

    arguments: list[tuple[Any, ...]]
    """Arguments of the operations, with their tensors."""

    held: contextlib.ExitStack
    """Keeps a cut from aborting the group until the operations have begun."""


@dataclass(kw_only=True, slots=True, eq=False)
class InnerGroup:
    """A group that a generation has formed, for all handles with the same members."""

    group: Any
    """The gloo or NCCL group."""

    launching: contextlib.AbstractContextManager[object]
    """Held while a thread begins an operation. Meanwhile no abort frees the group, and
    no thread takes the group for idle.
    """

    generation: int
    """The generation that has formed the group."""

    can_outlast: bool
    """Whether the group may outlive a generation, once the group is idle."""

    guards: Guards
    """Guards of the present generation."""

    num_begun: int = 0
    """Number of operations that this rank has begun, of all kinds."""

    num_transfers: int = 0
    """Number of transfers between two ranks among these operations."""

    unfinished: set[_Operation] = field(default_factory=set)
    """Operations that no thread has awaited to their end, with their tensors. After a
    cut an operation may still write to the memory of its tensors, so no other tensor
    may get that memory.
    """

    is_broken: bool = False
    """Whether the group was cut, or an operation of the group has failed as it began.
    """

    @property
    def is_idle(self) -> bool:
        """Whether no byte is under way in the group.

        The answer holds if all members have begun equally many operations. A transfer
        involves only two ranks, so equal numbers of transfers prove nothing.
        """
        return not (self.is_broken or self.num_transfers or self.unfinished)

    @property
    def position(self) -> str:
        """The value that all members must share to continue with the idle group."""
        return f"{self.generation}/{self.num_begun}"


class ElasticGroup(dist.ProcessGroup):
    """The handle of one process group.

    Handles with the same `members` share an inner group.
    """

    def __init__(
        self,
        members: str,
        own: int,
        size: int,
        backend: Backend,
        groups: ElasticGroups,
    ) -> None:
        """Make a handle, which is alone until its inner group is formed.

        Args:
            members: The name of the group's members, the same on all of them.
            own: This process's position in the group.
            size: The number of members.
            backend: The backend of the inner groups.
            groups: All handles of this process.
        """
        # torch's stubs describe another constructor
        super().__init__(own, size)  # pyright: ignore[reportCallIssue]
        self.members = members
        self.inner: InnerGroup | SoloGroup | None = SoloGroup(size)
        self.backend = backend
        self.batch: _Batch | None = None
        self._groups = groups

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.backend.device]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return ELASTIC

    @property
    def num_operations(self) -> int:
        """Number of collective operations that the inner group has begun.

        gloo numbers its messages by these operations.
        """
        inner = self.inner
        assert isinstance(inner, InnerGroup), "the group is not formed"
        return inner.group._get_sequence_number_for_group() - inner.num_transfers

    def confirm(self) -> bool:
        """Confirm results of earlier operations: see `ElasticGroups.confirm`."""
        return self._groups.confirm(self)

    # torch 2.14 batches transfers of any group; older releases only those of a group
    # whose type is exactly `ProcessGroup`: see `ElasticGroups.register`

    def _get_backend(self, device: torch.device) -> Any:
        inner = self.inner
        if not isinstance(inner, InnerGroup):
            return BackendAbilities(supports_coalescing=False)
        return BackendAbilities(
            supports_coalescing=inner.group._get_backend(device).supports_coalescing
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._groups.start_batch(self, device)

    # the batch has the device
    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        return self._groups.end_batch(self)

    def drop_batch(self) -> None:
        """End a batch that an error has left open, in the thread that began it."""
        self._groups.drop_batch(self)


def _method(name: str) -> Callable[..., dist.Work]:
    # a function: a `partialmethod` would make another object at each call
    def begin(self: ElasticGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self._groups.run(self, name, arguments, options)

    return begin


for _name in OPERATIONS:
    setattr(ElasticGroup, _name, _method(_name))


class ElasticGroups:
    """All handles of this process.

    One thread forms and leaves groups. Any thread may call `cut` and `abandon`.
    """

    def __init__(
        self,
        backend: Backend,
        timeouts: GroupTimeouts,
        on_wait: Callable[[bool], None],
        on_device_wait: Callable[[bool], None] | None = None,
        *,
        shares: bool = True,
    ) -> None:
        """Begin without handles.

        Args:
            backend: The backend for tensors on training's device.
            timeouts: The time limits.
            on_wait: Called with True when a wait for other ranks begins in the thread
                that forms groups, or in autograd's thread in the backward pass, and
                with False when the wait ends.
            on_device_wait: Called with True when the device begins to wait for other
                ranks, and with False when the device's wait ends.
            shares: Whether groups of the same ranks share an inner group.
        """
        self._backends = {ELASTIC: backend, ELASTIC_CPU: backend}
        if backend.device.type != "cpu":
            self._backends[ELASTIC_CPU] = GlooBackend()
        self._shares = shares
        self._timeouts = timeouts
        self._reported = _ReportedWait(on_wait)
        self._device_waits = DeviceWaits(
            on_device_wait or _nobody,
            lambda: self._backends[ELASTIC].failure(),
            limit_s=timeouts.operation_s,
        )
        self._handles: list[ElasticGroup] = []
        # idle groups of the last generation, by members
        self._kept: dict[str, InnerGroup] = {}
        self._waits = HostWaits()
        self._store_lock = threading.Lock()
        # one event per generation: a late thread must not see the event of the next
        # generation
        self._over = threading.Event()
        self._training_thread = 0
        self._generation = 0

    @property
    def inners(self) -> dict[str, InnerGroup]:
        """The inner groups of the handles, by members."""
        inners = ((handle.members, handle.inner) for handle in self._handles)
        return {
            members: inner for members, inner in inners if isinstance(inner, InnerGroup)
        }

    @property
    def insides(self) -> list[Any]:
        """The gloo or NCCL groups inside the handles, each once."""
        return [inner.group for inner in self.inners.values()]

    @property
    def num_formed(self) -> int:
        """Number of inner groups that this generation has formed."""
        return len(self.inners) - self.num_kept

    @property
    def num_kept(self) -> int:
        """Number of inner groups that this generation has kept from an earlier one."""
        return sum(
            inner.generation < self._generation for inner in self.inners.values()
        )

    def register(self) -> None:
        """Register `ELASTIC` and `ELASTIC_CPU` with `torch.distributed`."""
        for name, backend in self._backends.items():
            create = functools.partial(self._create, name, backend)
            register_groups(name, create, [backend.device.type])
        batch_transfers_of(ElasticGroup)

    def form(
        self,
        client: dist.Store,
        generation: int,
        on_failure: Callable[[str], object] | None = None,
    ) -> None:
        """Form the inner groups of all handles for a new generation.

        Inner groups that all members have kept continue instead. The ranks meet in the
        job's store, where gloo's threads read addresses for as long as the generation
        lasts.

        Args:
            client: The client of the job's store.
            generation: The new generation.
            on_failure: Receives, in another thread, the reason why the device will not
                complete an operation.

        Raises:
            PeersLostError: Forming takes too long, or is cut.
        """
        over = self._over = threading.Event()
        self._generation = generation
        self._device_waits.begin(on_failure or _ignore)
        self._training_thread = threading.get_ident()
        made: dict[str, InnerGroup] = {}
        # keys contain the generation: a late rank must not meet the other ranks through
        # addresses of the last generation
        store = PollingStore(
            client,
            self._store_lock,
            f"{generation}/groups/",
            over.is_set,
            self._timeouts.form_s,
            num_ranks=max((handle.size() for handle in self._handles), default=1),
        )
        # the host's backend first: sockets that NCCL opens later do not belong to the
        # host's groups
        for backend in reversed(self._distinct):
            self._form_all(backend, store, over, made)
        self._kept.clear()
        for handle in self._handles:
            if handle.members in made:
                # from here on other threads begin operations
                handle.inner = made[handle.members]
        # once more: a cut that came while groups were formed did not reach the inner
        # groups that handles have from here on
        if over.is_set():
            self.cut()
            raise PeersLostError("forming process groups: other ranks were lost")

    def cut(self) -> None:
        """End all operations, and let no new operation begin.

        Any thread may call this method, also repeatedly.
        """
        self._over.set()
        # the next call finds an operation that is about to begin in an idle group now
        spared = []
        for inner in (*self.inners.values(), *self._kept.values()):
            if inner.can_outlast and inner.is_idle:
                spared.append(inner.group)
            else:
                inner.is_broken = True
        for backend in self._distinct:
            backend.cut(self._timeouts.abort_s, spared)

    def confirm(self, handle: ElasticGroup) -> bool:
        """Confirm the results of earlier operations on all ranks. Collective.

        Returns once the results that all ranks of the group have awaited are right on
        all of them, including results of other groups with the same ranks or some of
        these ranks. NCCL only queues an operation. Until an operation is confirmed, the
        operation may still fail, or may have completed with wrong data because a peer
        aborted its group. On gloo, an operation that was cut off fails by itself.

        Args:
            handle: The group.

        Returns:
            Whether ranks have met: not on gloo, nor in a group that is not formed.

        Raises:
            PeersLostError: A rank was lost, or an operation was cut off.
        """
        over, inner = self._over, handle.inner
        self._sync(handle.backend, over)
        if not handle.backend.completes_when_cut or not isinstance(inner, InnerGroup):
            return False
        # only after the sync: the sum then proves that each rank's device had finished
        # before that rank aborted anything. An abort follows the flag `over`, and `run`
        # checks the flag
        summand = inner.guards.next()
        total = torch.full((), summand, dtype=torch.int64, device=handle.backend.device)
        dist.all_reduce(total, group=handle)
        self._sync(handle.backend, over)
        if total.item() != handle.size() * summand:
            raise PeersLostError("other ranks were lost: an operation was cut off")
        return True

    def _sync(self, backend: Backend, over: threading.Event) -> None:
        """Wait until the awaited operations are complete on the device as well.

        Raises:
            PeersLostError: An operation has failed or takes too long, or the generation
                is over.
        """
        with self._telling():
            backend.sync(over.is_set, self._timeouts.operation_s)
        if over.is_set():
            raise PeersLostError("other ranks were lost")

    def abandon(self) -> None:
        """Wake the threads that still wait for operations that will not end.

        Any thread may call this method.
        """
        self._waits.abandon()

    def leave(self) -> None:
        """Drop all inner groups except idle ones.

        Returns once no further byte can arrive in a tensor.
        """
        for handle in self._handles:
            # an error between the calls of a batch may have left the batch open
            self.drop_batch(handle)
            # an error inside torch's `_coalescing_manager` leaves a list behind, in
            # which later collectives would only be noted
            dist.distributed_c10d._world.pg_coalesce_state.pop(handle, None)
        self.cut()
        self._device_waits.clear()
        begun_s = time.monotonic()
        dropped = [
            inner
            for members, inner in self.inners.items()
            if not self._keeps(members, inner)
        ]
        for handle in self._handles:
            # a group of one needs no other rank, and is never formed anew
            if handle.size() > 1:
                handle.inner = None
        threading.Thread(target=_bury, args=(dropped,), daemon=True).start()
        # this frame must not keep groups that the other thread has given up
        del dropped
        for backend in self._distinct:
            self._wait_for_quiet(backend, begun_s)
        # groups in reference cycles keep their sockets open, and peers waiting
        gc.collect()
        # glibc keeps freed blocks; another C library has no `malloc_trim`
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def run(
        self,
        handle: ElasticGroup,
        name: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> dist.Work:
        """Begin an operation of a handle's inner group.

        Args:
            handle: The handle.
            name: The name of the operation, one of `OPERATIONS`.
            arguments: The positional arguments of the operation.
            options: The keyword arguments of the operation.

        Raises:
            PeersLostError: Ranks are lost, or the operation fails as it begins.
        """
        # `over` before `inner`: an inner group is dropped after its generation is over
        over, inner = self._over, handle.inner
        if isinstance(inner, SoloGroup):
            return getattr(inner, name)(*arguments, **options)
        inner = _usable(inner, over, name)
        if name == "barrier":
            _begin_without_waiting(*arguments, *options.values())
        # a launch may wait for the device, or for a peer to connect
        with self._telling(), inner.launching:
            call = functools.partial(
                _call, handle, inner, over, name, name, arguments, options
            )
            is_late = name in TRANSFERS and handle.backend.connects_late(handle.size())
            work = self._begin_with_helper(call) if is_late else call()
            inner.num_begun += 1
            inner.num_transfers += name in TRANSFERS
            # `end_batch` returns the operation that the caller waits for
            if handle.batch is not None:
                handle.batch.arguments.append(arguments)
                return _FINISHED
            return self._begun(handle, inner, name, work, arguments, over)

    def start_batch(self, handle: ElasticGroup, device: torch.device) -> None:
        """Begin a batch: the handle's operations begin together, at `end_batch`.

        NCCL serializes transfers that are not batched: two neighbours that both send
        first would wait for ever.

        Args:
            handle: The handle, whose group must be formed.
            device: The device of the tensors.

        Raises:
            PeersLostError: Ranks are lost.
        """
        over, inner = self._over, handle.inner
        assert not isinstance(inner, SoloGroup), (
            "no batches in a group that is not formed"
        )
        inner = _usable(inner, over, _BATCH)
        with self._telling(), contextlib.ExitStack() as held:
            held.enter_context(inner.launching)
            _call(handle, inner, over, _BATCH, "_start_coalescing", (device,), {})
            handle.batch = _Batch(
                inner=inner, device=device, arguments=[], held=held.pop_all()
            )

    def end_batch(self, handle: ElasticGroup) -> dist.Work:
        """Begin the operations of a handle's batch, and return them as one operation.

        Raises:
            PeersLostError: Ranks are lost, or the operations fail as they begin.
        """
        over, batch = self._over, handle.batch
        assert batch is not None, "the batch was not started"
        try:
            with self._telling(), batch.inner.launching:
                work = _call(
                    handle,
                    batch.inner,
                    over,
                    _BATCH,
                    "_end_coalescing",
                    (batch.device,),
                    {},
                )
        except BaseException:
            self.drop_batch(handle)
            raise
        handle.batch = None
        batch.held.close()
        return self._begun(
            handle, batch.inner, _BATCH, work, tuple(batch.arguments), over
        )

    def drop_batch(self, handle: ElasticGroup) -> None:
        """End a handle's failed batch, if the handle has one.

        NCCL counts open batches per thread, and would begin no later operation.
        """
        batch, handle.batch = handle.batch, None
        if batch is not None:
            with batch.held:
                handle.backend.discard(num_open=1)
                with contextlib.suppress(RuntimeError):
                    batch.inner.group._end_coalescing(batch.device)

    def wait(self, operation: _Operation) -> None:
        """Wait until an operation has ended or is abandoned.

        Raises:
            PeersLostError: The operation has failed or was abandoned, or ranks are
                lost.
        """
        backend, over = operation.backend, operation.over
        try:
            with self._telling():
                if backend.completes_when_cut:
                    backend.wait(operation.work)
                else:
                    self._wait_on_host(operation)
                if operation.name == "barrier":  # the host waits as well
                    backend.sync(over.is_set, self._timeouts.operation_s)
        except RuntimeError as error:
            raise PeersLostError(str(error)) from error
        # NCCL: the current stream waits for the operation, and the host does not
        self._device_waits.add(backend.mark(), over.is_set)
        operation.unfinished.discard(operation)
        if over.is_set():
            raise PeersLostError("other ranks were lost")
        if isinstance(operation.work, StagedWork):
            # last: an operation that was cut off leaves its tensors as they are
            operation.work.copy_back()

    def _begun(
        self,
        handle: ElasticGroup,
        inner: InnerGroup,
        name: str,
        work: Any,
        arguments: tuple[Any, ...],
        over: threading.Event,
    ) -> dist.Work:
        """Return the object by which the caller waits for an operation that has begun.

        Raises:
            PeersLostError: The generation is over.
        """
        if work is not None:
            operation = _Operation(
                self, handle.backend, inner, name, work, arguments, over
            )
            inner.unfinished.add(operation)
            return operation
        # no work: NCCL since torch 2.8 puts a synchronous operation into the order of
        # the current stream
        if over.is_set():
            raise PeersLostError(f"{name}: other ranks were lost")
        self._device_waits.add(handle.backend.mark(), over.is_set)
        return _FINISHED

    def _begin_with_helper(self, begin: Callable[[], Any]) -> Any:
        """Begin, in a helper thread, a transfer that may wait for its peer to connect.

        A lost peer never connects, and the wait for a helper can be abandoned.
        """
        begun: list[Any] = []
        self._waits.wait_with_helper(lambda: begun.append(begin()), _ignore)
        return begun.pop()

    def _wait_on_host(self, operation: _Operation) -> None:
        if operation.name in SURVIVE_TIMEOUTS:
            self._waits.wait_in_slices(operation.host_work)
        else:
            call = functools.partial(operation.backend.wait, operation.host_work)
            self._waits.wait_with_helper(call, operation.keep)

    def _telling(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that reports a wait of training for other ranks.

        Only waits of the training thread and of autograd are reported. Autograd runs
        the backward pass of a device in a thread of its own, for which the training
        thread waits.
        """
        if (
            threading.get_ident() == self._training_thread
            or torch._C._current_graph_task_id() != _NO_BACKWARD
        ):
            return self._reported
        return _UNREPORTED

    def _keeps(self, members: str, inner: InnerGroup) -> bool:
        """Keep an inner group for the next generation if the group is idle.

        Returns:
            Whether the group is kept.
        """
        if not inner.can_outlast:
            return False
        # a thread that begins an operation later finds that the generation is over
        with inner.launching:
            is_idle = inner.is_idle
        if is_idle:
            self._kept[members] = inner
        return is_idle

    @property
    def _distinct(self) -> tuple[Backend, ...]:
        """The backends, each once, the device's first.

        Aborts of the device's groups must precede the end of sockets under running
        kernels.
        """
        return tuple(dict.fromkeys(self._backends.values()))

    def _wait_for_quiet(self, backend: Backend, begun_s: float) -> None:
        """Wait until no further byte can arrive in a tensor."""
        limit_s = (
            self._timeouts.abort_s if backend.closing_s is None else backend.closing_s
        )
        # by polling: the kernel does not report when gloo has read its last byte
        while not backend.is_quiet():
            if time.monotonic() - begun_s > limit_s:
                # only another process gets the device back
                if backend.closing_s is None:
                    die(
                        f"{backend.device} is not done runtime.abort_s={limit_s:g}"
                        " seconds after an abort"
                    )
                return
            time.sleep(0.001)

    def _form_all(
        self,
        backend: Backend,
        store: PollingStore,
        over: threading.Event,
        made: dict[str, InnerGroup],
    ) -> None:
        """Form one backend's inner groups, one for all handles with the same members.

        Raises:
            PeersLostError: Forming fails, takes too long, or is cut.
        """
        handles = (
            handle
            for handle in self._handles
            if handle.size() > 1 and handle.backend is backend
        )
        # Each group costs connections, threads and, with NCCL, seconds and device
        # memory. Megatron's 12 groups in a job of 4 ranks have 3 memberships. All ranks
        # begin the operations of handles that share an inner group in the same order,
        # as one thread begins the operations in the order of the schedule or of the
        # graph
        shared = list({handle.members: handle for handle in handles}.values())
        # a part keeps the order in which all ranks have created the groups, so no two
        # groups wait for each other
        parts = [
            shared[index::_FORMING_THREADS]
            for index in range(min(_FORMING_THREADS, len(shared)))
        ]
        backend.begin([inner.group for inner in self._kept.values()])
        outcomes: list[WaitResult] = []
        for part in parts:
            helper = Helper()
            outcomes.append(
                self._waits.start(
                    helper, functools.partial(self._form, part, store, over, made)
                )
            )
            helper.close()
        try:
            for outcome in outcomes:
                limit_s = 2 * self._timeouts.form_s
                if not self._waits.wait_for(outcome, limit_s):
                    raise PeersLostError(f"took more than {limit_s} s")
        except RuntimeError as error:
            over.set()  # ends the other threads at their next request to the store
            raise PeersLostError(f"forming process groups: {error}") from error
        finally:
            backend.formed()

    def _form(
        self,
        handles: Sequence[ElasticGroup],
        store: PollingStore,
        over: threading.Event,
        made: dict[str, InnerGroup],
    ) -> None:
        for handle in handles:
            if over.is_set():
                raise PeersLostError("forming process groups: other ranks were lost")
            part = store.part(handle.members)
            made[handle.members] = self._kept_inner(handle, part) or self._new_inner(
                handle, part
            )

    def _kept_inner(
        self, handle: ElasticGroup, store: PollingStore
    ) -> InnerGroup | None:
        """Return a handle's idle inner group if all members keep the group.

        Else drop the group.
        """
        if not handle.backend.keeps_idle(handle.size()):
            return None
        kept = self._kept.get(handle.members)
        # once more: the thread that watches the last generation may have cut the group
        # as this thread kept it
        position = kept.position if kept and kept.is_idle else None
        if agree_to_keep(store, handle.size(), position):
            assert kept is not None, "the vote was unanimous"
            kept.guards = Guards(handle.members, self._generation)
            return kept
        self._kept.pop(handle.members, None)
        return None

    def _new_inner(self, handle: ElasticGroup, store: PollingStore) -> InnerGroup:
        group = handle.backend.make(
            store,
            handle.rank(),
            handle.size(),
            form_s=self._timeouts.form_s,
            operation_s=self._timeouts.operation_s,
        )
        can_outlast = handle.backend.keeps_idle(handle.size())
        return InnerGroup(
            group=group,
            launching=threading.RLock()
            if can_outlast
            else handle.backend.launching(group),
            generation=self._generation,
            can_outlast=can_outlast,
            guards=Guards(handle.members, self._generation),
        )

    def _create(
        self, name: str, backend: Backend, options: Any, _: Any
    ) -> ElasticGroup:
        # torch names no ranks for the world
        ranks = options.global_ranks_in_group or range(options.group_size)
        # The name is the same on all members. Names of backends keep groups apart: a
        # thread that writes checkpoints communicates beside training, in an order of
        # its own
        members = (
            hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
            if self._shares
            else options.group_id
        )
        handle = ElasticGroup(
            f"{name}/{members}",
            options.group_rank,
            options.group_size,
            backend,
            self,
        )
        self._handles.append(handle)
        return handle


class _ReportedWait:
    """Calls `on_wait` as a wait begins and as the wait ends, for any number of waits.

    A class and not a generator, because each operation enters two of these contexts.
    """

    def __init__(self, on_wait: Callable[[bool], None]) -> None:
        self._on_wait = on_wait

    def __enter__(self) -> None:
        self._on_wait(True)

    def __exit__(self, *_: object) -> None:
        self._on_wait(False)


class _Operation(dist.Work):
    """An operation of a handle's inner group, which can be abandoned.

    The object keeps the operation's `arguments`, and with them its tensors. `over` is
    set when the operation's generation is over.
    """

    def __init__(
        self,
        groups: ElasticGroups,
        backend: Backend,
        inner: InnerGroup,
        name: str,
        work: Any,
        arguments: tuple[Any, ...],
        over: threading.Event,
    ) -> None:
        super().__init__()
        self.backend = backend
        # only the set and not the inner group: a caller that keeps this object would
        # keep the group's sockets
        self.unfinished = inner.unfinished
        self.name = name
        self.work = work
        self.over = over
        self._groups = groups
        self._arguments = arguments
        self._helper: Helper | None = None

    @property
    def host_work(self) -> Any:
        """The part of the operation for which a late wait is allowed.

        A late end of the part writes to no tensor of a next generation.
        """
        return self.work.host_work if isinstance(self.work, StagedWork) else self.work

    # operations have a time limit of their own
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self._groups.wait(self)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def result(self) -> Any:
        return self.work.result()

    def keep(self, helper: Helper) -> None:
        """Keep the helper that waits for the operation after the wait was abandoned."""
        self._helper = helper

    def bury(self) -> None:
        """Wait until the operation has ended, with or without an error."""
        if self._helper is not None:  # the end of a transfer ends one wait only
            self._helper.join()
            return
        with contextlib.suppress(RuntimeError):
            self.host_work.wait()


def _usable(inner: InnerGroup | None, over: threading.Event, name: str) -> InnerGroup:
    """Return an inner group of a generation that ends with `over`.

    Raises:
        PeersLostError: The generation is over. The message begins with `name`.
    """
    if over.is_set() or inner is None:
        raise PeersLostError(f"{name}: other ranks were lost")
    return inner


def _call(
    handle: ElasticGroup,
    inner: InnerGroup,
    over: threading.Event,
    name: str,
    method: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Call a method of an inner group, whose generation ends with `over`.

    Raises:
        PeersLostError: The generation is over, or the call fails. The message begins
            with `name`.
    """
    _usable(inner, over, name)  # again: the thread may have waited to launch
    try:
        return getattr(inner.group, method)(*arguments, **options)
    except BaseException as error:
        inner.is_broken = True
        handle.backend.discard()
        if isinstance(error, RuntimeError):
            raise PeersLostError(f"{name}: {error}") from error
        raise


def _begin_without_waiting(*values: Any) -> None:
    """Let a barrier return at once.

    A barrier that blocks inside a launch would keep a cut from aborting the group.
    """
    for value in values:
        if isinstance(value, dist.BarrierOptions):
            value.asyncOp = True


def _bury(inners: list[InnerGroup]) -> None:
    """Keep the objects of unfinished operations until the operations have ended."""
    # in a separate thread: the destructor of a group waits for the group's operations,
    # and would stop training
    for inner in inners:
        for operation in tuple(inner.unfinished):
            operation.bury()
        inner.unfinished.clear()  # an operation holds its group
    inners.clear()


def _nobody(waiting: bool) -> None:
    pass


def _ignore(_: object) -> None:
    pass
