"""`auto` becomes a backend, each rank gets a GPU, and unfit settings are refused.

The settings are `runtime.backend` and `runtime.share_gpus`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from moe_ckpt.elastic.backend_choice import (
    backend_kind,
    environment_of_shared_gpus,
    gpu_index,
    open_backend,
    use_gpu,
)
from moe_ckpt.elastic.backends import GlooBackend
from moe_ckpt.elastic.staged_group import StagedGroup
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.errors import ConfigError
from moe_ckpt.run_settings import runtime_config


def test_a_backend_that_fits_the_devices_is_taken() -> None:
    taken = [
        [backend_kind(wanted, on_gpu=on_gpu) for on_gpu in (True, False)]
        for wanted in ("auto", "staged")
    ]
    assert taken == [["nccl", "gloo"], ["staged", "staged"]]
    assert (backend_kind("nccl", on_gpu=True), backend_kind("gloo", on_gpu=False)) == (
        "nccl",
        "gloo",
    )


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "message"),
    [
        (
            "nccl",
            False,
            "runtime.backend: got 'nccl', wanted auto, gloo or staged without a GPU",
        ),
        (
            "gloo",
            True,
            "runtime.backend: got 'gloo', wanted auto, nccl or staged on a GPU",
        ),
    ],
)
def test_a_backend_that_cannot_carry_the_tensors_is_refused(
    wanted: str, on_gpu: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        backend_kind(wanted, on_gpu=on_gpu)
    assert str(error.value) == message


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ConfigError,
        match=r"runtime\.backend: got 'mpi', wanted one of auto, nccl, gloo, staged",
    ):
        runtime_config(backend="mpi")


def test_ranks_share_gpus_through_host_memory_only() -> None:
    assert [gpu_index(3, 8, kind) for kind in ("nccl", "staged")] == [3, 3], (
        "there are enough"
    )
    assert [gpu_index(rank, 2, "staged") for rank in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(
        ConfigError,
        match=(
            r"runtime\.backend: got 'nccl', wanted staged for 2 or more ranks on 1 GPUs"
        ),
    ):
        gpu_index(1, 1, "nccl")


def test_ranks_share_gpus_with_nccl_where_they_may() -> None:
    assert [gpu_index(rank, 2, "nccl", share_gpus=True) for rank in range(5)] == [
        0,
        1,
        0,
        1,
        0,
    ]
    ids = [environment_of_shared_gpus(f"host-{rank}") for rank in range(4)]
    assert len({each["NCCL_HOSTID"] for each in ids}) == 4, (
        "NCCL refuses ranks with one identity on one GPU"
    )
    with pytest.raises(
        ConfigError,
        match=r"wanted staged for 2 or more .*, or runtime\.share_gpus=true for a test",
    ):
        gpu_index(1, 1, "nccl")


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "kind"),
    [("auto", False, "gloo"), ("staged", False, "staged"), ("staged", True, "staged")],
)
def test_only_nccl_has_to_be_told_to_share_gpus(
    wanted: str, on_gpu: bool, kind: str
) -> None:
    wanted_share = (
        f"false with runtime.backend={kind}: it is NCCL that refuses to share a GPU"
    )
    with pytest.raises(ConfigError) as error:
        backend_kind(wanted, on_gpu=on_gpu, share_gpus=True)
    assert str(error.value) == f"runtime.share_gpus: got True, wanted {wanted_share}"
    assert backend_kind("auto", on_gpu=True, share_gpus=True) == "nccl"


@pytest.mark.parametrize(("local_world_size", "refused"), [(4, False), (2, True)])
def test_gpus_are_shared_on_one_node(
    local_world_size: int,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launch = Launch(
        global_rank=0,
        local_rank=0,
        world_size=4,
        local_world_size=local_world_size,
        attempt=0,
    )
    if refused:
        with pytest.raises(
            ConfigError,
            match=r"runtime\.share_gpus: got True, wanted false on several nodes",
        ):
            use_gpu(launch, "auto", share_gpus=True)
        return
    use_gpu(launch, "auto", share_gpus=True)
    use_gpu(replace(launch, local_rank=3), "auto", share_gpus=True)
    assert chosen == [torch.device("cuda", 0)] * 2
    assert os.environ["NCCL_HOSTID"].endswith("-3")
    assert capsys.readouterr().err.splitlines() == [
        "runtime.share_gpus: 4 ranks on 1 GPUs, through NCCL's sockets: slow, for tests"
        " alone"
    ]


def test_each_kind_has_its_backend() -> None:
    opened = {
        kind: open_backend(on_gpu=False, kind=kind)
        for kind in ("auto", "gloo", "staged")
    }
    assert all(isinstance(backend, GlooBackend) for backend in opened.values())
    assert [
        kind
        for kind, backend in opened.items()
        if getattr(backend, "wrap", None) is StagedGroup
    ] == ["staged"]
    assert opened["staged"].device == torch.device("cpu")
