"""Simulations from the command line: results, experiments, plans and run folders.

The page of published results is covered, too.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

import pytest

from launcher.cluster_profile import main as profile
from launcher.config import compose_settings
from launcher.job_checks import require_servable
from launcher.simulate import main
from launcher.simulator.comparison import compare
from launcher.simulator.config import (
    ExperimentConfig,
    compose_machine,
    compose_request,
    compose_simulation,
)
from launcher.simulator.plan_lines import is_tied, plan_lines
from launcher.simulator.planning import Candidate, command_of, rank_policies
from launcher.simulator.published_page import (
    METRICS,
    NEAR,
    OWN_RUNS,
    compare_cells,
    read_cells,
    write_page,
)
from launcher.simulator.real_run import facts_of, read_run
from launcher.simulator.run_folder import write_run
from launcher.simulator.runner import latest, run_experiment, run_simulation
from launcher.simulator.servers_page import simulate_case
from moe_ckpt.events import IterationCommitted, read_events

SMALL = (
    "model=tiny",
    "cluster=local",
    "parallel.pp=2",
    "batch.global_batch_size=16",
    "duration_s=2000",
)


@cache
def requested(name: str) -> ExperimentConfig:
    return compose_request([f"experiment={name}"])[1]


@pytest.mark.parametrize(
    ("policy", "memory"),
    [("ckpt=dense", "-"), ("ckpt=gemini", "0.0"), ("ckpt=moc", "0.0")],
)
def test_a_result_is_printed_and_unknown_memory_is_not_called_zero(
    policy: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, policy, "mtbf_s=300", "runs=2", "timing.iteration_s=2"]) == 0
    said = capsys.readouterr().out
    assert "PP=2 DP=2 EP=1 TP=1 on local, 2 micro-batches" in said
    assert "ETTR " in said
    (line,) = [line for line in said.splitlines() if line.startswith("host memory")]
    assert line.split()[2].startswith(memory)
    assert line.split()[2] != "0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cluster.nodes=0"], "cluster.nodes: got 0, wanted more than 0\n"),
        (["plan=true"], "mtbf_s: got None, wanted"),
        (["real=."], "real: '.' is not the folder of a run"),
        ([*SMALL, "timing.iteration_s=5", "out=."], "out: got "),
        (
            [
                *SMALL,
                "timing.iteration_s=1e-4",
                "cluster.take_s=0",
                "cluster.interference=0",
                "out=new",
            ],
            (
                "out: got 'about 48150576 of 4 ranks', wanted a run of at most 2000000"
                " events"
            ),
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "something").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1


def test_a_later_override_counts_and_keys_stand_for_values() -> None:
    assert latest(["a=1", "b=$mtbf_s", "+a=2", "mtbf_s=600"]) == [
        "+a=2",
        "b=600",
        "mtbf_s=600",
    ]


# docs/simulator.md says why the windows of other cases are not compared
WINDOWS = {"GPT-MoE": 3, "DeepSeek-MoE": 6}
FIRST = ("GPT-MoE", "DeepSeek-MoE", "FP8/FP8/FP8+FP16")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if case in FIRST else pytest.mark.full)
        for name in ("table3", "table7")
        for case in requested(name).cases
    ],
)
def test_the_published_ettrs_and_windows_of_moevement_are_met(
    name: str, case: str
) -> None:
    """Covers all cells of Tables 3 and 7 that benchmarks/published.csv has.

    One set of constants for each cluster predicts all of these cells.
    """
    cells = [
        cell
        for cell in read_cells()
        if (cell.experiment, cell.case, cell.policy) == (name, case, "MoEvement")
    ]
    ettrs = [
        cell
        for cell in cells
        if cell.metric == "ettr" and cell.source.startswith("Table")
    ]
    rows = list(
        run_experiment(
            [f"experiment={name}", "runs=6"], policies=["MoEvement"], cases=[case]
        )
    )
    deviations = {one.cell.variant: one.deviation for one in compare_cells(ettrs, rows)}
    assert len(deviations) == len(ettrs) > 0
    assert {
        variant: deviation
        for variant, deviation in deviations.items()
        if abs(deviation) > NEAR
    } == {}
    if case in WINDOWS:  # windows follow from Algorithm 1
        assert {row.result.saving.settled.repeat[0].num_slots for row in rows} == {
            WINDOWS[case]
        }


def test_the_tables_have_24_ettr_cells_of_moevement() -> None:
    cells = [
        cell
        for cell in read_cells()
        if (cell.policy, cell.metric) == ("MoEvement", "ettr")
    ]
    assert (
        sum(
            cell.source.startswith("Table") and cell.experiment in ("table3", "table7")
            for cell in cells
        )
        == 24
    )


def torchrun_restarts(candidate: Candidate) -> None:
    """Check that no spare node takes ranks of a lost one in the candidate's job."""
    words = command_of(candidate, [])
    script = words.index("launcher/train.py")
    assert {"--nnodes=3:3", "--max-restarts=10", "--rdzv-backend=c10d"} < set(
        words[:script]
    )
    assert compose_settings(words[script + 1 :]).job.runtime.spare_nodes == 0


