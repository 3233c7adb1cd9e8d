"""The training loops that `moe_ckpt.run` attaches to, by their names in `--loop`.

Owns: which modules each loop needs, imported when it is chosen. Must not: import any of them before, as each takes
seconds, and a version that does not fit is one error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from moe_ckpt.integrations.megatron_bridge_seams import import_bridge
from moe_ckpt.integrations.megatron_lm_seams import import_training
from moe_ckpt.integrations.ms_swift_seams import import_swift

if TYPE_CHECKING:
    from moe_ckpt.run_elastic import Worker
    from moe_ckpt.run_folder import RunFolder
    from moe_ckpt.run_settings import RunSettings


class Loop(Protocol):
    """A training loop in this process, whose seams are as expected. `entry` names the function that a script calls."""

    entry: str

    def import_attachment(self) -> None:
        """Import all that an attachment needs: workers that are forked later have it."""
        ...

    def use_cpu(self) -> bool:
        """Let the loop start without a GPU, where there is none; return whether there is none."""
        ...

    def attach(self, worker: Worker, settings: RunSettings, folder: RunFolder) -> Any:
        """Return an `Attachment` of this worker's process to the loop."""
        ...

    def observe(self, settings: RunSettings) -> None:
        """Let a run without an attachment log its digests."""
        ...


class MegatronLm:
    """Megatron-LM's loop. Raises ConfigError where it is missing or its seams have moved."""

    entry = "megatron.training's pretrain"

    def __init__(self) -> None:
        self._training: Any = import_training()

    def import_attachment(self) -> None:
        importlib.import_module("moe_ckpt.integrations.megatron_lm")

    def use_cpu(self) -> bool:
        from moe_ckpt.integrations import loop_cpu  # noqa: PLC0415 - seconds of imports

        return loop_cpu.enable(self._training, importlib.import_module("megatron.core.datasets.utils"))

    def attach(self, worker: Worker, settings: RunSettings, folder: RunFolder) -> Any:
        from moe_ckpt.integrations import megatron_lm  # noqa: PLC0415

        return megatron_lm.attach_to_training(self._training, worker, settings, folder)

    def observe(self, settings: RunSettings) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        loop_plain.observe(self._training, self._training, lambda *_, iteration, **__: iteration + 1, settings)


class MegatronBridge:
    """Megatron-Bridge's loop. Raises ConfigError where it is missing or its seams have moved."""

    entry = "megatron.bridge's pretrain"

    def __init__(self) -> None:
        self._bridge = import_bridge()

    def import_attachment(self) -> None:
        importlib.import_module("moe_ckpt.integrations.megatron_bridge")

    def use_cpu(self) -> bool:
        from moe_ckpt.integrations import loop_cpu  # noqa: PLC0415

        return loop_cpu.enable(self._bridge.setup, importlib.import_module("megatron.bridge.training.initialize"))

    def attach(self, worker: Worker, settings: RunSettings, folder: RunFolder) -> Any:
        from moe_ckpt.integrations import megatron_bridge  # noqa: PLC0415

        return megatron_bridge.attach_to_bridge(self._bridge, worker, settings, folder)

    def observe(self, settings: RunSettings) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        def iteration_of(*arguments: Any) -> int:
            return arguments[5].train_state.step + 1

        loop_plain.observe(self._bridge.pretrain, self._bridge.train, iteration_of, settings)


class MsSwift:
    """ms-swift's Megatron trainer. Raises ConfigError where it is missing or its seams have moved."""

    entry = "ms-swift's MegatronTrainer.train"

    def __init__(self) -> None:
        self._swift = import_swift()

    def import_attachment(self) -> None:
        importlib.import_module("moe_ckpt.integrations.ms_swift")

    def use_cpu(self) -> bool:
        from moe_ckpt.megatron import cpu_stand_in  # noqa: PLC0415 - seconds of imports

        return cpu_stand_in.enable()

    def attach(self, worker: Worker, settings: RunSettings, folder: RunFolder) -> Any:
        from moe_ckpt.integrations import ms_swift  # noqa: PLC0415

        return ms_swift.attach_to_swift(self._swift, worker, settings, folder)

    def observe(self, settings: RunSettings) -> None:
        from moe_ckpt.integrations import loop_plain  # noqa: PLC0415

        loop_plain.observe_trainer(self._swift.base.BaseMegatronTrainer, settings)


LOOPS: Mapping[str, Callable[[], Loop]] = {
    "megatron-lm": MegatronLm,
    "megatron-bridge": MegatronBridge,
    "ms-swift": MsSwift,
}
