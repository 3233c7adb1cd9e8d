"""Reductions of Megatron's gradient buffers, as captured by checkpoint servers.

Servers capture the reductions from a mirror port. FlowCheck, sections 4 and 6.1.

Owns: the offset of each parameter's gradient in the buckets that a group reduces, and
the marks by which servers find the streams of the groups. Must not: read gradients.

A gradient is tapped if no reduction has the gradient as the optimizer uses it. Tapped
gradients are those of experts that no other rank holds, and of parameters that Megatron
reduces once more over other groups (tied embeddings and, with tensor parallelism,
replicated parameters).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ckpt.config import require
from moe_ckpt.elastic.process_groups import ElasticGroup
from moe_ckpt.flowcheck.mirror.marks import GROUP_BYTES, mark_of
from moe_ckpt.flowcheck.mirror.plan import BucketOffset, MirroredSums
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.overlapped import bucket_groups
from moe_ckpt.megatron.owned import OwnedParameter
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.snapshot.codec import MASTER, PartKey

_WANTED = "where ckpt.capture=mirror"


@dataclass(slots=True, eq=False)
class _Reduction:
    """The reductions of one group."""

    group: ElasticGroup
    """The group."""

    buckets: list[Any] = field(default_factory=list)
    """The buckets that the group reduces in each iteration, in order."""

    name: str = ""
    """The identity of the group in the last mark, in hex."""

    num_operations: int = 0
    """The group's operations up to the last mark or call of `sums`."""


class GradientMirror:
    """Implements `server_states.Mirror` for gloo and unsharded optimizers.

    Args:
        state: This rank's training state.
        operators: The operators of this rank.

    Raises:
        ConfigError: Servers cannot capture the reductions.
    """

    def __init__(self, state: TrainingState, operators: RankOperators) -> None:
        _require_capturable(state)
        of_groups: dict[ElasticGroup, _Reduction] = {}
        for bucket, group in _buckets(state):
            if group.size() > 1:  # otherwise no gradient crosses the network
                of_groups.setdefault(group, _Reduction(group=group)).buckets.append(
                    bucket
                )
        self._reductions = list(of_groups.values())
        wanted = f"at least 2 {_WANTED}: no gradients cross the network"
        require(bool(self._reductions), "parallel.dp", 1, wanted)
        changed = _reduced_again(state)
        self.offsets: Mapping[PartKey, BucketOffset] = {
            owned.key(MASTER): offset
            for owned in operators.parameters
            if owned.parameter not in changed and (offset := self._offset_of(owned))
        }
        self._operators = operators

    def mark(self) -> None:
        for each in self._reductions:
            name = torch.frombuffer(
                bytearray(secrets.token_bytes(GROUP_BYTES)), dtype=torch.uint8
            )
            dist.broadcast(name, group=each.group, group_src=0)
            each.name = name.numpy().tobytes().hex()
            mine = mark_of(
                bytes.fromhex(each.name), each.group.size(), each.group.rank()
            )
            dist.all_reduce(
                torch.frombuffer(bytearray(mine), dtype=torch.uint8),
                dist.ReduceOp.MAX,
                group=each.group,
            )
            # counted after the operations of the mark, which belong to no iteration
            each.num_operations = each.group.num_operations

    def sums(self) -> tuple[MirroredSums, ...]:
        return tuple(map(_sums_since, self._reductions))

    def note(self) -> str:
        """Return a log line on tapped gradients: the operators, and the bytes."""
        owned = [each for each in self._operators.parameters if each.start < each.end]
        tapped = [each for each in owned if each.key(MASTER) not in self.offsets]
        total, names = (
            sum(map(_gradient_bytes, owned)),
            {str(each.operator) for each in tapped},
        )
        what = (
            f"{sum(map(_gradient_bytes, tapped))} of {total} bytes of this rank's"
            " gradients are tapped"
        )
        return (
            f"{what}: no reduction has them ({', '.join(sorted(names))})"
            if names
            else f"{what}: all are mirrored"
        )

    def _offset_of(self, owned: OwnedParameter) -> BucketOffset | None:
        """Return the offset of the owned piece's gradient.

        None if the piece is empty, or if no other rank holds the parameter.
        """
        if owned.start == owned.end:
            return None
        for number, reduction in enumerate(self._reductions):
            for index, bucket in enumerate(reduction.buckets):
                if owned.parameter in bucket.params:
                    # found by address, because Megatron's gradients are views of their
                    # bucket's memory
                    gradient = cast("Any", owned.parameter).main_grad
                    offset = gradient.data_ptr() - bucket.grad_data.data_ptr()
                    start, rest = divmod(offset, bucket.grad_data.element_size())
                    assert rest == 0
                    assert 0 <= start <= bucket.grad_data.numel() - gradient.numel()
                    return BucketOffset(
                        group=number, bucket=index, start=start + owned.start
                    )
        return None


