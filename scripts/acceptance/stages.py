"""The stages of the acceptance of a GPU, each of which returns a line of figures.

A stage that fails raises AssertionError. The reference of a stage is a run without
checkpoints, made once for a model and a kind of ranks. Stages that run at the same time
wait for the stage that makes the reference.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from launcher.overrides import last_values

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The device and the size of the model of all stages."""

    on_gpu: bool
    """Whether stages run on a GPU; otherwise on a CPU."""

    out: Path
    """Folder of logs and runs."""

    is_small: bool
    """Whether the model is small, with the code paths of one that keeps a GPU busy."""

    @property
    def model(self) -> tuple[str, ...]:
        """Settings of the model."""
        if not self.is_small:
            return (
                "model=gpu_small",
                "train.sequence_length=1024",
                "train.lr=3.0e-4",
                "train.min_lr=3.0e-5",
            )
        return (
            "model=tiny",
            "model.num_layers=2",
            "train.sequence_length=16",
            "train.lr=1.0e-3",
        )

    @property
    def iterations(self) -> int:
        return 12 if self.is_small else 30


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the acceptance."""

    run: Callable[[Scale], str]
    """Work of the stage; returns a line of figures."""

    limit_s: float
    """Time limit of `run`, in seconds."""

    proves: str
    """Facts that the stage proves, for tables."""

    is_alone: bool = False
    """Whether no other stage may run at the same time."""

    num_gpus: int = 1
    """Number of GPUs; by default, a GPU machine with fewer leaves the stage out."""


def _facts(scale: Scale) -> str:
    # imported here, so that stages that need no torch start without torch
    from scripts.acceptance import facts  # noqa: PLC0415

    return facts.measure(on_gpu=scale.on_gpu)


def _unit(scale: Scale) -> str:
    """Run the tests that are marked `gpu`, or their twins without a GPU.

    Only in folders whose tests need no browser.
    """
    twins = (
        "tests/elastic/test_backends.py",
        "tests/elastic/test_staged_group.py",
        "tests/snapshot/test_copier.py",
    )
    folders = ("tests/elastic", "tests/megatron", "tests/snapshot")
    files = (
        ("-m", "gpu", *folders)
        if scale.on_gpu
        else ("-m", "not gpu and not chaos", *twins)
    )
    return _pytest(*files)


def _twice(scale: Scale) -> str:
    """Train twice in each precision without checkpoints, and compare the digests.

    Logs have the warnings about kernels that do not repeat their results.
    """
    precisions = ("fp32", "bf16", "fp16") if scale.on_gpu else ("fp32", "bf16")

    def train(precision: str) -> str:
        first, second = (
            _train(
                scale,
                f"twice-{precision}-{number}",
                1,
                "+ckpt=none",
                f"precision={precision}",
            )
            for number in (1, 2)
        )
        assert first["digest"] == second["digest"], (
            f"{precision}: got two states, wanted one: {first} {second}"
        )
        return f"{precision} {first['digest'][:8]}"

    with ThreadPoolExecutor(max_workers=len(precisions) if scale.on_gpu else 1) as pool:
        found = list(pool.map(train, precisions))
    return f"{scale.iterations} iterations, each twice: {', '.join(found)}"


def _snapshots(scale: Scale) -> str:
    """Compare snapshots with copies on the device, then lose state in each phase."""
    plain = _reference(scale, 1)
    program = ("scripts/acceptance/compare_snapshots.py",)
    compared = _train(
        scale, "compared", 1, "+ckpt=moevement", "ckpt.window=3", program=program
    )
    assert compared["digest"] == plain["digest"], (
        f"with snapshots: got {compared['digest']}, wanted {plain['digest']}"
    )
    points = ",".join(
        f"{{iteration: {4 + 2 * number}, stage: 0, phase: {phase}}}"
        for number, phase in enumerate(("forward", "backward", "step", "between"))
    )
    lost = _train(
        scale,
        "lost",
        1,
        "+ckpt=moevement",
        "ckpt.window=2",
        "runtime.guard=false",
        "fault=state_loss",
        f"fault.at=[{points}]",
    )
    assert lost["digest"] == plain["digest"], (
        f"after losses: got {lost['digest']}, wanted {plain['digest']}"
    )
    said = (scale.out / "compared.log").read_text().splitlines()
    counted = next(line for line in reversed(said) if line.startswith("compared"))
    return f"{counted}; state lost in 4 phases: the same digest {plain['digest'][:8]}"


def _kill(scale: Scale) -> str:
    plain = _reference(scale, 1)
    points = [
        ("backward", "KILL"),
        ("step", "KILL"),
        ("snapshot", "KILL"),
        ("forward", "STOP"),
    ]
    killed = _train(
        scale,
        "killed",
        1,
        "+ckpt=moevement",
        "ckpt.window=2",
        *_kills([(0, *point) for point in points]),
    )
    return _as_before(killed, plain, len(points), scale.out / "killed")


# Transformer Engine's FP8 matrix products need multiples of 16, and its blocks of
# weights have 128 by 128 elements
_FORMATS_MODEL = (
    "model.hidden_size=128",
    "model.moe_ffn_hidden_size=256",
    "model.num_layers=2",
)
_FORMATS = {
    "fp16_fp16_fp16": ("precision=fp16_fp16_fp16",),
    "bf16-remainder": ("precision=bf16", "precision.master=remainder"),
    "fp8_fp32_fp32": ("precision=fp8_fp32_fp32",),
    "fp8-tensorwise-gather": (
        "precision=fp8_fp32_fp32",
        "precision.fp8_param_gather=true",
    ),
    "fp8-blockwise-gather": (
        "precision=fp8_fp32_fp32",
        "precision.fp8_recipe=blockwise",
        "precision.fp8_param_gather=true",
    ),
    "fp8-delayed-gather": (
        "precision=fp8_fp32_fp32",
        "precision.fp8_recipe=delayed",
        "precision.fp8_param_gather=true",
    ),
    "fp8_fp16_fp32": ("precision=fp8_fp16_fp32", "precision.fp8_recipe=delayed"),
    "fp8_fp16_fp8": ("precision=fp8_fp16_fp8", "precision.fp8_recipe=delayed"),
}


def _formats(scale: Scale) -> str:
    """Kill a worker in each number format, with several formats at a time.

    Raises:
        AssertionError: A format failed; the message names all failed formats.
    """
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    assert has_engine or not scale.on_gpu, (
        "Transformer Engine: not installed, wanted for number formats on a GPU"
    )
    with ThreadPoolExecutor(max_workers=4 if scale.on_gpu else 1) as pool:
        said = dict(
            zip(
                _FORMATS,
                pool.map(lambda name: _one_format(scale, name), _FORMATS),
                strict=True,
            )
        )
    failed = [f"{name}: {error}" for name, error in said.items() if error is not None]
    assert not failed, (
        f"{len(failed)} of {len(said)} formats failed: {'; '.join(failed)}"
    )
    return f"workers killed twice, the same digests: {', '.join(said)}"


def _one_format(scale: Scale, name: str) -> str | None:
    """Return the error of a format; None if the format works.

    An evaluation lies between an iteration and the next kill.
    """
    settings = (*_FORMATS[name], *_FORMATS_MODEL, "train.eval_every_iters=2")
    kills = _kills([(0, "backward", "KILL"), (0, "step", "KILL")])
    try:
        plain = _train(scale, f"{name}-plain", 1, "+ckpt=none", *settings)
        killed = _train(
            scale,
            f"{name}-killed",
            1,
            "+ckpt=moevement",
            "ckpt.window=2",
            *settings,
            *kills,
        )
        _as_before(killed, plain, 2, scale.out / f"{name}-killed")
    except (AssertionError, OSError, ValueError) as error:
        return " ".join(str(error).split())[-400:]
    return None


@dataclass(frozen=True, kw_only=True)
class Ranks4:
    """Communication and layout of four ranks."""

    name: str
    """Name of the kind of ranks, for run folders."""

    backend: str = "auto"
    """`runtime.backend`; without a GPU, auto is gloo."""

    share_gpus: bool = False
    """Whether NCCL takes the ranks for ranks of different hosts.

    So one GPU is enough.
    """

    tp: int = 1
    """Degree of tensor parallelism, with sequence parallelism in MoE layers.

    1: EP=2 and DP=2 instead.
    """

    def settings(self, scale: Scale) -> tuple[str, ...]:
        """Return the settings of the launcher."""
        found = [f"runtime.backend={self.backend}"]
        if self.share_gpus and scale.on_gpu:
            found.append("runtime.share_gpus=true")
        if self.tp > 1:
            found += ["parallel.pp=2", f"parallel.tp={self.tp}"]
            if not scale.on_gpu:
                # a dense model: Megatron's MoE layers with TP need Transformer Engine
                found.append("model.num_experts=0")
        return tuple(found)


def _ranks4(scale: Scale, ranks: Ranks4) -> str:
    """Train with PP=2, EP=2 and DP=2 under three policies."""
    plain = _reference(scale, 4, ranks.name, *ranks.settings(scale))
    for policy in ("moevement", "gemini"):
        found = _train(
            scale,
            f"{ranks.name}-{policy}",
            4,
            f"+ckpt={policy}",
            *ranks.settings(scale),
        )
        assert found["digest_per_rank"] == plain["digest_per_rank"], (
            f"{policy}: another state than without checkpoints"
        )
    return (
        f"none, moevement, gemini: digest {plain['digest'][:8]} on 4 ranks,"
        f" {' '.join(ranks.settings(scale))}"
    )


def _ranks4kill(scale: Scale, ranks: Ranks4) -> str:
    settings = ranks.settings(scale)
    plain = _reference(scale, 4, ranks.name, *settings)
    points = [
        (2, "backward", "KILL"),
        (1, "reduce", "KILL"),
        (3, "step", "KILL"),
        (0, "forward", "STOP"),
    ]
    name = f"{ranks.name}-killed"
    killed = _train(
        scale, name, 4, "+ckpt=moevement", "ckpt.window=2", *settings, *_kills(points)
    )
    return _as_before(killed, plain, len(points), scale.out / name)


def _fp8cast(scale: Scale) -> str:
    files = ("-m", "gpu") if scale.on_gpu else ("-m", "not gpu and not chaos")
    from scripts.acceptance import facts  # noqa: PLC0415

    return (
        f"{_pytest(*files, 'tests/standins/test_precision_adam.py')};"
        f" {facts.scaled_matmul(on_gpu=scale.on_gpu)}"
    )


def _perf(scale: Scale) -> str:
    """Compare times of iterations without checkpoints and with several windows.

    Windows have 1, 3 and 6 slots; 1 and 3 with a small model.
    """
    windows = (1, 3) if scale.is_small else (1, 3, 6)
    _train(scale, "perf-none", 1, "+ckpt=none")
    plain_s = _iteration_s(scale.out / "perf-none")
    found = [f"none {plain_s * 1e3:.1f} ms"]
    for window in windows:
        name = f"perf-{window}"
        _train(
            scale,
            name,
            1,
            "+ckpt=moevement",
            f"ckpt.window={window}",
            "runtime.guard=false",
        )
        copies = [
            event
            for event in _events(scale.out / name, "SnapshotTaken")
            if event.copy_s > 0
        ]
        rate = median(event.size_bytes / event.copy_s for event in copies) / 1e9
        stall_s = sum(
            event.stall_s for event in _events(scale.out / name, "IterationCommitted")
        )
        ratio = _iteration_s(scale.out / name) / plain_s
        found.append(
            f"W={window} {ratio:.3f} of it, stall {stall_s:.2f} s, copies {rate:.2f}"
            " GB/s"
        )
    return "; ".join(found)


_STAGED = Ranks4(name="staged4", backend="staged")
_ONE_GPU = Ranks4(name="onegpu4", share_gpus=True)
_NCCL = Ranks4(name="nccl4")

STAGES = {
    "facts": Stage(
        run=_facts,
        limit_s=120,
        proves="workers can be forked; rates of copies and hashes",
        is_alone=True,
    ),
    "unit": Stage(
        run=_unit,
        limit_s=400,
        proves="A1, NCCL's interface, no leak over 50 groups",
        is_alone=True,
    ),
    "twice": Stage(
        run=_twice, limit_s=600, proves="training repeats itself bit for bit (A13)"
    ),
    "snapshots": Stage(
        run=_snapshots,
        limit_s=600,
        proves="no race in copies to the host; exact replay",
    ),
    "kill": Stage(
        run=_kill, limit_s=400, proves="a fork after CUDA, memory given back, adoption"
    ),
    "formats": Stage(
        run=_formats,
        limit_s=600,
        proves="exact replay in number formats of Transformer Engine",
    ),
    "ranks4": Stage(
        run=partial(_ranks4, ranks=_STAGED),
        limit_s=600,
        proves="PP, EP and DP with 4 ranks on one device",
    ),
    "ranks4kill": Stage(
        run=partial(_ranks4kill, ranks=_STAGED),
        limit_s=600,
        proves="recovery beside survivors that hold the device (A4)",
    ),
    "ranks4tp": Stage(
        run=partial(_ranks4kill, ranks=replace(_STAGED, name="staged4tp", tp=2)),
        limit_s=600,
        proves="recovery with TP and sequence parallelism",
    ),
    "onegpu4": Stage(
        run=partial(_ranks4, ranks=_ONE_GPU),
        limit_s=600,
        proves="NCCL between 4 ranks that share a GPU",
        is_alone=True,
    ),
    "onegpu4kill": Stage(
        run=partial(_ranks4kill, ranks=_ONE_GPU),
        limit_s=600,
        proves="NCCL's abort, and groups formed anew, by ranks that share a GPU",
        is_alone=True,
    ),
    "onegpu4tp": Stage(
        run=partial(_ranks4kill, ranks=replace(_ONE_GPU, name="onegpu4tp", tp=2)),
        limit_s=600,
        proves="the same with TP and sequence parallelism",
        is_alone=True,
    ),
    "nccl4": Stage(
        run=partial(_ranks4, ranks=_NCCL),
        limit_s=600,
        proves="NCCL between 4 ranks (N2, N3)",
        num_gpus=4,
    ),
    "nccl4kill": Stage(
        run=partial(_ranks4kill, ranks=_NCCL),
        limit_s=600,
        proves="NCCL's abort, and groups formed anew (N1 to N12)",
        num_gpus=4,
    ),
    "fp8cast": Stage(
        run=_fp8cast, limit_s=200, proves="number formats on this device as on a CPU"
    ),
    "perf": Stage(
        run=_perf, limit_s=600, proves="the price of snapshots", is_alone=True
    ),
}


def _reference(
    scale: Scale, num_ranks: int, kind: str = "alone", *settings: str
) -> dict[str, Any]:
    """Return the result of a run without checkpoints, made once for each kind of ranks.

    Args:
        scale: The device and the model.
        num_ranks: The number of ranks.
        kind: The name of the kind of ranks.
        settings: Further settings of the run.
    """
    name = f"plain-{kind}"
    path = scale.out / name / "result.json"
    with _alone(scale.out / f"{name}.lock"):
        if (
            path.exists()
            and _described_by(scale, name)
            == (scale.out / f"{name}.command").read_text()
        ):
            return json.loads(path.read_text())
        return _train(scale, name, num_ranks, "+ckpt=none", *settings)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Run the block while no other stage runs a block with the same lock file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _described_by(scale: Scale, name: str) -> str:
    """Return a description of all that a run depends on.

    A reference of another model or commit is made again. Uncommitted code is described
    by the pid of the parent process of all stages, so a reference with such code is
    valid within one call of the script only.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    has_git = shutil.which(command[0]) is not None
    commit = (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
        if has_git
        else ""
    )
    code = (
        f"process {os.getppid()}"
        if not commit or commit.strip().endswith("-dirty")
        else commit.strip()
    )
    return f"{name} {scale.model} {scale.iterations} {code}"


