"""Tokens to train on, addressed by iteration, micro-batch and data-parallel rank.

Any batch can be read again. A source is a function of a sample's number, and a batch is
a range of numbers. The data position is therefore a number of samples, which follows
from the iteration: there is no reader state to save, and the samples of an iteration
are the same at every parallel layout.
"""

from __future__ import annotations

import bisect
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from launcher.config import DataConfig, TrainConfig
from moe_ckpt.content import bytes_identity, file_identity, mapped_identity
from moe_ckpt.errors import DataError

Tokens = npt.NDArray[np.integer[Any]]
_BYTE_VOCABULARY = 256
_TRAIN, _EVAL = 0, 1
_NOT_LIBRARY_TEXT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}


class TokenSource(Protocol):
    """Samples of `sequence_length + 1` tokens.

    The first `sequence_length` tokens are the inputs. The targets are shifted by one
    token.
    """

    @property
    def vocab_size(self) -> int:
        """The number of different tokens."""
        ...

    @property
    def inputs(self) -> Mapping[str, str]:
        """Content identities of all inputs of the source, by the names of settings."""
        ...

    @property
    def shuffles(self) -> Mapping[str, str]:
        """Content identities of the order of samples, if files hold the order.

        Runs of other lengths have other identities.
        """
        ...

    def train_sample(self, number: int) -> Tokens:
        """Return training sample `number`: the same tokens at each call."""
        ...

    def eval_sample(self, number: int) -> Tokens:
        """Return held-out sample `number`: the same tokens at each call."""
        ...


class FlatText:
    """A long array of tokens.

    A sample is a window at a position that the sample's number and the seed determine.

    Args:
        train: The tokens for training.
        held_out: The tokens for evaluation.
        vocab_size: The number of different tokens.
        length: The tokens of a sample.
        seed: The seed of the positions.
        inputs: Content identities of the inputs, by the names of settings.

    Raises:
        DataError: One of the arrays is shorter than a sample.
    """

    shuffles: Mapping[str, str] = {}

    def __init__(
        self,
        train: Tokens,
        held_out: Tokens,
        *,
        vocab_size: int,
        length: int,
        seed: int,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        for part, tokens in (("training", train), ("held-out", held_out)):
            if len(tokens) < length:
                raise DataError(
                    f"data.path, data.eval_fraction: {len(tokens)} {part} tokens,"
                    f" wanted at least {length} (a sample)"
                )
        self.vocab_size = vocab_size
        self.inputs = inputs or {}
        self._parts = (train, held_out)
        self._length = length
        self._seed = seed

    def train_sample(self, number: int) -> Tokens:
        return self._window(_TRAIN, number)

    def eval_sample(self, number: int) -> Tokens:
        return self._window(_EVAL, number)

    def _window(self, part: int, number: int) -> Tokens:
        tokens = self._parts[part]
        # Philox is addressed by a counter: a sample does not depend on the samples
        # before it, so there is no state to save
        draw = np.random.Philox(
            key=self._seed, counter=[number, part, 0, 0]
        ).random_raw()
        start = int(draw) % (len(tokens) - self._length + 1)
        return tokens[start : start + self._length]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSize:
    """The samples of a corpus that a run needs."""

    num_samples: int
    """Samples of the whole run."""

    block: int
    """Samples of the run as it began, which are shuffled together."""

    def starts(self) -> list[int]:
        """Return the first sample of each block.

        The first block starts at 0. Each further block doubles the samples so far.
        """
        starts, end = [0], self.block
        while end < self.num_samples:
            starts.append(end)
            end *= 2
        return starts


class MegatronCorpus:
    """A tokenized corpus in Megatron's .bin/.idx format.

    Megatron's own GPTDataset samples the corpus, and shuffles for a given number of
    samples. A run that continues a shorter run must see the same samples as the shorter
    run. Training samples therefore come in blocks, each with a shuffle of its own: the
    samples of the run as it began, as many again, twice as many, and so on. Samples of
    an earlier block may come again in a later block.

    Args:
        config: The settings of the data.
        train: The settings of the training.
        vocab_size: The number of different tokens.
        cache: The folder for Megatron's index files.
        size: The samples that the run needs.

    Raises:
        DataError: A file is missing, or one side of the split has no text.
    """

    def __init__(
        self,
        config: DataConfig,
        train: TrainConfig,
        vocab_size: int,
        cache: Path,
        size: CorpusSize,
    ) -> None:
        assert config.path is not None
        _require_documents(config.path, config.eval_fraction)
        self.vocab_size = vocab_size
        self.inputs = {
            f"data.path ({suffix})": file_identity(Path(config.path + suffix))
            for suffix in (".bin", ".idx")
        } | _tokenizer_input(config)
        eval_samples = train.eval_batches * train.global_batch_size
        # all blocks are built now: Megatron's builder waits for all ranks, and not all
        # ranks read samples
        self._starts = size.starts()
        ends = [*self._starts[1:], 2 * self._starts[-1] or size.block]
        blocks = [
            _build_corpus(
                config,
                train,
                vocab_size,
                cache,
                config.seed + number,
                [end - start, eval_samples, 0],
            )
            for number, (start, end) in enumerate(zip(self._starts, ends, strict=True))
        ]
        self._train = [of_block for of_block, _ in blocks]
        self._eval = blocks[0][1]

    @property
    def shuffles(self) -> Mapping[str, str]:
        arrays = [
            memoryview(cast("Any", np.ascontiguousarray(index)))
            for dataset in (*self._train, self._eval)
            for index in (
                dataset.document_index,
                dataset.sample_index,
                dataset.shuffle_index,
            )
            # newer releases of Megatron map the files at the first read of a sample
            if index is not None
        ]
        return {"data.path (cache of the order of samples)": mapped_identity(*arrays)}

    def train_sample(self, number: int) -> Tokens:
        block = bisect.bisect_right(self._starts, number) - 1
        return _with_target(self._train[block][number - self._starts[block]])

    def eval_sample(self, number: int) -> Tokens:
        return _with_target(self._eval[number])


def _build_corpus(
    config: DataConfig,
    train: TrainConfig,
    vocab_size: int,
    cache: Path,
    seed: int,
    sizes: list[int],
) -> tuple[Any, Any]:
    """Return Megatron's data sets for training and evaluation."""
    assert config.path is not None
    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=train.sequence_length,
        blend=([config.path], None),
        split=f"{1 - config.eval_fraction},{config.eval_fraction},0",
        path_to_cache=str(cache),
        tokenizer=cast(
            "Any",
            SimpleNamespace(
                vocab_size=vocab_size, eod=None, pad=-1, unique_identifiers={}
            ),
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: True, dataset_config
    )
    for_training, for_evaluation, _ = cast("tuple[Any, Any, Any]", builder.build())
    return for_training, for_evaluation


def _require_documents(prefix: str, eval_fraction: float) -> None:
    """Refuse a corpus without text on either side of the split.

    Megatron's builder would search such a corpus without end.
    """
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"data.path: got {prefix!r}, wanted the prefix of a .bin and .idx file"
            )
    dataset = IndexedDataset(prefix)
    # a copy: `sequence_lengths` is a view into a file that closes with the dataset
    num_tokens = np.array(dataset.sequence_lengths)
    num_kept = round(len(num_tokens) * (1 - eval_fraction))
    for part, tokens in (
        ("training", num_tokens[:num_kept]),
        ("held-out", num_tokens[num_kept:]),
    ):
        if tokens.sum() == 0:
            raise DataError(
                f"data.eval_fraction: got {eval_fraction}, which leaves no {part} text"
                f" in the {len(num_tokens)} documents of {prefix!r}"
            )


