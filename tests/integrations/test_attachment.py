"""An attachment replaces a script's functions for groups, and a loop's for saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.integrations import megatron_bridge, megatron_lm, ms_swift
from moe_ckpt.integrations.attachment import route_groups
from moe_ckpt.run_settings import parse_run


@pytest.fixture(autouse=True)
def own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore torch's functions for groups at the end of the test."""
    for module in (dist, dist.distributed_c10d):
        for name in ("new_group", "destroy_process_group"):
            monkeypatch.setattr(module, name, getattr(module, name))


def test_a_script_may_destroy_groups_but_ends_none_of_the_runtime() -> None:
    """Megatron-Bridge destroys all of Megatron's groups after training."""
    group = cast("Any", "a group of the runtime")
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    route_groups()
    dist.destroy_process_group(group)
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        dist.destroy_process_group()


def functions(*names: str) -> ModuleType:
    """Return a fake module of a loop with these functions."""
    module = ModuleType("megatron.training.training")
    for name in names:
        setattr(module, name, lambda *_, **__: None)
    return module


def attach_megatron_lm(save: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Attach to a fake loop that saves with `save`, and return the new function."""
    training: Any = functions(
        *(
            "initialize_megatron",
            "get_args",
            "load_checkpoint",
            "get_forward_backward_func",
            "train",
            "train_step",
        ),
        *("build_train_valid_test_datasets", "build_train_valid_test_data_iterators"),
    )
    training.save_checkpoint = save
    megatron_lm.attach(training, *arguments)
    return training.save_checkpoint


def attach_megatron_bridge(
    save: Callable[..., Any], *arguments: Any
) -> Callable[..., Any]:
    """Do the same as `attach_megatron_lm` for Megatron-Bridge."""
    bridge = SimpleNamespace(
        pretrain=functions("runtime_config_update", "train"),
        setup=functions("create_checkpoint_manager", "setup_data_iterators"),
        loaders=functions("build_pretraining_data_loader"),
        train=functions(
            "train",
            "train_step",
            "get_forward_backward_func",
            "prepare_forward_step_func",
        ),
        eval=functions("get_forward_backward_func"),
    )
    bridge.train.save_checkpoint_and_time = save
    megatron_bridge.attach(bridge, *arguments)
    return bridge.train.save_checkpoint_and_time


def attach_ms_swift(save: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Do the same as `attach_megatron_lm` for ms-swift."""

    class Trainer:
        def train(self) -> None: ...
        def train_step(self) -> None: ...
        def _prepare_data_iterator(self) -> None: ...

        save_checkpoint = save

    base: Any = functions("get_forward_backward_func")
    base.BaseMegatronTrainer = Trainer
    ms_swift.attach(base, *arguments)
    return functools.partial(Trainer.save_checkpoint, None)


@pytest.mark.parametrize(
    "attach", [attach_megatron_lm, attach_megatron_bridge, attach_ms_swift]
)
def test_a_rank_is_not_hung_while_its_loop_saves(
    attach: Callable[..., Callable[..., Any]], tmp_path: Path
) -> None:
    page = StatusPage(tmp_path / "page")
    page.reset()
    joined = SimpleNamespace(
        worker=SimpleNamespace(page=page, turn=None, incarnation=0)
    )
    save = attach(lambda *_: page.waiting, joined, parse_run(["script.py"]))
    assert save()
    assert not page.waiting
