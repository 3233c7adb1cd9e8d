"""Measures how the source is built and how it reads: `python scripts/house.py`; `--check` fails on the old language.

Counted, for moe_ckpt and launcher: files and lines of each folder, functions per 1000 lines, short functions, private
functions with one caller, comments, owners of class names, long constructors, large classes. Language: docstrings,
comments, docs and conf have named subjects (a rank, a window, a file) in place of pronouns and clauses that stand for
nouns; EXCEPTIONS lists each place that may differ, with its reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ("moe_ckpt", "launcher")
TEXTS = ("README.md", "docs", "conf", "benchmarks", "scripts", "examples", "Makefile", *SOURCE)
SUFFIXES = (".py", ".md", ".yaml", ".sh", "")
SHORT_LINES, MANY_PARAMETERS, MANY_METHODS = 3, 7, 20
OLD_LANGUAGE = re.compile(
    r"\b(?:who|no|some|every|any)(?:ever|body)\b"  # whoever, nobody, somebody, everybody, anybody
    r"|\bof (?:whom|what)\b"
    r"|(?:^|[.:;!?]\s+)(?:What|Who|Whoever|Whose)\s(?![^.?!]*\?)",  # but a question may begin so
    re.IGNORECASE | re.MULTILINE,
)
_AT_START = re.compile(r"(?:^|[.:;!?]\s+)(?:what|who|whoever|whose)\s", re.MULTILINE)  # lower case begins no sentence
EXCEPTIONS = {
    "docs/mutants.md": "written from the descriptions in scripts/mutants.toml",
    "scripts/house.py": "names the words that it looks for",
}


def tracked(folders: Sequence[str]) -> list[Path]:
    """Return the files of these folders that git tracks, relative to the root."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a file that people read, with the line on which each begins."""
    text = (ROOT / path).read_text()
    if path.suffix != ".py":
        yield from ((number, re.sub(r"^\s*#\s?", "", line)) for number, line in enumerate(text.splitlines(), 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and token.string.lstrip("rRbBfF").startswith('"""'):
            body = token.string.lstrip("rRbBfF").strip('"')
            yield from ((token.start[0] + offset, line.strip()) for offset, line in enumerate(body.split("\n")))


def language_hits() -> list[str]:
    """Return each place that has a pronoun or a clause in place of a named subject, as `file:line: text`."""
    hits = []
    for path in tracked(TEXTS):
        if str(path) in EXCEPTIONS or path.suffix not in SUFFIXES:
            continue
        for line, text in prose(path):
            if any(not _AT_START.fullmatch(found[0]) for found in OLD_LANGUAGE.finditer(text)):
                hits.append(f"{path}:{line}: {text}")
    return hits


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions and methods of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def measurements() -> list[tuple[str, str]]:
    """Return what is counted, as pairs of a name and a value."""
    paths = [path for path in tracked(SOURCE) if path.suffix == ".py"]
    texts = {path: (ROOT / path).read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: sum(bool(line.strip()) for line in text.splitlines()) for path, text in texts.items()}
    every = [function for tree in trees.values() for function in functions(tree)]
    called = Counter(re.findall(r"\b_\w+", "\n".join(texts.values())))
    private = [each for each in every if each.name.startswith("_") and not each.name.startswith("__")]
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owners = Counter(node.name for node in classes if not node.name.startswith("_"))
    comments = sum(text.count("# ") for text in texts.values())
    folders = Counter(path.parent for path in paths)
    total = sum(lines.values())
    short = sum(body_lines(each) <= SHORT_LINES for each in every)
    constructors = [
        each for node in classes for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    ]
    return [
        ("files, lines with text", f"{len(paths)}, {total:,}"),
        *(
            (f"  {folder}", f"{n}, {sum(lines[p] for p in paths if p.parent == folder):,}")
            for folder, n in sorted(folders.items())
        ),
        ("functions per 1000 lines", f"{1000 * len(every) / total:.0f}"),
        (f"functions of at most {SHORT_LINES} lines", f"{short / len(every):.0%}"),
        ("private functions with one caller", f"{sum(called[each.name] == 2 for each in private)} of {len(private)}"),
        ("comments per 100 lines", f"{100 * comments / total:.1f}"),
        ("class names with several owners", ", ".join(sorted(name for name, n in owners.items() if n > 1)) or "none"),
        (
            f"constructors with more than {MANY_PARAMETERS} parameters",
            str(sum(parameters(each) > MANY_PARAMETERS for each in constructors)),
        ),
        (f"classes with more than {MANY_METHODS} methods", str(sum(methods(node) > MANY_METHODS for node in classes))),
        ("isinstance on configurations", str(len(re.findall(r"isinstance\([^)]*Config\b", "\n".join(texts.values()))))),
        ("words in the README", f"{len((ROOT / 'README.md').read_text().split()):,}"),
        ("hits of the old language", str(len(language_hits()))),
    ]


def parameters(function: ast.FunctionDef) -> int:
    """Return the number of a method's parameters, without `self`."""
    return len(function.args.args) + len(function.args.kwonlyargs) - 1


def methods(node: ast.ClassDef) -> int:
    """Return the number of methods that a class defines."""
    return sum(isinstance(each, ast.FunctionDef) for each in node.body)


def main(arguments: Sequence[str]) -> int:
    """Print the measurements, or with `--check` the hits of the old language; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="print hits of the old language alone; fail if there are any"
    )
    if parser.parse_args(arguments).check:
        hits = language_hits()
        print("\n".join(hits))
        return int(bool(hits))
    width = max(len(name) for name, _ in measurements())
    print("\n".join(f"{name:{width}}  {value}" for name, value in measurements()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