def _with_target(sample: dict[str, torch.Tensor]) -> Tokens:
    return torch.cat([sample["tokens"], sample["labels"][-1:]]).numpy()


def open_source(
    config: DataConfig,
    train: TrainConfig,
    vocab_size: int | None,
    cache: Path,
    size: CorpusSize | None = None,
) -> TokenSource:
    """Return the source that the settings name.

    Args:
        config: The settings of the data.
        train: The settings of the training.
        vocab_size: The vocabulary of the model; None if the data decides.
        cache: The folder for Megatron's index files.
        size: The samples of a source that shuffles; None: the samples of the run,
            shuffled together.

    Raises:
        DataError: Data is missing, empty or too short. The error names the setting.
    """
    length = train.sequence_length + 1
    match config.source:
        case "stdlib":
            kept, held_out = split_files(standard_library_files(), config.eval_fraction)
            texts = (_bytes_of(kept), _bytes_of(held_out))
            inputs = {"data.source=stdlib": _identity_of(*texts)}
            return FlatText(
                *texts,
                vocab_size=_BYTE_VOCABULARY,
                length=length,
                seed=config.seed,
                inputs=inputs,
            )
        case "text":
            tokens, num_tokens = _tokenize(config)
            cut = int(len(tokens) * (1 - config.eval_fraction))
            inputs = {"data.path": _identity_of(tokens)} | _tokenizer_input(config)
            texts = (tokens[:cut], tokens[cut:])
            return FlatText(
                *texts,
                vocab_size=num_tokens,
                length=length,
                seed=config.seed,
                inputs=inputs,
            )
        case _:
            of_run = train.iterations * train.global_batch_size
            size = size or CorpusSize(num_samples=of_run, block=of_run)
            return MegatronCorpus(
                config, train, _corpus_vocabulary(config, vocab_size), cache, size
            )


