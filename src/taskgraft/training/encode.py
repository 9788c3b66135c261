"""From a split's texts to token ids, held flat so that a million rows are two arrays and not a million lists."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.nn.heads import IGNORED
from taskgraft.tasks.squad import Windows, windows

CHUNK = 2_000  # texts that are tokenised at a time
SPAN_STRIDE = 128  # tokens that two windows of one context share, as is usual for SQuAD
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, end to end."""

    values: npt.NDArray[np.int32]
    offsets: Integers  # [rows + 1]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.fromiter((len(row) for row in rows), np.int64, len(rows)), out=offsets[1:])
        return cls(np.fromiter((i for row in rows for i in row), np.int32, int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in parts)])
        return cls(np.concatenate([part.values for part in parts]), lengths.cumsum())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @functools.cached_property
    def lengths(self) -> Integers:
        return np.diff(self.offsets)

    def padded(self, rows: Sequence[int], fill: int, multiple: int = 1) -> Tensor:
        """These rows as one tensor [rows, longest], rounded up to a multiple of a length."""
        return padded([self[row] for row in rows], fill, multiple)


@dataclass(frozen=True)
class Encoded:
    """One split, ready to be batched. `labels` is dense where a row has one answer, else ragged; None: no answers."""

    inputs: dict[str, Ragged]
    labels: Tensor | Ragged | None
    padding: dict[str, int]  # what each input is filled up with
    limit: int  # tokens that a text may have
    cut: int  # rows whose text, or whose written answer, was longer
    words: Ragged | None = None  # tokens: where each word begins; -1 where it was cut off
    windows: Windows | None = None  # spans: each row here is a window of a row of the split
    features: dict[str, Tensor] = field(default_factory=dict)  # what a frozen backbone made of the rows, cached

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def lengths(self) -> Integers:
        return self.inputs["input_ids"].lengths

    def batch(self, rows: Sequence[int], device: torch.device) -> tuple[dict[str, Tensor], Tensor | None]:
        """The inputs and the labels of some rows, padded to the longest of them (in eights, for a GPU's sake)."""
        multiple = 1 if device.type == "cpu" else 8
        if self.features:
            index = torch.as_tensor(list(rows))
            inputs = {name: values[index] for name, values in self.features.items()}
        else:
            inputs = {name: ragged.padded(rows, self.padding[name], multiple) for name, ragged in self.inputs.items()}
        labels = self.labels
        if isinstance(labels, Ragged):
            labels = labels.padded(rows, IGNORED, multiple)
        elif labels is not None:
            labels = labels[torch.as_tensor(list(rows))]
        there = {name: sent(value, device) for name, value in inputs.items()}
        return there, None if labels is None else sent(labels, device)

    def sha256(self) -> str:
        """What a run was trained on: token ids and labels, not where they came from."""
        digest = hashlib.sha256()
        for name, ragged in sorted(self.inputs.items()):
            digest.update(name.encode() + ragged.values.tobytes() + ragged.offsets.tobytes())
        if isinstance(self.labels, Ragged):
            digest.update(self.labels.values.tobytes() + self.labels.offsets.tobytes())
        elif self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


