"""`runtime.backend` and a rank's GPU: what `auto` becomes, and what does not fit the devices."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.elastic.backend_choice import backend_kind, gpu_index, open_backend
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.staged_group import StagedGroup
from moe_ckpt.errors import ConfigError
from moe_ckpt.run_settings import runtime_config


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "kind"),
    [
        ("auto", True, "nccl"),
        ("auto", False, "gloo"),
        ("nccl", True, "nccl"),
        ("gloo", False, "gloo"),
        ("staged", True, "staged"),
        ("staged", False, "staged"),
    ],
)
def test_a_backend_that_fits_the_devices_is_taken(wanted: str, on_gpu: bool, kind: str) -> None:
    assert backend_kind(wanted, on_gpu=on_gpu) == kind


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "message"),
    [
        ("nccl", False, "runtime.backend: got 'nccl', wanted auto, gloo or staged without a GPU"),
        ("gloo", True, "runtime.backend: got 'gloo', wanted auto, nccl or staged on a GPU"),
    ],
)
def test_a_backend_that_cannot_carry_the_tensors_is_refused(wanted: str, on_gpu: bool, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        backend_kind(wanted, on_gpu=on_gpu)
    assert str(error.value) == message


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.backend: got 'mpi', wanted one of auto, nccl, gloo, staged"):
        runtime_config(backend="mpi")


@pytest.mark.parametrize(("local_rank", "num_gpus", "kind", "index"), [(3, 8, "nccl", 3), (3, 8, "staged", 3)])
def test_each_rank_has_a_gpu_where_there_are_enough(local_rank: int, num_gpus: int, kind: str, index: int) -> None:
    assert gpu_index(local_rank, num_gpus, kind) == index


def test_ranks_share_gpus_through_host_memory_only() -> None:
    assert [gpu_index(rank, 2, "staged") for rank in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"runtime\.backend: got 'nccl', wanted staged for 2 or more ranks on 1 GPUs"):
        gpu_index(1, 1, "nccl")


def test_each_kind_has_its_backend() -> None:
    opened = {kind: open_backend(on_gpu=False, kind=kind) for kind in ("auto", "gloo", "staged")}
    assert all(isinstance(backend, GlooBackend) for backend in opened.values())
    assert [kind for kind, backend in opened.items() if getattr(backend, "wrap", None) is StagedGroup] == ["staged"]
    assert opened["staged"].device == torch.device("cpu")
