"""The runs about partial checkpoints: policies, settings and faults. Pure.

All runs but the references have the same four faults.
"""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS = 400
PLT_LIMIT = 0.0375


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A run."""

    name: str
    """Name of the run."""

    reference: str | None
    """Name of the run without faults that trains the same model.

    None: this run is a reference itself, and has no faults.
    """

    overrides: tuple[str, ...]
    """Settings of the launcher."""


NONE, NUDGED, NUDGED_MORE, OTHER_SEED = (
    "none",
    "none, nudged",
    "none, nudged more",
    "none, second seed",
)
GEMINI, MOEVEMENT = "gemini", "moevement"
MOC, MOC_LOAD = "moc", "moc, load-aware"
MOC_FOURTH, MOC_FOURTH_DYNAMIC = "moc, every 4", "moc, every 4, Dynamic-K"
MOC_SELDOM, MOC_SELDOM_DYNAMIC = "moc, seldom", "moc, seldom, Dynamic-K"
LIMITED, MOETION, MOETION_BOOST = "none, limited capacity", "moetion", "moetion, boost"

_CAPACITY = ("model.moe_capacity_factor=1.0",)
_MOC = ("ckpt=moc", "ckpt.k_persist=1", "ckpt.dynamic_k=false")
_OFTEN, _FOURTH = ("ckpt.k_snapshot=2",), ("ckpt.k_snapshot=2", "ckpt.every_iters=4")
_SELDOM = ("ckpt.k_snapshot=1", "ckpt.every_iters=8")
_DYNAMIC = "ckpt.dynamic_k=true"
_MOETION = ("ckpt=moetion", "ckpt.experts=2", "ckpt.remote_experts=1", *_CAPACITY)
VARIANTS = (
    Variant(name=NONE, reference=None, overrides=("ckpt=none",)),
    Variant(
        name=GEMINI, reference=NONE, overrides=("ckpt=gemini", "ckpt.every_iters=8")
    ),
    Variant(
        name=MOEVEMENT, reference=NONE, overrides=("ckpt=moevement", "ckpt.window=4")
    ),
    Variant(name=MOC, reference=NONE, overrides=(*_MOC, *_OFTEN)),
    Variant(
        name=MOC_LOAD, reference=NONE, overrides=(*_MOC, *_OFTEN, "ckpt.selection=load")
    ),
    Variant(name=MOC_FOURTH, reference=NONE, overrides=(*_MOC, *_FOURTH)),
    Variant(
        name=MOC_FOURTH_DYNAMIC, reference=NONE, overrides=(*_MOC, *_FOURTH, _DYNAMIC)
    ),
    Variant(name=MOC_SELDOM, reference=NONE, overrides=(*_MOC, *_SELDOM)),
    Variant(
        name=MOC_SELDOM_DYNAMIC, reference=NONE, overrides=(*_MOC, *_SELDOM, _DYNAMIC)
    ),
    Variant(name=LIMITED, reference=None, overrides=("ckpt=none", *_CAPACITY)),
    Variant(name=MOETION, reference=LIMITED, overrides=(*_MOETION, "ckpt.boost=0.0")),
    Variant(
        name=MOETION_BOOST, reference=LIMITED, overrides=(*_MOETION, "ckpt.boost=0.10")
    ),
    Variant(
        name=NUDGED, reference=None, overrides=("ckpt=none", "train.adam_eps=1.1e-8")
    ),
    Variant(
        name=NUDGED_MORE,
        reference=None,
        overrides=("ckpt=none", "train.adam_eps=1.2e-8"),
    ),
    Variant(name=OTHER_SEED, reference=None, overrides=("ckpt=none", "train.seed=2")),
)
COMMON = (
    "model.num_layers=2",
    "train.micro_batch_size=8",
    "train.eval_every_iters=10",
    "run.tensorboard=false",
    "run.progress=none",
    # on a machine with other users a process may wait for a CPU
    "runtime.heartbeat_s=20",
)


def faults(iterations: int) -> list[str]:
    """Return the settings of four kills, a fifth of the run apart.

    Each kill comes just before an evaluation. One kill takes a node with its memory.

    Args:
        iterations: The iterations of the run.
    """
    at = [iterations * fifth // 5 for fifth in range(1, 5)]
    kills = (
        f"{{iteration:{at[0]},rank:2,phase:backward}}",
        f"{{iteration:{at[1]},rank:0,phase:forward}}",
        f"{{iteration:{at[2]},rank:3,scope:node}}",
        f"{{iteration:{at[3]},rank:1,phase:step}}",
    )
    return ["fault=at", f"fault.at=[{','.join(kills)}]"]