def test_policies_are_ranked_by_ettr_and_the_best_has_its_command() -> None:
    machine = [
        "cluster=h200",
        "cluster.nodes=3",
        "cluster.gpus_per_node=2",
        "cluster.host_memory_bytes=1e9",
    ]
    job = ["model=tiny", "model.init_std=0.01", "timing.iteration_s=2"]
    arguments = [*machine, *job, "mtbf_s=60", "duration_s=600", "runs=1"]
    told: list[str] = []
    candidates = rank_policies(arguments, told.append)
    number = len(candidates)
    assert [line.partition(": ")[0] for line in told] == [
        f"{n} of {number}" for n in range(1, number + 1)
    ]
    assert {line.partition(": ")[2] for line in told} == {
        " ".join(candidate.overrides) for candidate in candidates
    }
    ettrs = [
        candidate.result.prediction.ettr for candidate in candidates if candidate.result
    ]
    assert ettrs == sorted(ettrs, reverse=True)
    assert len(set(ettrs)) > 5
    possible, refused = candidates[: len(ettrs)], candidates[len(ettrs) :]
    assert all(candidate.result for candidate in possible), "what cannot be had is last"
    assert {override for candidate in possible for override in candidate.overrides} >= {
        "ckpt=none",
        "ckpt=checkfreq",
        "ckpt=moevement",
        "ckpt.replicas=2",
        "ckpt=flowcheck",
        "ckpt.capture=mirror",
        "ckpt=moc",
        "ckpt=moetion",
    }
    assert refused
    assert all(
        candidate.refusal.startswith("cluster.host_memory_bytes: got ")
        for candidate in refused
    )
    best = next(candidate for candidate in possible if candidate.is_lossless)
    words = command_of(best, arguments)
    script = words.index("launcher/train.py")
    assert words[1:script] == [
        "--nnodes=11",
        "--node-rank=$NODE_RANK",
        "--master-addr=$HOST",
        "--master-port=29500",
        "--nproc-per-node=2",
    ]
    settings = compose_settings(words[script + 1 :])
    assert (
        settings.model.init_std,
        settings.parallel.ep,
        settings.train.global_batch_size,
        settings.job.runtime.spare_nodes,
    ) == (0.01, 2, 512, 8)
    torchrun_restarts(
        next(each for each in possible if each.overrides == ("ckpt=none",))
    )
    alone = [*arguments, "ckpt=moevement", "cluster.spares=0"]
    result = run_simulation(compose_simulation(alone))
    torchrun_restarts(Candidate(overrides=("ckpt=moevement",), result=result))
    mirror = next(
        candidate
        for candidate in possible
        if "ckpt.capture=mirror" in candidate.overrides
    )
    words_of_mirror = command_of(mirror, arguments)
    mirrored = compose_settings(
        words_of_mirror[words_of_mirror.index("launcher/train.py") + 1 :]
    )
    require_servable(mirrored)
    assert not mirrored.train.distributed_optimizer
    text = "\n".join(plan_lines(candidates, arguments))
    assert "tiny on 3 nodes of 2 GPUs (h200), " in text
    assert "A node is lost every 60 s on average; mean of 1 runs of 0.167 h, " in text
    assert "The last 8 of 11 nodes are spare ones; $NODE_RANK is a" in text
    table, _, command = text.partition("as a command for each node:")
    assert shlex.split(command.replace("\\\n", " ")) == words
    groups = [line for line in table.splitlines() if line.endswith(":")]
    assert groups == [
        "The best, and policies that these runs do not tell from it:",
        "The others:",
        "Not possible here:",
    ]


