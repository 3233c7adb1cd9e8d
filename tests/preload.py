"""What the fork server imports once: everything slow that a rank needs.

Hydra builds its parsers when it first composes; ranks inherit them.
"""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401

    import launcher.entry  # noqa: F401
    from launcher.config import compose_settings

    compose_settings(())

gc.freeze()
