"""Simulations from the command line: results, experiments, plans, folders of runs and the page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from launcher.cluster_profile import main as profile
from launcher.compared import compare
from launcher.config import compose_settings
from launcher.planning import command_of, rank_policies
from launcher.real_run import facts_of, read_run
from launcher.simulate import main
from launcher.simulated import latest, run_experiment, run_simulation
from launcher.simulated_run import write_run
from launcher.simulation import ExperimentConfig, compose_machine, compose_request, compose_simulation
from launcher.simulator_page import METRICS, NEAR, OWN_RUNS, compare_cells, read_cells, write_page
from moe_ckpt.events import IterationCommitted, read_events

SMALL = ("model=tiny", "cluster=local", "parallel.pp=2", "batch.global_batch_size=16", "duration_s=2000")


@cache
def requested(name: str) -> ExperimentConfig:
    return compose_request([f"experiment={name}"])[1]


def test_a_result_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "mtbf_s=300", "runs=2", "timing.iteration_s=2"]) == 0
    said = capsys.readouterr().out
    assert "PP=2 DP=2 EP=1 TP=1 on local, 2 micro-batches" in said
    assert "ETTR " in said


@pytest.mark.parametrize(("policy", "memory"), [("ckpt=dense", "-"), ("ckpt=gemini", "0.0"), ("ckpt=moc", "0.0")])
def test_memory_is_not_called_zero_where_it_is_not_known(
    policy: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, policy, "timing.iteration_s=2"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host memory")]
    assert line.split()[2].startswith(memory)
    assert line.split()[2] != "0"


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster.nodes=0"]) == 1
    assert capsys.readouterr().err == "error: cluster.nodes: got 0, wanted more than 0\n"


def test_a_later_override_counts_and_keys_stand_for_values() -> None:
    assert latest(["a=1", "b=$mtbf_s", "+a=2", "mtbf_s=600"]) == ["+a=2", "b=600", "mtbf_s=600"]


def test_the_published_ettr_cells_of_moevement_are_met() -> None:
    """All of Tables 3 and 7 that benchmarks/published.csv has, with one set of constants a cluster."""
    deviations = {}
    for name in ("table3", "table7"):
        cells = [cell for cell in read_cells() if cell.experiment == name and cell.policy == "MoEvement"]
        rows = list(run_experiment([f"experiment={name}", "runs=6"], policies=["MoEvement"]))
        ettrs = [cell for cell in cells if cell.metric == "ettr" and cell.source.startswith("Table")]
        deviations |= {f"{one.cell.case} {one.cell.variant}": one.deviation for one in compare_cells(ettrs, rows)}
    assert len(deviations) == 24
    assert {name: deviation for name, deviation in deviations.items() if abs(deviation) > NEAR} == {}


@pytest.mark.parametrize(
    ("case", "window"),
    [("GPT-MoE", 3), ("DeepSeek-MoE", 6)],  # of the others, docs/simulator.md says why not
)
def test_the_published_windows_follow_from_algorithm_1(case: str, window: int) -> None:
    rows = run_experiment(["experiment=table3", "runs=1", "duration_s=60"], policies=["MoEvement"], cases=[case])
    assert {row.result.saving.later.repeat[0].num_slots for row in rows} == {window}


def test_policies_are_ranked_by_ettr_and_the_best_has_its_command() -> None:
    arguments = [
        "model=deepseek_moe",
        "cluster=h200",
        "mtbf_s=1800",
        "duration_s=7200",
        "runs=1",
        "model.init_std=0.01",
    ]
    told: list[str] = []
    candidates = rank_policies(arguments, told.append)
    assert sorted(told) == sorted(" ".join(candidate.overrides) for candidate in candidates)
    had = [candidate for candidate in candidates if candidate.result]
    ettrs = [candidate.result.prediction.ettr for candidate in had if candidate.result]
    assert ettrs == sorted(ettrs, reverse=True)
    assert {override for candidate in had for override in candidate.overrides} >= {
        "ckpt=none",
        "ckpt=checkfreq",
        "ckpt=moevement",
        "ckpt.replicas=2",
        "ckpt=moc",
        "ckpt=moetion",
    }
    best = next(candidate for candidate in had if candidate.is_lossless)
    words = command_of(best, arguments).split()
    assert words[:4] == ["torchrun", "--nnodes=16", "--nproc-per-node=8", "launcher/train.py"]
    settings = compose_settings(words[4:])
    assert (settings.model.init_std, settings.parallel.ep, settings.train.global_batch_size) == (0.01, 8, 512)


def test_what_cannot_be_had_is_last_and_says_why() -> None:
    arguments = ["cluster=h200", "cluster.host_memory_bytes=40e9", "mtbf_s=1800", "duration_s=600", "runs=1"]
    candidates = rank_policies(arguments, tell=str)
    refused = [candidate for candidate in candidates if candidate.result is None]
    assert refused == candidates[-len(refused) :]
    assert all(candidate.refusal.startswith("cluster.host_memory_bytes: got ") for candidate in refused)


def test_a_plan_needs_an_mtbf(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan=true"]) == 1
    assert capsys.readouterr().err.startswith("error: mtbf_s: got None, wanted")


def test_a_simulated_run_leaves_a_folder_as_a_real_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main([*SMALL, "mtbf_s=300", "scope=process", "runs=1", "timing.iteration_s=5", f"out={folder}"]) == 0
    described = json.loads((folder / "run.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    assert described["world_size"] == 4
    assert 0 < result["ettr"] < 1
    for rank in range(4):
        events = [logged.event for logged in read_events(folder / "events" / f"rank{rank:04d}.jsonl")]
        commits = [event.iteration for event in events if isinstance(event, IterationCommitted)]
        assert commits[-1] == result["iteration"]


def test_a_folder_that_is_in_use_or_too_large_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "something").write_text("")
    assert main([*SMALL, f"out={tmp_path}", "timing.iteration_s=5"]) == 1
    assert capsys.readouterr().err.startswith("error: out: got ")
    assert (
        main(
            [*SMALL, f"out={tmp_path / 'new'}", "timing.iteration_s=1e-4", "cluster.take_s=0", "cluster.interference=0"]
        )
        == 1
    )
    assert "wanted a run of at most 2000000 events" in capsys.readouterr().err


@pytest.fixture
def real_run(tmp_path: Path) -> Path:
    """A folder with the settings of a real run and events that a simulation made."""
    folder, kill = tmp_path / "real", "fault.at=[{iteration: 12, rank: 2, phase: backward}]"
    simulated = compose_simulation(
        [
            *SMALL,
            "ckpt.replicas=1",
            "ckpt.window=3",
            "timing.iteration_s=5",
            "fault=at",
            kill,
            "batch.sequence_length=64",
            "parallel.ep=2",
        ]
    )
    write_run(folder, run_simulation(simulated))
    settings = compose_settings(["+ckpt=moevement", "ckpt.replicas=1", "ckpt.window=3", "train.global_batch_size=16"])
    (folder / "config.yaml").write_text(settings.composed_yaml)
    injected = {"unix_s": 0, "rank": 2, "pid": 1, "signal": "KILL", "scope": "process", "generation": 1}
    (folder / "faults.jsonl").write_text(
        json.dumps({**injected, "iteration": 12, "phase": "backward", "ordered": True})
    )
    return folder


def test_a_real_run_is_simulated_from_its_folder(real_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = compose_machine(["cluster=local"])
    lines = {line[:34].strip(): line[34:].split() for line in compare(real_run, cluster, None)}
    assert lines["recoveries"][:2] == ["1", "1"]
    assert lines["window or interval, iterations"][:2] == ["3", "3"]
    for name in (
        "ETTR",
        "all iterations but the first, s",
        "a fault, s",
        "largest snapshot, bytes",
        "host memory, bytes",
    ):
        assert lines[name][2][1:] == "0.0%", name
    assert main([f"real={real_run}", "cluster=local", "cluster.detect_s=30"]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_facts_are_read_from_events(real_run: Path) -> None:
    facts = facts_of(read_run(real_run).ranks)
    assert facts.iterations == json.loads((real_run / "result.json").read_text())["iteration"]
    assert facts.iteration_s == pytest.approx(5.0)
    assert facts.num_recoveries == 1
    assert facts.trained_again == 0
    whole_s = json.loads((real_run / "result.json").read_text())["wall_s"]
    assert whole_s - 5.1 < facts.wall_s < whole_s - 5.0  # without the first iteration, and its snapshot
    assert 0.9 < facts.ettr < 1.0


def test_a_folder_of_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"real={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: real: '{tmp_path}' is not the folder of a run")


def test_constants_are_measured_from_a_run(real_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "measured.yaml"
    assert profile([str(real_run), "--write", str(file)]) == 0
    lines = dict(line.split(": ")[:2] for line in file.read_text().splitlines()[1:])
    values = {key: value.split()[0] for key, value in lines.items()}
    assert values["name"] == "measured"
    assert float(values["detect_s"]) == pytest.approx(0.1)
    assert float(values["rebuild_s"]) == pytest.approx(0.3)
    assert float(values["copy_bytes_per_s"]) == pytest.approx(2e9, rel=0.01)
    assert all("#" in line for line in file.read_text().splitlines()[1:])


def test_every_cell_belongs_to_a_row_of_an_experiment() -> None:
    for cell in read_cells():
        experiment = requested(cell.experiment)
        assert cell.case in experiment.cases, cell
        assert cell.policy in experiment.policies, cell
        assert cell.variant in {*experiment.variants, "*"}, cell
        assert cell.metric.partition(":")[0] in {*METRICS, "ettr_over", "gain_over"}, cell


def test_the_page_shows_every_cell(tmp_path: Path) -> None:
    cells = [cell for cell in read_cells() if cell.experiment == "fig10_trace"]
    cells += [
        cell for cell in read_cells() if (cell.experiment, cell.case, cell.policy) == ("table3", "GPT-MoE", "MoEvement")
    ]
    said: list[str] = []
    (tmp_path / "page.md").write_text("\n".join(["old", OWN_RUNS[0], "of this machine", OWN_RUNS[1], "old"]))
    write_page(tmp_path / "page.md", ["runs=1", "duration_s=4000"], cells, said.append)
    lines = (tmp_path / "page.md").read_text().splitlines()
    rows = [line for line in lines if line.count("|") == 9 and not line.startswith(("| ---", "| row"))]
    assert len(rows) == len(cells) > 10
    assert said == ["simulating fig10_trace", "simulating table3"]
    own = lines.index(OWN_RUNS[0])
    assert lines[own : own + 3] == [OWN_RUNS[0], "of this machine", OWN_RUNS[1]]
    assert "old" not in lines
    (window,) = [line for line in rows if "w_sparse" in line]
    assert window.split(" | ")[4:7] == ["3", "3", "+0 (+0%)"]
    (deviation,) = [line for line in lines if line.startswith("| MoEvement | 4 |")]
    assert deviation.split(" | ")[2] in "01234"