def _train(
    scale: Scale,
    name: str,
    num_ranks: int,
    *settings: str,
    program: Sequence[str] = ("launcher/train.py",),
) -> dict[str, Any]:
    """Run a job of torchrun and return the content of its result.json.

    Args:
        scale: The device and the model.
        name: The name of the run folder and of the log.
        num_ranks: The number of ranks.
        settings: Further settings of the launcher.
        program: The program that torchrun starts.

    Raises:
        AssertionError: The job failed; with the end of the log.
    """
    folder, log = scale.out / name, scale.out / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    (scale.out / f"{name}.command").write_text(_described_by(scale, name))
    # with an address, because the host's name may be unknown
    agent = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    command = [sys.executable, *agent, f"--nproc-per-node={num_ranks}", *program]
    common = (
        *(
            f"run.dir={folder}",
            f"train.iterations={scale.iterations}",
            "train.eval_batches=1",
            "run.progress=none",
        ),
        *("train.eval_every_iters=0", "run.tensorboard=false"),
    )
    hidden = {} if scale.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**_environment(), "OMP_NUM_THREADS": "1", **hidden}
    with log.open("w") as said:
        ended = subprocess.run(
            [*command, *last_values([*scale.model, *common, *settings])],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert ended.returncode == 0, (
        f"{name}: status {ended.returncode}: {log.read_text()[-2000:]}"
    )
    return json.loads((folder / "result.json").read_text())


def _environment() -> dict[str, str]:
    """Return this process's environment, with the checkout first in PYTHONPATH."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _kills(points: Sequence[tuple[int, str, str]]) -> tuple[str, ...]:
    """Return the settings of faults that are two iterations apart.

    Args:
        points: The faults, each as (rank, phase, signal).
    """
    entries = (
        f"{{iteration: {3 + 2 * number}, rank: {rank}, phase: {phase}, signal: {name}}}"
        for number, (rank, phase, name) in enumerate(points)
    )
    return ("fault=at", f"fault.at=[{', '.join(entries)}]")


def _as_before(
    killed: dict[str, Any], plain: dict[str, Any], num_faults: int, run: Path
) -> str:
    assert killed["faults_survived"] == num_faults, (
        f"faults: got {killed['faults_survived']}, wanted {num_faults}"
    )
    assert killed["digest_per_rank"] == plain["digest_per_rank"], (
        "another state than without faults"
    )
    rejoined = _events(run, "Rejoined")[-num_faults:]
    took = median(
        event.detect_s + event.rebuild_s + event.fetch_s + event.replay_s
        for event in rejoined
    )
    return (
        f"{num_faults} faults, back after {took:.2f} s (median): the same digest"
        f" {plain['digest'][:8]}"
    )


def _iteration_s(run: Path) -> float:
    """Return the median time of an iteration in seconds, without the first quarter."""
    seconds = [event.seconds for event in _events(run, "IterationCommitted")]
    return median(seconds[len(seconds) // 4 :])


def _events(run: Path, kind: str) -> list[Any]:
    """Return all events of a kind of rank 0."""
    from moe_ckpt.events import read_events  # noqa: PLC0415

    logged = read_events(run / "events" / "rank0000.jsonl")
    return [entry.event for entry in logged if type(entry.event).__name__ == kind]


def _pytest(*arguments: str) -> str:
    """Run tests in a separate process and return pytest's last line, with counts.

    Raises:
        AssertionError: A test failed.
    """
    options = ("-o", "addopts=", "--strict-markers", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *options, *arguments]
    # temporary folders in memory: CUDA may refuse to pin a file of an ordinary file
    # system
    in_memory = {"PYTEST_DEBUG_TEMPROOT": "/dev/shm"}
    environment = {**_environment(), **(in_memory if "gpu" in arguments else {})}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(ended.stdout)
    last = (
        ended.stdout.strip().splitlines()[-1]
        if ended.stdout.strip()
        else ended.stderr[-500:]
    )
    assert ended.returncode == 0, f"pytest {' '.join(arguments)}: {last}"
    return last.strip("= ")
