"""The training loops that `moe_ckpt.run` attaches to, by their names in `--loop`.

Owns: which modules each loop needs, imported when it is chosen. Must not: import any of
them before, as each takes seconds, and a version that does not fit is one error.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moe_ckpt.integrations.megatron_bridge_seams import import_bridge
from moe_ckpt.integrations.megatron_lm_seams import import_training
from moe_ckpt.integrations.ms_swift_seams import import_swift

if TYPE_CHECKING:
    from moe_ckpt.integrations.loop_plain import Watch
    from moe_ckpt.loop import JoinedWorker
    from moe_ckpt.run_elastic import Worker
    from moe_ckpt.run_settings import RunSettings


class Loop(ABC):
    """A training loop in this process, whose seams are as expected. `entry` names the
    function that a script calls.

    `modules` has the functions that the module of that name in this package replaces.
    """

    entry: str
    module: str

    def __init__(self, modules: Any) -> None:
        self._modules = modules

    def import_attachment(self) -> Any:
        """Import all that an attachment needs: workers that are forked later have it."""
        return importlib.import_module(f"moe_ckpt.integrations.{self.module}")

    def attach(self, joined: JoinedWorker[Worker], settings: RunSettings) -> Any:
        """Return an `Attachment` of this worker's process to the loop."""
        return self.import_attachment().attach(self._modules, joined, settings)

    @abstractmethod
    def use_cpu(self) -> bool:
        """Let the loop start without a GPU, where there is none; return whether there
        is none.
        """

    @abstractmethod
    def watch(self, watch: Watch) -> None:
        """Let the loop, without an attachment, report to a watch."""


class MegatronLm(Loop):
    """Megatron-LM's loop."""

    entry, module = "megatron.training's pretrain", "megatron_lm"

    def use_cpu(self) -> bool:
        from moe_ckpt.integrations import loop_cpu  # noqa: PLC0415 - seconds of imports

        return loop_cpu.enable(
            self._modules, importlib.import_module("megatron.core.datasets.utils")
        )

    def watch(self, watch: Watch) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        def iteration_of(*_: Any, iteration: int, **__: Any) -> int:
            return iteration + 1

        loop_plain.watch_loop(self._modules, self._modules, iteration_of, watch)


class MegatronBridge(Loop):
    """Megatron-Bridge's loop."""

    entry, module = "megatron.bridge's pretrain", "megatron_bridge"

    def use_cpu(self) -> bool:
        from moe_ckpt.integrations import loop_cpu  # noqa: PLC0415

        return loop_cpu.enable(
            self._modules.setup,
            importlib.import_module("megatron.bridge.training.initialize"),
        )

    def watch(self, watch: Watch) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        def iteration_of(*arguments: Any) -> int:
            # `global_state`, by its place in `megatron_bridge_seams._STEP`
            return arguments[5].train_state.step + 1

        loop_plain.watch_loop(
            self._modules.pretrain, self._modules.train, iteration_of, watch
        )


class MsSwift(Loop):
    """ms-swift's Megatron trainer."""

    entry, module = "ms-swift's MegatronTrainer.train", "ms_swift"

    def use_cpu(self) -> bool:
        from moe_ckpt.megatron import cpu_stand_in  # noqa: PLC0415 - seconds of imports

        return cpu_stand_in.enable()

    def watch(self, watch: Watch) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        loop_plain.watch_trainer(self._modules.BaseMegatronTrainer, watch)


# each raises ConfigError where a loop is missing, or its seams have moved
LOOPS: Mapping[str, Callable[[], Loop]] = {
    "megatron-lm": lambda: MegatronLm(import_training()),
    "megatron-bridge": lambda: MegatronBridge(import_bridge()),
    "ms-swift": lambda: MsSwift(import_swift()),
}
