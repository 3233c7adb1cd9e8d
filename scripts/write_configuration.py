"""Write docs/configuration.md from the comments in conf/.

    python scripts/write_configuration.py

Each key of a YAML file stands on a line `key: value  # meaning`. The page shows a
nested key after the names of its parents. Each policy has a separate table. In other
groups, a key that several files share has one row; a value or meaning that differs
between files is shown with the names of the files.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
GROUPS = ("ckpt", "model", "parallel", "precision", "data", "train", "runtime", "fault")
OF_POLICIES = "ckpt"
"""The group whose files are policies."""

# a key with more different values shows only its first values, as examples
MANY_FILES = 4
_KEY = re.compile(
    r"(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#]*?))? *(?:# (?P<meaning>.*))?$"
)
INTRODUCTION = """# Configuration

Generated from the comments in [conf/](../conf) by `scripts/write_configuration.py`.
`GROUP=FILE` chooses a file, `GROUP.KEY=VALUE` overrides a key:

    torchrun --nproc-per-node=4 launcher/train.py +ckpt=moevement ckpt.replicas=2

`???` marks a key that has no default. The section `run` is in
[conf/config.yaml](../conf/config.yaml), and the simulator has
[conf/simulate.yaml](../conf/simulate.yaml).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key of one file."""

    file: str
    """Name of the file, without its ending."""

    key: str
    """Key with the names of its parents, joined by points."""

    value: str
    """Value, as YAML."""

    meaning: str
    """Comment of the key."""


def read_settings(path: Path) -> list[Setting]:
    """Return the settings of a file.

    Raises:
        ValueError: A key has no comment.
    """
    settings: list[Setting] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        found = _KEY.match(line)
        if found is None:
            continue
        indent = len(found["indent"])
        parents = [(width, name) for width, name in parents if width < indent] + [
            (indent, found["key"])
        ]
        if found["meaning"] is None:
            raise ValueError(
                f"{path}: {found['key']}: got no comment, wanted one that says what the"
                " key means"
            )
        key = ".".join(name for _, name in parents)
        settings.append(
            Setting(
                file=path.stem,
                key=key,
                value=found["value"] or "",
                meaning=found["meaning"],
            )
        )
    return settings


def table(settings: Sequence[Setting], num_files: int) -> list[str]:
    """Return the lines of a table of a group's settings.

    Args:
        settings: The settings. Keys keep the order of their first occurrences.
        num_files: The number of files of the group. With 1, no column names files.
    """
    by_key: dict[str, list[Setting]] = {}
    for setting in settings:
        by_key.setdefault(setting.key, []).append(setting)
    shared = num_files == 1
    head = ["| key | default | meaning |", "| --- | --- | --- |"]
    if not shared:
        head = ["| key | files | default | meaning |", "| --- | --- | --- | --- |"]
    rows = []
    for key, each in by_key.items():
        files = "" if shared else f" {_files(each, num_files)} |"
        meanings = _grouped({one.file: one.meaning for one in each})
        rows.append(
            f"| `{key}` |{files} {_values(each)} |"
            f" {meanings.replace('|', chr(92) + '|')} |"
        )
    return head + rows


def _files(each: Sequence[Setting], num_files: int) -> str:
    return "all" if len(each) == num_files else ", ".join(one.file for one in each)


def _values(each: Sequence[Setting]) -> str:
    values = {one.file: f"`{one.value}`" if one.value else "" for one in each}
    if len(set(values.values())) > MANY_FILES:
        return ", ".join(dict.fromkeys(list(values.values())[:MANY_FILES])) + ", ..."
    return _grouped(values)


def _grouped(texts: Mapping[str, str]) -> str:
    """Return the only text, or each of several texts with the names of its files."""
    files: dict[str, list[str]] = {}
    for file, text in texts.items():
        files.setdefault(text, []).append(file)
    if len(files) == 1:
        return next(iter(files))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in files.items())


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for group in GROUPS:
        files = sorted((ROOT / "conf" / group).glob("*.yaml"))
        choices = ", ".join(f"`{file.stem}`" for file in files)
        lines = [f"## {group}", "", f"Files: {choices}."]
        if group == OF_POLICIES:
            for file in files:
                own = table(read_settings(file), num_files=1)
                lines += ["", f"### ckpt={file.stem}", "", *own]
        else:
            settings = [setting for file in files for setting in read_settings(file)]
            lines += ["", *table(settings, len(files))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page())
    sys.exit(0)
