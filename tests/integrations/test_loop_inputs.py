"""Files that a loop's settings name count by content, and other words do not count."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ckpt.errors import DataError
from moe_ckpt.integrations.loop_inputs import SCRIPT, identities_of, script_identity
from moe_ckpt.integrations.megatron_bridge_options import files_of


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").write_bytes(suffix.encode())
    return tmp_path / "corpus"


@pytest.mark.parametrize(
    "named",
    [
        lambda corpus: ["0.5", str(corpus), "0.5", "/nowhere"],
        lambda corpus: ([str(corpus)], [1.0]),
        lambda corpus: {"train": f"{corpus}"},
        lambda corpus: corpus,
        lambda corpus: [f"{corpus}.bin#500", f"{corpus}.idx#500"],
    ],
    ids=["weights and prefixes", "a blend", "by name", "a path", "numbers of samples"],
)
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_corpus_counts_with_both_of_its_files(
    named: Any, suffix: str, corpus: Path
) -> None:
    before = identities_of({"--data-path": named(corpus)})
    Path(f"{corpus}{suffix}").write_bytes(b"other")
    after = identities_of({"--data-path": named(corpus)})
    assert before.keys() == after.keys() == {"--data-path"}
    assert before != after


def test_a_tokenizer_in_a_folder_counts_without_what_lies_beside_it(
    tmp_path: Path,
) -> None:
    for name in ("tokenizer.json", "weights.safetensors"):
        (tmp_path / name).write_text(name)
    settings = {"--tokenizer-model": str(tmp_path)}
    before = identities_of(settings)
    assert before.keys() == settings.keys()
    (tmp_path / "weights.safetensors").write_text("other weights")
    assert identities_of(settings) == before
    (tmp_path / "tokenizer.json").write_text("another tokenizer")
    assert identities_of(settings) != before


def test_settings_that_name_no_file_are_left_out() -> None:
    assert (
        identities_of(
            {
                "--data-path": None,
                "--split": "99,1,0",
                "--seed": 7,
                "--empty": "",
                "--template": "{{ a }}" * 99,
            }
        )
        == {}
    )


def test_a_file_that_cannot_be_read_is_an_error_of_its_setting(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"^--data-path: not yours"):
        identities_of({"--data-path": str(corpus)})


def test_the_program_counts_if_it_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    before = script_identity()
    script.write_text("print(2)")
    assert before.keys() == {SCRIPT}
    assert script_identity() != before
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    assert script_identity() == {}


def test_bridge_names_data_and_tokenizer_but_no_cache(corpus: Path) -> None:
    dataset = SimpleNamespace(
        blend=([str(corpus)], None), path_to_cache=str(corpus.parent)
    )
    tokenizer = SimpleNamespace(tokenizer_model=f"{corpus}.idx")
    found = identities_of(
        files_of(SimpleNamespace(dataset=dataset, tokenizer=tokenizer))
    )
    assert found.keys() == {"dataset.blend", "tokenizer.tokenizer_model"}