def padded(parts: Sequence[Sequence[int] | npt.NDArray[np.int32]], fill: int, multiple: int = 1) -> Tensor:
    """Rows of different lengths as one tensor [rows, longest], rounded up to a multiple of a length."""
    longest = max(1, *(len(part) for part in parts))
    whole = np.full((len(parts), -(-longest // multiple) * multiple), fill, np.int64)
    for place, part in zip(whole, parts, strict=True):
        place[: len(part)] = part
    return torch.from_numpy(whole)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """To a device, without waiting for what it is doing."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def joined(batches: Sequence[dict[str, Tensor]], padding: Mapping[str, int]) -> dict[str, Tensor]:
    """Batches under one another, each filled up to the longest of them."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    return {
        name: torch.cat([filled(batch[name], longest, fill) for batch in batches]) for name, fill in padding.items()
    }


def filled(values: Tensor, length: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=fill)


def encode(
    tokenizer: Any, kind: str, classes: int, table: pa.Table, max_length: int, *, with_labels: bool = True
) -> Encoded:
    """Tokenise a split of a task of this kind. Texts beyond `max_length` tokens are cut, and counted."""
    limit = min(max_length, usable_length(tokenizer))
    if kind == "spans":
        return encode_spans(tokenizer, table, limit, with_labels)
    columns: dict[str, list[Ragged]] = {}
    places: list[Ragged] = []
    answers: list[Ragged] = []
    cut = 0
    for part in chunks(table):  # flat at once: the tokenizer's lists are twenty times as large
        texts = part["text"].to_pylist()
        pairs = part["pair"].to_pylist() if "pair" in part.column_names else None
        encoded, long = truncated(tokenizer, limit, texts, pairs, is_split_into_words=kind == "tokens")
        for name, values in encoded.items():
            columns.setdefault(name, []).append(Ragged.of(values))
        if kind == "tokens":
            places.append(Ragged.of([first_tokens(encoded, row, len(words)) for row, words in enumerate(texts)]))
        if kind == "text" and with_labels:
            written, long_answers = truncated(tokenizer, limit, part["label"].to_pylist(), as_answer=True)
            answers.append(Ragged.of(written["input_ids"]))
            long |= long_answers
        cut += len(long)
    inputs = {name: Ragged.joined(parts) for name, parts in columns.items()}
    words = Ragged.joined(places) if places else None
    labels: Tensor | Ragged | None = None
    if with_labels:
        labels = Ragged.joined(answers) if answers else label_tensor(kind, classes, table, inputs, words)
    return Encoded(inputs, labels, {name: padding_of(tokenizer, name) for name in inputs}, limit, cut, words)


def truncated(
    tokenizer: Any,
    limit: int,
    texts: Sequence[Any],
    pairs: Sequence[str] | None = None,
    *,
    as_answer: bool = False,
    **options: Any,
) -> tuple[Any, set[int]]:
    """Texts as token ids of at most `limit`, and which of them were longer."""

    def tokenised(rows: Sequence[int], **more: Any) -> Any:
        given = {"text_target" if as_answer else "text": [texts[row] for row in rows]}
        second = {} if pairs is None else {"text_pair": [pairs[row] for row in rows]}
        return tokenizer(**given, **second, verbose=False, **options, **more)

    encoded = tokenised(range(len(texts)), truncation=True, max_length=limit)
    full = [row for row, ids in enumerate(encoded["input_ids"]) if len(ids) >= limit]  # the others cannot have been
    whole = tokenised(full, truncation=False)["input_ids"] if full else []
    return encoded, {row for row, ids in zip(full, whole, strict=True) if len(ids) > limit}


def encode_spans(tokenizer: Any, table: pa.Table, limit: int, with_labels: bool) -> Encoded:
    found = windows(tokenizer, table, limit, min(SPAN_STRIDE, limit // 3), with_answers=with_labels)
    inputs = {name: Ragged.of(values) for name, values in found.columns.items()}
    labels = torch.tensor([found.start, found.end]).T.contiguous() if with_labels else None
    split_up = int((np.bincount(np.asarray(found.row), minlength=table.num_rows) > 1).sum())
    padding = {name: padding_of(tokenizer, name) for name in inputs}
    return Encoded(inputs, labels, padding, limit, split_up, windows=replace(found, columns={}))


def label_tensor(
    kind: str, classes: int, table: pa.Table, inputs: dict[str, Ragged], words: Ragged | None
) -> Tensor | Ragged:
    """The answers as the loss of this kind wants them (`nn.heads.row_losses`)."""
    column = table["label"]
    if kind == "classification":
        return torch.from_numpy(column.to_numpy().astype(np.int64))
    if kind == "regression":
        return torch.from_numpy(column.to_numpy().astype(np.float32))
    if kind == "multilabel":
        labels = torch.zeros(table.num_rows, classes)
        for row, answer in enumerate(column.to_pylist()):
            labels[row, answer] = 1
        return labels
    assert kind == "tokens" and words is not None
    ids = inputs["input_ids"]
    values = np.full(len(ids.values), IGNORED, np.int32)
    for row, answer in enumerate(column.to_pylist()):
        place = words[row]
        kept = place >= 0
        values[ids.offsets[row] + place[kept]] = np.asarray(answer, np.int32)[kept]
    return Ragged(values, ids.offsets)


def chunks(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, CHUNK):
        yield table.slice(start, CHUNK)


def first_tokens(encoded: Any, row: int, words: int) -> list[int]:
    """The token at which each word begins; -1 for words that were cut off or have no token."""
    places = [-1] * words
    for token, word in enumerate(encoded.word_ids(row)):
        if word is not None and places[word] < 0:
            places[word] = token
    return places


def padding_of(tokenizer: Any, name: str) -> int:
    if name == "input_ids":
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise GraftError("this tokenizer has no padding token: set tokenizer.pad_token before training.")
        return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
    return int(tokenizer.pad_token_type_id) if name == "token_type_ids" else 0


def usable_length(tokenizer: Any) -> int:
    """The most tokens a backbone takes; some tokenizers say "no limit" with a huge number."""
    return min(int(tokenizer.model_max_length), 1 << 20)
