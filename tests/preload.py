"""What the fork server imports once: everything slow that a rank needs."""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    import launcher.entry  # noqa: F401

gc.freeze()