@pytest.mark.parametrize(
    ("case", "best"),
    [
        ("1 GB/s", "servers, mirror"),
        ("25 GB/s a GPU", "sparse windows"),
        ("1 GB/s, EP = DP", "sparse windows"),
        pytest.param(
            "1 GB/s, a quarter of the processors",
            "sparse windows",
            marks=pytest.mark.full,
        ),
    ],
)
def test_servers_beat_windows_in_the_regime_that_the_page_names(
    case: str, best: str
) -> None:
    named = ("sparse windows", "servers, tap", "servers, mirror")
    ettrs = {
        each: simulate_case(case, each, 7200, ["runs=1"]).prediction.ettr
        for each in named
    }
    assert max(ettrs, key=lambda each: ettrs[each]) == best


@pytest.mark.parametrize(
    ("best", "other", "tied"),
    [
        # the other policy is always a little worse, under the same faults
        ([0.9, 0.8, 0.7], [0.89, 0.79, 0.69], False),
        ([0.9, 0.8, 0.7], [0.8, 0.9, 0.6], True),
        ([0.9, 0.8, 0.7], [0.9, 0.8, 0.7], True),
        ([0.9], [0.89], False),
        ([0.9], [0.9], True),
    ],
)
def test_policies_are_told_apart_run_by_run(
    best: list[float], other: list[float], tied: bool
) -> None:
    assert is_tied(best, other) == tied


