"""`runtime.backend` and a rank's GPU: what `auto` becomes, and what does not fit the devices."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.elastic.backend_choice import backend_kind, gpu_index, open_backend
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.staged_group import StagedGroup
from moe_ckpt.errors import ConfigError
from moe_ckpt.run_settings import runtime_config


def test_a_backend_that_fits_the_devices_is_taken() -> None:
    taken = [[backend_kind(wanted, on_gpu=on_gpu) for on_gpu in (True, False)] for wanted in ("auto", "staged")]
    assert taken == [["nccl", "gloo"], ["staged", "staged"]]
    assert (backend_kind("nccl", on_gpu=True), backend_kind("gloo", on_gpu=False)) == ("nccl", "gloo")


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


def test_ranks_share_gpus_through_host_memory_only() -> None:
    assert [gpu_index(3, 8, kind) for kind in ("nccl", "staged")] == [3, 3], "there are enough"
    assert [gpu_index(rank, 2, "staged") for rank in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"runtime\.backend: got 'nccl', wanted staged for 2 or more ranks on 1 GPUs"):
        gpu_index(1, 1, "nccl")


def test_each_kind_has_its_backend() -> None:
    opened = {kind: open_backend(on_gpu=False, kind=kind) for kind in ("auto", "gloo", "staged")}
    assert all(isinstance(backend, GlooBackend) for backend in opened.values())
    assert [kind for kind, backend in opened.items() if getattr(backend, "wrap", None) is StagedGroup] == ["staged"]
    assert opened["staged"].device == torch.device("cpu")
