"""The training loops that `moe_ckpt.run` attaches to, by the names of `--loop`.

Owns: the modules that each loop needs, which are imported once the loop is chosen. Must
not: import such a module before that. Each import takes seconds, and a version that
does not fit raises an error.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from moe_ckpt.integrations.megatron_bridge_seams import import_bridge
from moe_ckpt.integrations.megatron_lm_seams import import_training
from moe_ckpt.integrations.ms_swift_seams import import_swift

if TYPE_CHECKING:
    from moe_ckpt.elastic_worker import Worker
    from moe_ckpt.integrations.attachment import Attachment
    from moe_ckpt.integrations.loop_plain import Watch
    from moe_ckpt.loop import JoinedWorker
    from moe_ckpt.run_settings import RunSettings


class AttachingModule(Protocol):
    """A module of this package that attaches to a loop."""

    def attach(
        self, modules: Any, joined: JoinedWorker[Worker], settings: RunSettings, /
    ) -> Attachment:
        """Let the loop of this worker's process checkpoint and recover.

        Args:
            modules: The modules of the loop, as `Loop` has them.
            joined: This worker.
            settings: The settings of the run.

        Raises:
            ConfigError: The process has an attachment already.
        """
        ...


class Loop(ABC):
    """A training loop in this process, whose seams are as expected.

    Args:
        modules: The modules of the loop whose functions an attachment replaces.
    """

    entry_function: str
    """The function that a script calls to train, for an error."""

    module: str
    """The module of this package that attaches to the loop."""

    def __init__(self, modules: Any) -> None:
        self._modules = modules

    def import_attachment(self) -> AttachingModule:
        """Import and return the module that attaches to the loop.

        Workers that are forked later share the imports.
        """
        name = f"moe_ckpt.integrations.{self.module}"
        return cast("AttachingModule", importlib.import_module(name))

    def attach(self, joined: JoinedWorker[Worker], settings: RunSettings) -> Attachment:
        """Attach this worker's process to the loop.

        Args:
            joined: This worker.
            settings: The settings of the run.
        """
        return self.import_attachment().attach(self._modules, joined, settings)

    @abstractmethod
    def use_cpu(self) -> bool:
        """On a machine without a GPU, make this process train on the CPU.

        Returns:
            Whether the process trains on the CPU.
        """

    @abstractmethod
    def watch(self, watch: Watch) -> None:
        """Let a watch observe the loop, without an attachment.

        Args:
            watch: The observer of the iterations.
        """


class MegatronLm(Loop):
    """Megatron-LM's loop."""

    entry_function, module = "megatron.training's pretrain", "megatron_lm"

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

    entry_function, module = "megatron.bridge's pretrain", "megatron_bridge"

    def use_cpu(self) -> bool:
        from moe_ckpt.integrations import loop_cpu  # noqa: PLC0415

        return loop_cpu.enable(
            self._modules.setup,
            importlib.import_module("megatron.bridge.training.initialize"),
        )

    def watch(self, watch: Watch) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        def iteration_of(*arguments: Any) -> int:
            # `global_state`, by position in `megatron_bridge_seams._STEP`
            return arguments[5].train_state.step + 1

        loop_plain.watch_loop(
            self._modules.pretrain, self._modules.train, iteration_of, watch
        )


class MsSwift(Loop):
    """ms-swift's Megatron trainer."""

    entry_function, module = "ms-swift's MegatronTrainer.train", "ms_swift"

    def use_cpu(self) -> bool:
        from moe_ckpt.standins import gpu  # noqa: PLC0415 - seconds of imports

        return gpu.enable()

    def watch(self, watch: Watch) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        loop_plain.watch_trainer(self._modules.BaseMegatronTrainer, watch)


LOOP_IMPORTS: Mapping[str, Callable[[], Loop]] = {
    "megatron-lm": lambda: MegatronLm(import_training()),
    "megatron-bridge": lambda: MegatronBridge(import_bridge()),
    "ms-swift": lambda: MsSwift(import_swift()),
}
"""Import functions by the names of loops. Each raises ConfigError if the loop is
missing or a seam has moved.
"""
