"""Process groups that outlive a fault: handles that stay, around inner groups that are
replaced.

Megatron keeps dozens of references to process groups, so it gets handles; only the
inner groups are replaced. Owns: the handles of this process, forming their inner
groups, and ending every operation when a generation ends. Must not: decide when that is
(`elastic.generations` does).

    alone      while a process builds its model: every collective has this rank's contribution only
    formed     gloo or NCCL inside
    cut        operations raise PeersLostError, also those that wait, until groups are formed again
    kept       the inner group of gloo was idle as its generation ended, and waits for a vote of its
               members (`elastic.idle_groups`): it goes on in the next generation, or another is formed
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

BACKEND, CPU_BACKEND = "elastic", "elastic_cpu"
"""Names of backends: for tensors on training's device, and for tensors on the host."""

_FORMING_THREADS = 4
_LEAST_SUMMAND = 1 << 40
_NO_BACKWARD = -1  # autograd's number for a thread that computes no gradients
_BATCH = "batched transfers"
_FINISHED = FinishedWork()
_UNREPORTED = contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTimeouts:
    """Seconds: to form all groups, for one operation, and for a device to be quiet
    after its groups were aborted.
    """

    form_s: float
    operation_s: float
    abort_s: float


class Guards:
    """The summands by which the ranks of an inner group confirm what they did before.

    A guard is a sum, to which a rank adds its summand once its device has finished what
    the guard is for. An operation that an abort has cut off completes with what was in
    its buffers: nothing, some of the summands, or the sum of an earlier guard. So
    summands are positive, and each guard of each generation has another one.
    """

    def __init__(self, members: str, generation: int) -> None:
        self._place = f"{generation}/{members}"
        self._num_begun = 0

    def next(self) -> int:
        """Return the summand of the next guard, which is the same on all ranks.

        Returns:
            An integer from 2^40 up to 2^41: sums over 2^22 ranks are below 2^63.
        """
        self._num_begun += 1
        place = f"{self._place}/{self._num_begun}"
        return (
            _LEAST_SUMMAND + xxhash.xxh3_64_intdigest(place.encode()) % _LEAST_SUMMAND
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Operations that an inner group collects, to begin them together; `arguments`
    holds their tensors.

    Until they have begun, `held` keeps a cut from aborting the group.
    """

    inner: InnerGroup
    device: torch.device
    arguments: list[tuple[Any, ...]]
    held: contextlib.ExitStack


@dataclass(kw_only=True, slots=True, eq=False)
class InnerGroup:
    """A group that a generation has formed, for all handles with the same members."""

    group: Any
    """The group of gloo or NCCL."""

    launching: contextlib.AbstractContextManager[object]
    """Held while a thread begins an operation: no abort frees the group then, and
    nobody takes it for idle.
    """

    generation: int
    """The generation that has formed it."""

    can_outlast: bool
    """Whether it may outlive a generation, once it is idle."""

    guards: Guards
    """Of the present generation."""

    num_begun: int = 0
    """Operations that this rank has begun, of all kinds."""

    num_transfers: int = 0
    """Transfers between two ranks among these operations."""

    unfinished: set[_Operation] = field(default_factory=set)
    """Operations that nobody has awaited to their end, with their tensors: after a cut
    an operation may still write to their memory, which must not be another tensor's.
    """

    is_broken: bool = False
    """Whether it was cut, or an operation has failed as it began."""

    @property
    def is_idle(self) -> bool:
        """Whether no byte is under way in it, if its members have begun the same number
        of operations.

        A transfer has one of two ranks only, so numbers of transfers prove nothing.
        """
        return not (self.is_broken or self.num_transfers or self.unfinished)

    @property
    def position(self) -> str:
        """What its members have to have in common, to go on with it while it is idle."""
        return f"{self.generation}/{self.num_begun}"


class ElasticGroup(dist.ProcessGroup):
    """The handle of one group, in which this process has place `own` of `size`.

    Handles with the same `members` share an inner group.
    """

    def __init__(
        self,
        members: str,
        own: int,
        size: int,
        transport: Backend,
        groups: ElasticGroups,
    ) -> None:
        super().__init__(own, size)  # pyright: ignore[reportCallIssue] - the stubs know another constructor
        self.members = members
        self.inner: InnerGroup | SoloGroup | None = SoloGroup(size)
        self.transport = transport
        self.batch: _Batch | None = None
        self._groups = groups

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.transport.device]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def num_operations(self) -> int:
        """The collective operations that the inner group has begun: gloo numbers its
        messages by them.
        """
        inner = self.inner
        assert isinstance(inner, InnerGroup), "the group is not formed"
        return inner.group._get_sequence_number_for_group() - inner.num_transfers

    def confirm(self) -> bool:
        """Return once the results of earlier operations are right on all ranks: see
        `ElasticGroups.confirm`.
        """
        return self._groups.confirm(self)

    # torch 2.14 batches transfers of any group; older releases ask for exactly
    # `ProcessGroup`: see `register`.

    def _get_backend(self, device: torch.device) -> Any:
        inner = self.inner
        if not isinstance(inner, InnerGroup):
            return BackendAbilities(supports_coalescing=False)
        return BackendAbilities(
            supports_coalescing=inner.group._get_backend(device).supports_coalescing
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._groups.start_batch(self, device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002 - the batch has it
        return self._groups.end_batch(self)

    def drop_batch(self) -> None:
        """End a batch that an error has left open, in the thread that has started it."""
        self._groups.drop_batch(self)


def _method(name: str) -> Callable[..., dist.Work]:
    # a function: a `partialmethod` makes another object at each call
    def begin(self: ElasticGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self._groups.run(self, name, arguments, options)

    return begin


for _name in OPERATIONS:
    setattr(ElasticGroup, _name, _method(_name))


class ElasticGroups:
    """All handles of this process. One thread forms and leaves; any thread may call
    `cut` and `abandon`.

    `on_wait` is called when that thread, or autograd's in its backward pass, begins and
    ends to wait for other ranks, `on_device_wait` when its device does. With `shares`,
    groups of the same ranks share an inner group.
    """

    def __init__(
        self,
        transport: Backend,
        timeouts: GroupTimeouts,
        on_wait: Callable[[bool], None],
        on_device_wait: Callable[[bool], None] | None = None,
        *,
        shares: bool = True,
    ) -> None:
        self._transports = {BACKEND: transport, CPU_BACKEND: transport}
        if transport.device.type != "cpu":
            self._transports[CPU_BACKEND] = GlooBackend()
        self._shares = shares
        self._timeouts = timeouts
        self._reported = _ReportedWait(on_wait)
        self._device_waits = DeviceWaits(
            on_device_wait or _nobody,
            lambda: self._transports[BACKEND].failure(),
            limit_s=timeouts.operation_s,
        )
        self._handles: list[ElasticGroup] = []
        # by members: idle groups of the last generation
        self._kept: dict[str, InnerGroup] = {}
        self._waits = HostWaits()
        self._store_lock = threading.Lock()
        # one per generation: a late thread must not see that of the next one
        self._over = threading.Event()
        self._training_thread = 0
        self._generation = 0

    @property
    def inners(self) -> dict[str, InnerGroup]:
        """The inner groups of handles, by members."""
        inners = ((handle.members, handle.inner) for handle in self._handles)
        return {
            members: inner for members, inner in inners if isinstance(inner, InnerGroup)
        }

    @property
    def insides(self) -> list[Any]:
        """The groups of gloo or NCCL inside, each once."""
        return [inner.group for inner in self.inners.values()]

    @property
    def num_formed(self) -> int:
        """The inner groups that this generation has formed."""
        return len(self.inners) - self.num_kept

    @property
    def num_kept(self) -> int:
        """The inner groups that this generation has from an earlier one."""
        return sum(
            inner.generation < self._generation for inner in self.inners.values()
        )

    def register(self) -> None:
        """Register these groups with `torch.distributed` under the backends' names."""
        for name, transport in self._transports.items():
            create = functools.partial(self._create, name, transport)
            register_groups(name, create, [transport.device.type])
        batch_transfers_of(ElasticGroup)

    def form(
        self,
        client: dist.Store,
        generation: int,
        on_failure: Callable[[str], object] | None = None,
    ) -> None:
        """Form the inner groups of all handles, for a new generation, but for those
        that all members have kept.

        The ranks meet in the store of `client`. Threads of gloo read addresses there
        for as long as the generation lasts. `on_failure` receives, in another thread,
        the reason why the device will not complete an operation. Raises PeersLostError
        if forming takes too long, or is cut.
        """
        over = self._over = threading.Event()
        self._generation = generation
        self._device_waits.begin(on_failure or _ignore)
        self._training_thread = threading.get_ident()
        made: dict[str, InnerGroup] = {}
        # keys with the generation: a rank that is late must not meet the others through
        # addresses of the last one
        store = PollingStore(
            client,
            self._store_lock,
            f"{generation}/groups/",
            over.is_set,
            self._timeouts.form_s,
            num_ranks=max((handle.size() for handle in self._handles), default=1),
        )
        # the host's first: sockets that NCCL opens later are not its own
        for transport in reversed(self._distinct):
            self._form_all(transport, store, over, made)
        self._kept.clear()
        for handle in self._handles:
            if handle.members in made:
                # other threads begin operations from here on
                handle.inner = made[handle.members]
        # once more: a cut that came while groups were formed did not know those that
        # handles have from here on
        if over.is_set():
            self.cut()
            raise PeersLostError("forming process groups: other ranks were lost")

    def cut(self) -> None:
        """End all operations, and let no new one begin. May be repeated."""
        self._over.set()
        # an operation that is about to begin in an idle group is found at the next call
        spared = []
        for inner in (*self.inners.values(), *self._kept.values()):
            if inner.can_outlast and inner.is_idle:
                spared.append(inner.group)
            else:
                inner.is_broken = True
        for transport in self._distinct:
            transport.cut(self._timeouts.abort_s, spared)

    def confirm(self, handle: ElasticGroup) -> bool:
        """Return once the results that all ranks of a group have awaited are right, on
        all of them. Collective.

        Also results of other groups with the same ranks, or with some of them. NCCL
        only queues an operation: until it is confirmed it may still fail, and may have
        completed with wrong data as a peer aborted its group. On gloo an operation that
        was cut off fails by itself.

        Returns:
            Whether ranks have met: not on gloo, nor in a group that is not formed.

        Raises:
            PeersLostError: A rank was lost, or an operation was cut off.
        """
        over, inner = self._over, handle.inner
        self._sync(handle.transport, over)
        if not handle.transport.completes_when_cut or not isinstance(inner, InnerGroup):
            return False
        # only now: the sum proves that each rank's device had finished before that rank
        # aborted anything. An abort follows the flag, and `run` looks at the flag
        summand = inner.guards.next()
        total = torch.full(
            (), summand, dtype=torch.int64, device=handle.transport.device
        )
        dist.all_reduce(total, group=handle)
        self._sync(handle.transport, over)
        if total.item() != handle.size() * summand:
            raise PeersLostError("other ranks were lost: an operation was cut off")
        return True

    def _sync(self, transport: Backend, over: threading.Event) -> None:
        """Wait until the awaited operations are complete on the device, too. Raises
        PeersLostError.
        """
        with self._telling():
            transport.sync(over.is_set, self._timeouts.operation_s)
        if over.is_set():
            raise PeersLostError("other ranks were lost")

    def abandon(self) -> None:
        """Wake the threads that still wait for an operation that will not end."""
        self._waits.abandon()

    def leave(self) -> None:
        """Drop the inner groups, but for idle ones, once no further byte can arrive in
        a tensor.
        """
        for handle in self._handles:
            # an error between the calls of a batch has left it open
            self.drop_batch(handle)
            # and one inside torch's `_coalescing_manager` its list: later collectives
            # would only be noted in it
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
        # this frame is not to keep groups that the other thread has given up
        del dropped
        for transport in self._distinct:
            self._wait_for_quiet(transport, begun_s)
        # groups in cycles keep their sockets open, and with them peers waiting
        gc.collect()
        # another C library than glibc, which keeps freed blocks
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def run(
        self,
        handle: ElasticGroup,
        name: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> dist.Work:
        """Begin an operation of a handle's inner group. Raises PeersLostError if ranks
        are lost.
        """
        # in this order: an inner group is dropped after its generation is over
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
            is_late = name in TRANSFERS and handle.transport.connects_late(
                handle.size()
            )
            work = self._begin_with_helper(call) if is_late else call()
            inner.num_begun += 1
            inner.num_transfers += name in TRANSFERS
            # the batch's end returns the operation that is waited for
            if handle.batch is not None:
                handle.batch.arguments.append(arguments)
                return _FINISHED
            return self._begun(handle, inner, name, work, arguments, over)

    def start_batch(self, handle: ElasticGroup, device: torch.device) -> None:
        """Let a handle's operations begin together, at `end_batch`. Raises
        PeersLostError if ranks are lost.

        NCCL serializes transfers that are not batched: two neighbours that both send
        first would wait for ever.
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
        """Begin a handle's batch and return it as one operation. Raises PeersLostError
        if ranks are lost.
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
        """End a batch that failed: NCCL counts open batches per thread, and would begin
        no later operation.
        """
        batch, handle.batch = handle.batch, None
        if batch is not None:
            with batch.held:
                handle.transport.discard(num_open=1)
                with contextlib.suppress(RuntimeError):
                    batch.inner.group._end_coalescing(batch.device)

    def wait(self, operation: _Operation) -> None:
        """Wait for an operation to end or to be abandoned. Raises PeersLostError."""
        transport, over = operation.transport, operation.over
        try:
            with self._telling():
                if transport.completes_when_cut:
                    transport.wait(operation.work)
                else:
                    self._wait_on_host(operation)
                if operation.name == "barrier":  # for which the host waits, too
                    transport.sync(over.is_set, self._timeouts.operation_s)
        except RuntimeError as error:
            raise PeersLostError(str(error)) from error
        # NCCL: the current stream waits for it, the host does not
        self._device_waits.add(transport.mark(), over.is_set)
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
        """Return what the caller waits for, of an operation that has begun. Raises
        PeersLostError.
        """
        if work is not None:
            operation = _Operation(
                self, handle.transport, inner, name, work, arguments, over
            )
            inner.unfinished.add(operation)
            return operation
        # NCCL since torch 2.8: a synchronous operation is in the order of the current
        # stream
        if over.is_set():
            raise PeersLostError(f"{name}: other ranks were lost")
        self._device_waits.add(handle.transport.mark(), over.is_set)
        return _FINISHED

    def _begin_with_helper(self, begin: Callable[[], Any]) -> Any:
        """Begin a transfer that may wait for its peer to connect, which a lost one
        never does.
        """
        begun: list[Any] = []
        self._waits.wait_with_helper(lambda: begun.append(begin()), _ignore)
        return begun.pop()

    def _wait_on_host(self, operation: _Operation) -> None:
        if operation.name in SURVIVE_TIMEOUTS:
            self._waits.wait_in_slices(operation.host_work)
        else:
            call = functools.partial(operation.transport.wait, operation.host_work)
            self._waits.wait_with_helper(call, operation.keep)

    def _telling(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which training waits for other ranks: of its thread and
        autograd's, not of others.

        Autograd runs the backward pass of a device in a thread of its own, for which
        the training thread waits.
        """
        if (
            threading.get_ident() == self._training_thread
            or torch._C._current_graph_task_id() != _NO_BACKWARD
        ):
            return self._reported
        return _UNREPORTED

    def _keeps(self, members: str, inner: InnerGroup) -> bool:
        """Keep an inner group for the next generation, if it is idle; return whether it
        is.
        """
        if not inner.can_outlast:
            return False
        # whoever begins an operation later finds that its generation is over
        with inner.launching:
            is_idle = inner.is_idle
        if is_idle:
            self._kept[members] = inner
        return is_idle

    @property
    def _distinct(self) -> tuple[Backend, ...]:
        """The device's transport first: aborts of its groups precede the end of sockets
        under running kernels.
        """
        return tuple(dict.fromkeys(self._transports.values()))

    def _wait_for_quiet(self, transport: Backend, begun_s: float) -> None:
        """Wait until no further byte can arrive."""
        limit_s = (
            self._timeouts.abort_s
            if transport.closing_s is None
            else transport.closing_s
        )
        # by looking: the kernel does not report when gloo has read its last byte
        while not transport.is_quiet():
            if time.monotonic() - begun_s > limit_s:
                # only another process gets the device back
                if transport.closing_s is None:
                    die(
                        f"{transport.device} is not done runtime.abort_s={limit_s:g}"
                        " seconds after an abort"
                    )
                return
            time.sleep(0.001)

    def _form_all(
        self,
        transport: Backend,
        store: PollingStore,
        over: threading.Event,
        made: dict[str, InnerGroup],
    ) -> None:
        """Form the inner groups of one transport's handles, one for all of the same
        members. Raises PeersLostError.
        """
        handles = (
            handle
            for handle in self._handles
            if handle.size() > 1 and handle.transport is transport
        )
        # each group costs connections, threads and, with NCCL, seconds and device
        # memory: Megatron's 12 groups in a job of 4 ranks have 3 memberships. All ranks
        # begin the operations of handles that share one in the same order, as one
        # thread begins them in the order of the schedule or of the graph
        shared = list({handle.members: handle for handle in handles}.values())
        # a part keeps the order in which all ranks have created the groups: no two
        # groups wait for each other
        parts = [
            shared[index::_FORMING_THREADS]
            for index in range(min(_FORMING_THREADS, len(shared)))
        ]
        transport.begin([inner.group for inner in self._kept.values()])
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
            transport.formed()

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
        """Return a handle's idle inner group, if all members go on with theirs; else
        drop it.
        """
        if not handle.transport.keeps_idle(handle.size()):
            return None
        kept = self._kept.get(handle.members)
        if agree_to_keep(store, handle.size(), kept and kept.position):
            assert kept is not None, "the vote was unanimous"
            kept.guards = Guards(handle.members, self._generation)
            return kept
        self._kept.pop(handle.members, None)
        return None

    def _new_inner(self, handle: ElasticGroup, store: PollingStore) -> InnerGroup:
        group = handle.transport.make(
            store,
            handle.rank(),
            handle.size(),
            form_s=self._timeouts.form_s,
            operation_s=self._timeouts.operation_s,
        )
        can_outlast = handle.transport.keeps_idle(handle.size())
        return InnerGroup(
            group=group,
            launching=threading.RLock()
            if can_outlast
            else handle.transport.launching(group),
            generation=self._generation,
            can_outlast=can_outlast,
            guards=Guards(handle.members, self._generation),
        )

    def _create(
        self, backend: str, transport: Backend, options: Any, _: Any
    ) -> ElasticGroup:
        # torch names no ranks for the world
        ranks = options.global_ranks_in_group or range(options.group_size)
        # the same name on all members; backends stay apart: a thread that writes
        # checkpoints communicates beside training, in an order of its own
        members = (
            hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
            if self._shares
            else options.group_id
        )
        handle = ElasticGroup(
            f"{backend}/{members}",
            options.group_rank,
            options.group_size,
            transport,
            self,
        )
        self._handles.append(handle)
        return handle


class _ReportedWait:
    """Calls `on_wait` as a wait begins and as the wait ends; for any number of waits.

    No generator: each operation enters two of these contexts.
    """

    def __init__(self, on_wait: Callable[[bool], None]) -> None:
        self._on_wait = on_wait

    def __enter__(self) -> None:
        self._on_wait(True)

    def __exit__(self, *_: object) -> None:
        self._on_wait(False)


class _Operation(dist.Work):
    """An operation of a handle's inner group, which can be abandoned.

    `arguments` holds its tensors; `over` is its generation's.
    """

    def __init__(
        self,
        groups: ElasticGroups,
        transport: Backend,
        inner: InnerGroup,
        name: str,
        work: Any,
        arguments: tuple[Any, ...],
        over: threading.Event,
    ) -> None:
        super().__init__()
        self.transport = transport
        # not the group: a caller that keeps this object would keep its sockets
        self.unfinished = inner.unfinished
        self.name = name
        self.work = work
        self.over = over
        self._groups = groups
        self._arguments = arguments
        self._helper: Helper | None = None

    @property
    def host_work(self) -> Any:
        """The part for which a late wait is allowed: this part writes to no tensor of a
        next generation.
        """
        return self.work.host_work if isinstance(self.work, StagedWork) else self.work

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - operations have their own
        self._groups.wait(self)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def result(self) -> Any:
        return self.work.result()

    def keep(self, helper: Helper) -> None:
        """Take the helper that waits for the operation though the wait was abandoned."""
        self._helper = helper

    def bury(self) -> None:
        """Wait until the operation has ended, however it ends."""
        if self._helper is not None:  # a transfer ends one wait only
            self._helper.join()
            return
        with contextlib.suppress(RuntimeError):
            self.host_work.wait()


def _usable(inner: InnerGroup | None, over: threading.Event, name: str) -> InnerGroup:
    """Return an inner group of a generation that ends with `over`. Raises
    PeersLostError; `name` is for errors.
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
    """Call a method of an inner group, whose generation ends with `over`; `name` is for
    errors.

    Raises PeersLostError if the generation is over or the call fails.
    """
    _usable(inner, over, name)  # once more: the thread may have waited to launch it
    try:
        return getattr(inner.group, method)(*arguments, **options)
    except BaseException as error:
        inner.is_broken = True
        handle.transport.discard()
        if isinstance(error, RuntimeError):
            raise PeersLostError(f"{name}: {error}") from error
        raise


def _begin_without_waiting(*values: Any) -> None:
    """Let a barrier return at once: one that blocks inside a launch would keep a cut
    from aborting it.
    """
    for value in values:
        if isinstance(value, dist.BarrierOptions):
            value.asyncOp = True


def _bury(inners: list[InnerGroup]) -> None:
    """Keep the objects of unfinished operations until these have ended."""
    # in this thread: the destructor of a group waits for its operations, and would stop
    # training
    for inner in inners:
        for operation in tuple(inner.unfinished):
            operation.bury()
        inner.unfinished.clear()  # an operation holds its group
    inners.clear()


def _nobody(waiting: bool) -> None:
    pass


def _ignore(_: object) -> None:
    pass
