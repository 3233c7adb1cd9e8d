"""What the fork server imports once: everything slow that a rank needs.

Megatron asks torch's compiler, in its first iteration, which of thousands of functions it may trace; Hydra builds its
parsers when it first composes. Ranks inherit both.
"""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    import launcher.entry  # noqa: F401
    from launcher.config import compose_settings

    get_torch_obj_rule_map()
    compose_settings(())

gc.freeze()
