"""Rules about the texts of files: imports, sleeps, pickles, and names in documents."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.scenarios import ROOT

SLEEPERS = {
    "tests/harness/jobs/agent.py": (
        "an agent that does nothing until it is killed, and looks for what other"
        " processes write"
    ),
    "tests/harness/jobs/elastic_job.py": (
        "the only signs that other processes give are their files and pages"
    ),
    "tests/harness/jobs/agents_job.py": (
        "the only signs that other processes give are their files"
    ),
    "tests/harness/jobs/hosts_job.py": (
        "the only signs that other processes give are their files"
    ),
    "tests/harness/jobs/spare_hosts_job.py": (
        "the only signs that other processes give are their files"
    ),
    "tests/launcher/test_partitions.py": (
        "the time for which a link is cut is the subject"
    ),
    "tests/harness/jobs/walking_job.py": (
        "a worker leaves processors to others, as training does"
    ),
    "tests/launcher/test_torchrun.py": (
        "the only sign that another process gives is its file"
    ),
    "tests/elastic/test_starvation.py": (
        "time that passes while a process does not run is the subject"
    ),
    "tests/harness/gloo/workers.py": (
        "waits for what no other thread or process announces"
    ),
    "tests/integrations/recipe_client.py": "storage is slow",
    "tests/test_ranks.py": "a rank that never ends is the subject",
}
USE_TORCH_DISTRIBUTED = {  # process groups, stores and what is inside them
    *(
        "solo_group",
        "process_groups",
        "generations",
        "rendezvous_store",
        "checked_store",
        "backends",
        "job_store",
    ),
    *(
        "etcd_client",
        "etcd_store",
        "machines",
        "stop_board",
        "staged",
        "staged_group",
        "batched_transfers",
    ),
    "nccl_backend",
}
"""Modules of moe_ckpt/elastic that may use torch.distributed."""

IMPORT = re.compile(
    r"^\s*(?:from\s+\S+\s+)?import\s+(?:\([^)]*\)|[^\n]*)", re.MULTILINE
)
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


@cache
def texts() -> dict[str, str]:
    files = [
        path
        for folder in ("tests", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(files)}


def imports(text: str, name: str) -> bool:
    """Return whether an import statement has a match of the pattern `name`."""
    return any(re.search(name, statement) for statement in IMPORT.findall(text))


def sleeps(text: str) -> bool:
    """Return whether a module calls something like time.sleep(), outside strings."""
    nodes = list(ast.walk(ast.parse(text))) if "sleep" in text else []
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return imports(text, r"\btime import.*\bsleep") or any(
        isinstance(call, ast.Attribute) and call.attr == "sleep" for call in calls
    )


def test_no_module_imports_a_test_module() -> None:
    found = {
        path
        for path, text in texts().items()
        if imports(text, r"\btests\b[^#]*\btest_")
    }
    assert found == set()


def test_only_modules_with_a_reason_sleep() -> None:
    found = {
        path
        for path, text in texts().items()
        if path.startswith("tests/") and sleeps(text)
    }
    assert found == SLEEPERS.keys()


def test_the_engine_reaches_other_ranks_through_one_interface_alone() -> None:
    """That is `collectives.Ranks`; other ways would need processes in tests."""
    files = [
        path
        for folder in ("elastic", "engine", "snapshot", "replication", "durable")
        for path in (ROOT / "moe_ckpt" / folder).glob("*.py")
    ]
    found = {
        path
        for path in files
        if imports(
            path.read_text(), r"\btorch\.distributed|\btorch import.*\bdistributed"
        )
    }
    assert found == {
        ROOT / "moe_ckpt" / "elastic" / f"{name}.py" for name in USE_TORCH_DISTRIBUTED
    }


def test_no_pickle_is_read_from_disks_or_peers() -> None:
    """A pickle runs code of the pickle's author.

    Object collectives of workers and Megatron's checkpoints are in other folders.
    """
    pattern = re.compile(
        r"\b(?:import|from)"
        r" (?:pickle|shelve|marshal)\b|torch\.(?:load|save)\b|_object(?:_list)?\("
    )
    folders = (
        "elastic",
        "engine",
        "snapshot",
        "replication",
        "durable",
        "flowcheck",
        "recovery",
    )
    files = [
        path
        for folder in folders
        for path in (ROOT / "moe_ckpt" / folder).rglob("*.py")
    ]
    assert files
    assert [str(path) for path in files if pattern.search(path.read_text())] == []


def test_documents_name_files_that_exist() -> None:
    """Checks links, and names in backticks.

    Names in backticks may leave out moe_ckpt/, tests/ and tests/launcher/.
    """
    pages = [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in named_files(page.read_text(), page)
    ]
    assert missing == []


def named_files(text: str, page: Path) -> list[str]:
    """Return files that a page names and that do not exist.

    Paths with the placeholder NAME do not count. Neither do outputs of runs, which are
    not files of the repository.
    """
    links = [
        link
        for link in re.findall(r"\]\(([^)#:]+)\)", text)
        if not (page.parent / link).exists()
    ]
    named = set(
        re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|sh|yaml|toml|csv))(?:::\w+)?`", text)
    )
    homes = (ROOT, ROOT / "moe_ckpt", ROOT / "tests", ROOT / "tests" / "launcher")
    return links + [
        n
        for n in sorted(named)
        if "NAME" not in n and not any((home / n).exists() for home in homes)
    ]


def test_documents_name_tests_that_exist() -> None:
    there = {path.rpartition("/")[2] for path in texts()} | {
        n for text in texts().values() for n in TEST.findall(text)
    }
    pages = [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    named = [
        (page.name, name)
        for page in pages
        for name in re.findall(r"\btest_\w+\.py|(?<=::)test_\w+", page.read_text())
    ]
    assert named
    assert [each for each in named if each[1] not in there] == []
