"""The list of faults fits the source, and the command tells a fault that is caught from one that is not."""

from __future__ import annotations

import builtins
import keyword
import re
import subprocess
from pathlib import Path

import pytest

from scripts.mutants import CAUGHT, ROOT, SURVIVED, Mutant, read_mutants, try_mutants

LEAST, LEAST_IN_ENGINE = 64, 28
NAMES = re.compile(r"(?<!\w)[^\W\d]\w*")
KNOWN = {*dir(builtins), *keyword.kwlist, "abandon", "amax", "CERT_NONE", "endswith", "keys", "PERSIST", "setdefault"}
"""Names that mutants may use beside those of the file that they change."""


def test_the_list_covers_all_packages() -> None:
    mutants = read_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= LEAST
    in_engine = [mutant for mutant in mutants if mutant.file.startswith(("moe_ckpt/engine/", "moe_ckpt/elastic/"))]
    assert len(in_engine) >= LEAST_IN_ENGINE
    folders = {path.parent for package in ("moe_ckpt", "launcher") for path in (ROOT / package).rglob("*.py")}
    assert {(ROOT / mutant.file).parent for mutant in mutants} == folders


def test_no_mutant_is_caught_for_a_name_that_does_not_exist() -> None:
    unknown = {}
    for mutant in read_mutants():
        used = set(NAMES.findall(re.sub(r'"[^"]*"', "", mutant.new)))
        unknown[mutant.name] = used - KNOWN - set(NAMES.findall((ROOT / mutant.file).read_text()))
    assert not {name: names for name, names in unknown.items() if names}


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    changed = mutant.applied_to((ROOT / mutant.file).read_text())
    compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        file, *names = test.split("::")
        assert (ROOT / file).exists(), test
        assert all(f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() for name in names), test


CHANGES = {
    "return a - b": (CAUGHT, "test_thing.py::test_sum"),
    "return b + a": (SURVIVED, ""),
    "__import__('os')._exit(0)": (CAUGHT, "test_thing.py::test_sum"),
}


def test_what_becomes_of_faults(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_thing.py").write_text(
        "import thing\n\n\ndef test_nothing():\n    pass\n\n\ndef test_sum():\n    assert thing.add(2, 1) == 3\n"
    )
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    mutants = [
        Mutant(name=new, file="thing.py", old="return a + b", new=new, fault="", tests=("test_thing.py",))
        for new in CHANGES
    ]
    outcomes = try_mutants(tmp_path, mutants, 2)
    assert outcomes is not None
    assert {name: (outcome.verdict, outcome.by) for name, outcome in outcomes.items()} == CHANGES
    assert (tmp_path / "thing.py").read_text().endswith("return a + b\n")


def test_tests_that_fail_anyway_catch_nothing(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text("ONE = 1\n")
    (tmp_path / "test_thing.py").write_text("def test_one():\n    assert False\n")
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    mutant = Mutant(name="two", file="thing.py", old="1", new="2", fault="", tests=("test_thing.py",))
    assert try_mutants(tmp_path, [mutant], 1) is None
