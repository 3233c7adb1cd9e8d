"""Content identities of the files that a loop's settings name.

All ranks, and all processes of a rank, must read the same contents: all ranks compare
the identities at each join (`engine.inputs`). Owns: finding files in the values of
settings, by the forms in which loops name files. Must not: know the settings of a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_ckpt.content import file_identity, files_identity
from moe_ckpt.errors import DataError

SCRIPT = "the script"
_TOKENIZER_SUFFIXES = {".model", ".tiktoken", ".jinja"}
_TOKENIZER_FILES = {
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("vocab.json", "vocab.txt", "merges.txt"),
}


def identities_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the content identity of the files that each setting names.

    Args:
        settings: Values by the names of settings: paths, prefixes of .bin and .idx
            files, folders of tokenizers, and nests of these.

    Returns:
        Identities by the names of settings, without settings that name no file.

    Raises:
        DataError: A file cannot be read.
    """
    found: dict[str, str] = {}
    for name, value in settings.items():
        files = [file for text in _texts(value) for file in _files(text)]
        try:
            if files:
                found[name] = files_identity(files)
        except OSError as error:
            raise DataError(f"{name}: {error}") from error
    return found


def script_identity() -> dict[str, str]:
    """Return the content identity of the program that this process runs.

    Returns:
        The identity by the name `SCRIPT`; empty if the program is no file.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    return {SCRIPT: file_identity(Path(path))} if path and Path(path).is_file() else {}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _files(text: str) -> list[Path]:
    """Return the files that a text means.

    A text may mean a file, the prefix of a corpus in Megatron's format, or a folder
    with a tokenizer.
    """
    path = Path(text)
    try:
        if text and path.is_dir():
            return sorted(file for file in path.iterdir() if _is_of_tokenizer(file))
        # ms-swift writes FILE#SAMPLES
        candidates = (
            path,
            Path(f"{text}.bin"),
            Path(f"{text}.idx"),
            Path(text.partition("#")[0]),
        )
        return sorted({file for file in candidates if file.is_file()})
    except OSError:  # a text that cannot be a path, such as a chat template
        return []


def _is_of_tokenizer(file: Path) -> bool:
    return file.is_file() and (
        file.suffix in _TOKENIZER_SUFFIXES or file.name in _TOKENIZER_FILES
    )
