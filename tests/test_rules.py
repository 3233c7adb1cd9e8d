"""Rules for the tests themselves, read from their syntax: their imports, their names, and that none sleeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_NAME = 70
SLEEPERS = {
    "tests/agent.py": "an agent that does nothing until it is killed, and looks for what other processes write",
    "tests/elastic.py": "the only signs that other processes give are their files and pages",
    "tests/jobs.py": "a trainer leaves processors to others, as training does",
    "tests/launcher/test_elastic_long.py": "faults come at moments that nothing marks",
    "tests/launcher/test_torchrun.py": "the only sign that another process gives is its file",
    "tests/runtime/trainers.py": "waits for what no other thread or process announces",
    "tests/test_ranks.py": "a rank that never ends is the subject",
}
IMPORTERS = {  # until their helpers have modules of their own
    "tests/launcher/test_elastic_whole.py",
    "tests/launcher/test_elastic_events.py",
    "tests/launcher/test_elastic_partial.py",
    "scripts/write_golden.py",
}
USE_TORCH_DISTRIBUTED = {  # process groups, stores and what is inside them
    "moe_ckpt/runtime/alone.py",
    "moe_ckpt/runtime/groups.py",
    "moe_ckpt/runtime/membership.py",
    "moe_ckpt/runtime/polling_store.py",
    "moe_ckpt/runtime/transport.py",
}


@cache
def modules() -> dict[str, ast.Module]:
    files = [path for folder in ("tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(files)}


def imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_a_test_module(module: ast.Module) -> bool:
    names = [name.split(".") for name in imported(module)]
    return any(parts[0] == "tests" and any(part.startswith("test_") for part in parts[1:]) for parts in names)


def sleeps(module: ast.Module) -> bool:
    calls = [node.func for node in ast.walk(module) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "sleep" for call in calls) or (
        "time.sleep" in imported(module)
    )


def names_of_tests(module: ast.Module) -> list[str]:
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


def test_no_module_imports_a_test_module() -> None:
    found = {path for path, module in modules().items() if imports_a_test_module(module)}
    assert found - IMPORTERS == set()


def test_only_modules_with_a_reason_sleep() -> None:
    found = {path for path, module in modules().items() if path.startswith("tests/") and sleeps(module)}
    assert found - SLEEPERS.keys() == set()


def test_names_of_tests_are_short() -> None:
    long = [
        f"{path}: {name}"
        for path, module in modules().items()
        for name in names_of_tests(module)
        if len(name) > LONGEST_NAME
    ]
    assert long == []


def test_the_engine_reaches_other_ranks_through_the_seam_alone() -> None:
    """`collectives.Ranks`: all else would need processes to be tested."""
    files = [path for folder in ("runtime", "store") for path in (ROOT / "moe_ckpt" / folder).glob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if any(name.startswith("torch.distributed") for name in imported(ast.parse(path.read_text())))
    }
    assert found == USE_TORCH_DISTRIBUTED
