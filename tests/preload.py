"""Imports of the fork server: everything slow that a rank needs, imported once.

Hydra builds parsers when Hydra first composes settings; ranks inherit the parsers.
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