def _identity_of(*tokens: Tokens) -> str:
    return bytes_identity(
        *(memoryview(cast("Any", np.ascontiguousarray(each))) for each in tokens)
    )


def _tokenizer_input(config: DataConfig) -> dict[str, str]:
    return (
        {}
        if config.tokenizer is None
        else {"data.tokenizer": file_identity(Path(config.tokenizer))}
    )


def standard_library_files() -> list[Path]:
    """Return the .py files of the running Python's standard library, sorted by path.

    Tests are left out.
    """
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY_TEXT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    # the order of `os.walk` depends on the file system, and a sample is a position in
    # the text
    return sorted(found)


def split_files(
    files: Iterable[Path], held_out_fraction: float
) -> tuple[list[Path], list[Path]]:
    """Split files into kept and held-out files, by the name of each file alone.

    Args:
        files: The files.
        held_out_fraction: The share of files to hold out, on average.

    Returns:
        The kept files and the held-out files.
    """
    kept, held_out = [], []
    for path in files:
        # by name alone: files that come or go with another Python move no other file to
        # the other side
        fate = zlib.crc32("/".join(path.parts[-2:]).encode()) / 2**32
        (held_out if fate < held_out_fraction else kept).append(path)
    return kept, held_out


def _bytes_of(files: Iterable[Path]) -> Tokens:
    return np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)


def _tokenize(config: DataConfig) -> tuple[Tokens, int]:
    assert config.path is not None
    files = _text_files(Path(config.path))
    if config.tokenizer is None:
        return _bytes_of(files), _BYTE_VOCABULARY
    tokenizer = _load_tokenizer(config.tokenizer)
    encode: Callable[[Path], list[int]] = lambda path: (  # noqa: E731
        tokenizer.encode(path.read_text(errors="replace")).ids
    )
    tokens = np.concatenate(
        [np.asarray(encode(path), dtype=np.int32) for path in files]
    )
    return tokens, tokenizer.get_vocab_size()


def _text_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(
            f"data.path: got {str(path)!r}, wanted an existing file or folder"
        )
    files = (
        sorted(file for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else [path]
    )
    if not any(file.stat().st_size for file in files):
        raise DataError(f"data.path: {str(path)!r} holds no text")
    return files


def _load_tokenizer(path: str) -> Any:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(
            f"data.tokenizer: got {path!r}, wanted a Hugging Face tokenizer.json"
            f" ({error})"
        ) from error


def _corpus_vocabulary(config: DataConfig, vocab_size: int | None) -> int:
    if config.tokenizer is not None:
        return _load_tokenizer(config.tokenizer).get_vocab_size()
    if vocab_size is None:
        raise DataError(
            "model.vocab_size: got 'auto', wanted a number where data=megatron has no"
            " data.tokenizer"
        )
    return vocab_size


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run for one data-parallel rank.

    Tensors are int64 of shape [micro_batch_size, sequence_length + 1].
    """

    source: TokenSource
    """The samples."""

    train: TrainConfig
    """The settings of the training."""

    dp: int
    """Number of data-parallel ranks."""

    dp_rank: int
    """Data-parallel rank of this process."""

    consumed: Callable[[int], int]
    """Returns the samples that training has consumed after a number of iterations."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of an iteration on every rank."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.dp)

    def training(self, iteration: int, micro_batch: int) -> torch.Tensor:
        """Return a micro-batch of training.

        Args:
            iteration: The iteration, counted from 1.
            micro_batch: The micro-batch on this rank, counted from 0.
        """
        return self._gather(
            self.source.train_sample, self.consumed(iteration - 1), micro_batch
        )

    def evaluation(self, batch: int, micro_batch: int) -> torch.Tensor:
        """Return a micro-batch of held-out data.

        Args:
            batch: The global batch, counted from 0.
            micro_batch: The micro-batch on this rank, counted from 0.
        """
        return self._gather(
            self.source.eval_sample, batch * self.train.global_batch_size, micro_batch
        )

    def _gather(
        self, sample: Callable[[int], Tokens], first_of_all: int, micro_batch: int
    ) -> torch.Tensor:
        size = self.train.micro_batch_size
        # ranks take turns by micro-batch: an iteration has the same samples in the same
        # order at any layout
        first = first_of_all + (micro_batch * self.dp + self.dp_rank) * size
        rows = [sample(number) for number in range(first, first + size)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