def test_a_simulated_run_leaves_a_folder_as_a_real_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert (
        main(
            [
                *SMALL,
                "mtbf_s=300",
                "scope=process",
                "runs=1",
                "timing.iteration_s=5",
                f"out={folder}",
            ]
        )
        == 0
    )
    described = json.loads((folder / "run.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    assert described["world_size"] == 4
    assert 0 < result["ettr"] < 1
    for rank in range(4):
        events = [
            logged.event
            for logged in read_events(folder / "events" / f"rank{rank:04d}.jsonl")
        ]
        commits = [
            event.iteration for event in events if isinstance(event, IterationCommitted)
        ]
        assert commits[-1] == result["iteration"]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the settings of a real run and simulated events."""
    folder, ckpt = (
        tmp_path_factory.mktemp("real") / "run",
        ("ckpt.replicas=1", "ckpt.window=3"),
    )
    job = ("timing.iteration_s=5", "batch.sequence_length=64", "parallel.ep=2")
    faults = ("fault=at", "fault.at=[{iteration: 12, rank: 2, phase: backward}]")
    write_run(
        folder, run_simulation(compose_simulation([*SMALL, *ckpt, *job, *faults]))
    )
    settings = compose_settings(
        ["+ckpt=moevement", *ckpt, "train.global_batch_size=16"]
    )
    (folder / "config.yaml").write_text(settings.composed_yaml)
    injected = {
        "unix_s": 0,
        "rank": 2,
        "pid": 1,
        "signal": "KILL",
        "scope": "process",
        "generation": 1,
    }
    (folder / "faults.jsonl").write_text(
        json.dumps({**injected, "iteration": 12, "phase": "backward", "ordered": True})
    )
    return folder


def test_a_real_run_is_simulated_from_its_folder(
    real_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = compose_machine(["cluster=local"])
    lines = {
        line[:34].strip(): line[34:].split()
        for line in compare(real_run, cluster, None)
    }
    assert lines["recoveries"][:2] == ["1", "1"]
    assert lines["window or interval, iterations"][:2] == ["3", "3"]
    exact = (
        "ETTR",
        "all iterations but the first, s",
        "a fault, s",
        "largest snapshot, bytes",
        "host memory, bytes",
    )
    assert {name: lines[name][2][1:] for name in exact} == dict.fromkeys(exact, "0.0%")
    assert main([f"real={real_run}", "cluster=local", "cluster.detect_s=30"]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_facts_are_read_from_events(real_run: Path) -> None:
    facts, result = (
        facts_of(read_run(real_run).ranks),
        json.loads((real_run / "result.json").read_text()),
    )
    assert (facts.iterations, facts.num_recoveries, facts.trained_again) == (
        result["iteration"],
        1,
        0,
    )
    assert facts.iteration_s == pytest.approx(5.0)
    # without the first iteration and its snapshot
    assert result["wall_s"] - 5.1 < facts.wall_s < result["wall_s"] - 5.0
    assert 0.9 < facts.ettr < 1.0


def test_constants_are_measured_from_a_run(real_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "measured.yaml"
    assert profile([str(real_run), "--write", str(file)]) == 0
    lines = file.read_text().splitlines()[1:]
    assert all("#" in line for line in lines)
    values = {
        key: value.split()[0] for key, value in (line.split(": ")[:2] for line in lines)
    }
    assert values["name"] == "measured"
    assert (float(values["detect_s"]), float(values["rebuild_s"])) == pytest.approx(
        (0.1, 0.3)
    )
    assert float(values["copy_bytes_per_s"]) == pytest.approx(2e9, rel=0.01)


def test_every_cell_belongs_to_a_row_of_an_experiment() -> None:
    for cell in read_cells():
        experiment = requested(cell.experiment)
        assert cell.case in experiment.cases, cell
        assert cell.policy in experiment.policies, cell
        assert cell.variant in {*experiment.variants, "*"}, cell
        assert cell.metric.partition(":")[0] in {*METRICS, "ettr_over", "gain_over"}, (
            cell
        )


def test_the_page_shows_every_cell(tmp_path: Path) -> None:
    of_trace = [
        cell
        for cell in read_cells()
        if (cell.experiment, cell.metric) == ("fig10_trace", "ettr_over:Gemini")
    ]
    in_table = ("table3", "GPT-MoE", "MoEvement")
    of_table = [
        cell
        for cell in read_cells()
        if (cell.experiment, cell.case, cell.policy) == in_table
    ]
    cells = [*of_trace, *of_table]
    said: list[str] = []
    (tmp_path / "page.md").write_text(
        "\n".join(["old", OWN_RUNS[0], "of this machine", OWN_RUNS[1], "old"])
    )
    write_page(
        tmp_path / "page.md",
        ["runs=1", "duration_s=4000"],
        cells,
        said.append,
        server_cases=["4 GB/s"],
    )
    lines = (tmp_path / "page.md").read_text().splitlines()
    rows = [
        line
        for line in lines
        if line.count("|") == 9 and not line.startswith(("| ---", "| row"))
    ]
    assert len(rows) == len(cells) > 10
    assert said == ["simulating fig10_trace", "simulating table3"]
    own = lines.index(OWN_RUNS[0])
    assert lines[own : own + 3] == [OWN_RUNS[0], "of this machine", OWN_RUNS[1]]
    assert "old" not in lines
    assert [
        line.split(" | ")[1] for line in lines if line.startswith("| 4 GB/s |")
    ] == ["600", "7200"]
    (window,) = [line for line in rows if "w_sparse" in line]
    assert window.split(" | ")[4:7] == ["3", "3", "+0 (+0%)"]
    (deviation,) = [line for line in lines if line.startswith("| MoEvement | 4 |")]
    assert deviation.split(" | ")[2] in "01234"