def _sums_since(reduction: _Reduction) -> MirroredSums:
    """Return the reductions of one iteration: those since the last call."""
    first, reduction.num_operations = (
        reduction.num_operations,
        reduction.group.num_operations,
    )
    return MirroredSums(
        group=reduction.name,
        size=reduction.group.size(),
        buckets=tuple(bucket.grad_data.nbytes for bucket in reduction.buckets),
        dtype=str(reduction.buckets[0].grad_data.dtype).removeprefix("torch."),
        first=first,
        end=reduction.num_operations,
    )


def _buckets(state: TrainingState) -> Iterator[tuple[Any, ElasticGroup]]:
    """Yield buckets in the order in which Megatron reduces them, with their groups."""
    for bucket_group in bucket_groups(state.model):
        for bucket in bucket_group.buckets:
            yield bucket, bucket_group.data_parallel_group


def _require_capturable(state: TrainingState) -> None:
    for chunk in state.model:
        config, inner = cast("Any", chunk).ddp_config, cast("Any", chunk)
        sharded = config.use_distributed_optimizer
        wanted = (
            f"false {_WANTED}: a sharded optimizer gathers weights over the network,"
            " and not gradients"
        )
        require(not sharded, "train.distributed_optimizer", sharded, wanted)
        overlapped = config.overlap_grad_reduce
        require(
            not overlapped,
            "overlap_grad_reduce",
            overlapped,
            f"false {_WANTED}: operations would alternate",
        )
        per_token = inner.config.calculate_per_token_loss
        wanted = f"false {_WANTED}: gradients are scaled after their reduction"
        require(not per_token, "calculate_per_token_loss", per_token, wanted)
    for optimizer in state.inner_optimizers:
        scales = getattr(optimizer, "grad_scaler", None) is not None
        require(
            not scales,
            "precision.dtype",
            "fp16",
            f"bf16 or fp32 {_WANTED}: losses are not scaled then",
        )
    dtypes = {bucket.grad_data.dtype for bucket, _ in _buckets(state)}
    require(
        len(dtypes) <= 1,
        "grad_reduce_in_fp32",
        sorted(map(str, dtypes)),
        f"one type of gradients {_WANTED}",
    )
    groups = [group for _, group in _buckets(state) if group.size() > 1]
    backends = [group.backend for group in groups if isinstance(group, ElasticGroup)]
    is_gloo = len(backends) == len(groups) and all(
        backend.sends_gloo_frames for backend in backends
    )
    names = sorted({type(backend).__name__ for backend in backends})
    wanted = (
        "tap, or gloo over TCP: frames of NCCL over RDMA or of encrypted connections"
        " are not parsed"
    )
    require(
        is_gloo,
        "ckpt.capture",
        f"mirror with {', '.join(names) or 'unknown groups'}",
        wanted,
    )


def _reduced_again(state: TrainingState) -> set[torch.nn.Parameter]:
    """Return the parameters whose gradients Megatron also reduces over other groups."""
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    is_tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return {
        parameter
        for chunk in state.model
        for parameter in chunk.parameters()
        if (has_stages and getattr(parameter, "shared_embedding", False))
        or (
            is_tensor_parallel
            and not getattr(parameter, "tensor_model_parallel", False)
        )
    }


def _gradient_bytes(owned: OwnedParameter) -> int:
    return 4 * (owned.end - owned.start)
