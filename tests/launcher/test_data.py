"""Training data: the sources of tokens, and the samples of each batch."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from launcher.config import DataConfig, compose_settings
from launcher.data import (
    Batches,
    FlatText,
    Tokens,
    TokenSource,
    open_source,
    split_files,
    standard_library_files,
)
from moe_ckpt.errors import DataError

LIBRARY = Path(sysconfig.get_path("stdlib"))
WORDS = ("[UNK]", "zero", "one", "two", "three")
TRAIN = compose_settings([]).train


def open_text(
    path: Path | None, *, tokenizer: Path | None = None, sequence_length: int = 8
) -> TokenSource:
    config = DataConfig(
        source="stdlib" if path is None else "text",
        path=None if path is None else str(path),
        tokenizer=None if tokenizer is None else str(tokenizer),
        eval_fraction=0.1,
        seed=7,
    )
    return open_source(
        config, replace(TRAIN, sequence_length=sequence_length), None, Path("unused")
    )


def flat_text(*, length: int = 10, seed: int = 7) -> FlatText:
    """Return a text with tokens 0..999 to train on and 1000..1499 held out."""
    return FlatText(
        np.arange(1000),
        np.arange(1000, 1500),
        vocab_size=1500,
        length=length,
        seed=seed,
    )


class Numbers:
    """A source whose samples repeat their own number, negative where held out.

    A batch therefore shows the numbers of its samples.
    """

    vocab_size = 1
    inputs: Mapping[str, str] = {}
    shuffles: Mapping[str, str] = {}

    def __init__(self, length: int) -> None:
        self._length = length

    def train_sample(self, number: int) -> Tokens:
        return np.full(self._length, number, dtype=np.uint16)

    def eval_sample(self, number: int) -> Tokens:
        return np.full(self._length, -number, dtype=np.int32)


def batches_of(global_batch_size: int, micro_batch_size: int, dp: int) -> list[Batches]:
    """Return the batches of each data-parallel rank, with samples of 5 tokens."""
    train = replace(
        TRAIN,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        sequence_length=4,
    )
    consumed = lambda done: done * global_batch_size  # noqa: E731
    return [
        Batches(source=Numbers(5), train=train, dp=dp, dp_rank=rank, consumed=consumed)
        for rank in range(dp)
    ]


# --- files


def test_the_standard_library_is_its_sorted_sources_without_tests() -> None:
    files = standard_library_files()
    inside = {path.relative_to(LIBRARY) for path in files}
    assert {
        Path("ast.py"),
        Path("json/decoder.py"),
        Path("email/mime/text.py"),
    } <= inside
    assert files == sorted(files)
    assert all(path.suffix == ".py" for path in inside)
    folders = {folder for path in inside for folder in path.parts[:-1]}
    assert not folders & {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
    }


def some_files(count: int) -> list[Path]:
    return [
        Path("/usr/lib/python3") / f"package{number % 50}" / f"module{number}.py"
        for number in range(count)
    ]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
def test_files_are_split_about_as_told_and_none_is_lost(fraction: float) -> None:
    files = some_files(2000)
    kept, held_out = split_files(files, fraction)
    assert not set(kept) & set(held_out)
    assert sorted(kept + held_out) == sorted(files)
    assert len(held_out) / len(files) == pytest.approx(fraction, abs=0.05)
    # files keep their order
    assert kept == [path for path in files if path in set(kept)]


def test_the_part_of_a_file_depends_on_its_name_alone() -> None:
    files = some_files(500)
    _, held_out = split_files(files, 0.3)
    _, held_out_of_fewer = split_files(reversed(files[100:300]), 0.3)
    assert set(held_out_of_fewer) == set(held_out) & set(files[100:300])
    elsewhere = [
        Path("/opt/other") / path.relative_to("/usr/lib/python3") for path in files
    ]
    assert [path.name for path in split_files(elsewhere, 0.3)[1]] == [
        path.name for path in held_out
    ]


# --- samples


@given(number=st.integers(0, 1 << 40), length=st.integers(1, 400))
def test_a_sample_is_a_window_of_its_part_and_always_the_same(
    number: int, length: int
) -> None:
    text, again = flat_text(length=length), flat_text(length=length)
    train, held_out = text.train_sample(number), text.eval_sample(number)
    assert train.tolist() == list(range(train[0], train[0] + length))
    assert held_out.tolist() == list(range(held_out[0], held_out[0] + length))
    assert train[-1] < 1000 <= held_out[0]
    again.train_sample(number + 1)  # other requests make no difference
    assert again.train_sample(number).tolist() == train.tolist()
    assert again.eval_sample(number).tolist() == held_out.tolist()


def first_tokens(sample: Callable[[int], Tokens], count: int) -> list[int]:
    return [int(sample(number)[0]) for number in range(count)]


def test_samples_come_from_everywhere_and_follow_the_seed() -> None:
    starts = first_tokens(flat_text().train_sample, 2000)
    assert min(starts) < 50
    assert max(starts) > 940
    assert len(set(starts)) > 500
    assert starts != first_tokens(flat_text(seed=8).train_sample, 2000)


def test_training_and_held_out_samples_are_drawn_independently() -> None:
    same = FlatText(
        np.arange(1000), np.arange(1000), vocab_size=1000, length=10, seed=7
    )
    assert first_tokens(same.train_sample, 50) != first_tokens(same.eval_sample, 50)


@pytest.mark.parametrize(
    ("num_train", "num_eval", "part"),
    [(7, 100, "training"), (100, 7, "held-out"), (100, 0, "held-out")],
)
def test_a_text_shorter_than_a_sample_is_refused(
    num_train: int, num_eval: int, part: str
) -> None:
    got = min(num_train, num_eval)
    with pytest.raises(
        DataError,
        match=(
            rf"^data.path, data.eval_fraction: {got} {part} tokens, wanted at least 8 "
        ),
    ):
        FlatText(
            np.arange(num_train), np.arange(num_eval), vocab_size=100, length=8, seed=7
        )


def test_every_window_of_the_text_can_be_drawn() -> None:
    text = FlatText(np.arange(5), np.arange(4), vocab_size=5, length=4, seed=7)
    assert set(first_tokens(text.train_sample, 50)) == {0, 1}
    assert text.eval_sample(0).tolist() == [0, 1, 2, 3]


def test_the_standard_library_is_read_as_bytes_with_whole_files_held_out() -> None:
    kept, held_out = (
        b"".join(path.read_bytes() for path in part)
        for part in split_files(standard_library_files(), 0.1)
    )
    source = open_text(None, sequence_length=255)
    assert source.vocab_size == 256
    for number in range(20):
        train, evaluation = (
            source.train_sample(number).tobytes(),
            source.eval_sample(number).tobytes(),
        )
        assert (len(train), len(evaluation)) == (256, 256)
        assert train in kept
        assert evaluation in held_out


# --- text of the user


def test_a_file_is_read_as_bytes_and_its_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 900 + b"\xff" * 100)
    source = open_text(tmp_path / "text")
    assert source.vocab_size == 256
    assert all(
        source.train_sample(number).tolist() == [ord("a")] * 9 for number in range(50)
    )
    assert all(source.eval_sample(number).tolist() == [255] * 9 for number in range(50))


def test_a_folder_is_read_with_its_subfolders_in_the_order_of_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (
        ("c.txt", b"c" * 100),
        ("b/b.txt", b"b" * 450),
        ("a.txt", b"a" * 450),
        ("d.txt", b""),
    ):
        (tmp_path / name).write_bytes(content)
    source = open_text(tmp_path)
    seen = {source.train_sample(number).tobytes() for number in range(400)}
    assert {b"a" * 9, b"b" * 9, b"a" * 4 + b"b" * 5} <= seen
    assert not any(b"c" in sample for sample in seen)
    assert {source.eval_sample(number).tobytes() for number in range(50)} == {b"c" * 9}


@pytest.mark.parametrize(
    "files", [None, [], ["a.txt"]], ids=["missing", "empty", "empty file"]
)
def test_a_path_without_text_is_refused(
    tmp_path: Path, files: list[str] | None
) -> None:
    path = tmp_path / "corpus"
    if files is not None:
        path.mkdir()
        for name in files:
            (path / name).touch()
    with pytest.raises(DataError, match=rf"^data.path: .*{path}"):
        open_text(path)
    for name in files or ():
        with pytest.raises(DataError, match=rf"^data.path: .*{path / name}"):
            open_text(path / name)


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("one two three never " * 200)
    source = open_text(
        tmp_path / "text", tokenizer=tmp_path / "tokenizer.json", sequence_length=3
    )
    assert source.vocab_size == len(WORDS)
    one, two, three, unknown = 2, 3, 4, 0
    text = [one, two, three, unknown] * 2
    drawn = {tuple(source.train_sample(number).tolist()) for number in range(100)}
    assert drawn == {tuple(text[start : start + 4]) for start in range(4)}


@pytest.mark.parametrize(
    "content",
    [None, b"", b"not JSON", b"{}", b"\xff\xfe", json.dumps({"model": {}}).encode()],
)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "text").write_text("one two " * 100)
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        DataError,
        match=rf"^data.tokenizer: got '{path}', wanted a Hugging Face tokenizer.json",
    ):
        open_text(tmp_path / "text", tokenizer=path)


# --- batches


@given(
    dp=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 5),
    num_micro=st.integers(1, 5),
    iteration=st.integers(1, 50),
)
def test_an_iteration_has_the_same_samples_in_the_same_order_at_any_layout(
    dp: int, micro: int, num_micro: int, iteration: int
) -> None:
    size = dp * micro * num_micro
    ranks = batches_of(size, micro, dp)
    assert [batches.num_micro_batches for batches in ranks] == [num_micro] * dp
    order = [
        (micro_batch, batches) for micro_batch in range(num_micro) for batches in ranks
    ]
    trained = torch.cat(
        [batches.training(iteration, micro_batch) for micro_batch, batches in order]
    )
    held_out = torch.cat(
        [batches.evaluation(iteration, micro_batch) for micro_batch, batches in order]
    )
    assert trained.dtype == torch.int64
    assert trained.tolist() == [
        [number] * 5 for number in range((iteration - 1) * size, iteration * size)
    ]
    assert held_out.tolist() == [
        [-number] * 5 for number in range(iteration * size, (iteration + 1) * size)
    ]


def test_a_batch_can_be_asked_for_again() -> None:
    train = replace(TRAIN, sequence_length=4)
    batches = Batches(
        source=flat_text(length=5),
        train=train,
        dp=2,
        dp_rank=1,
        consumed=lambda done: done * 16,
    )
    first = batches.training(3, 1)
    batches.training(4, 0)
    assert torch.equal(batches.training(3, 1), first)
    assert not torch.equal(batches.training(4, 1), first)
