"""What a model that writes says: its greedy words, and the log probabilities of given answers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch

import taskgraft as tg
from taskgraft.errors import GraftError
from taskgraft.training import written
from taskgraft.training.encode import Encoded, Ragged, encode
from taskgraft.training.written import greedy, label_scores

import tiny
from families import VOCABULARY, build

CPU = torch.device("cpu")
TEXTS = ["the film was good", "bad", "we saw a very awful phone today and it was lovely again", "it is", "", "shop"]
CANDIDATES = ("0", "1", "1 2", "1 2 3", "1 3", "good film")  # of several lengths, some the beginning of others
TOKENIZER = tiny.tokenizer()


def encoded(texts: list[str] = TEXTS) -> Encoded:
    return encode(TOKENIZER, "text", 0, pa.table({"text": texts}), 32, with_labels=False)


@torch.no_grad()
def grafted(family: str = "t5", dtype: torch.dtype = torch.float32) -> Any:
    """A model with two tasks that write differently, and differently of each text."""
    model = tg.graft(build(family, dtype), tg.Adapter(size=4), {"one": None, "two": None})
    for parameter in tg.trainable(model).values():
        torch.nn.init.normal_(parameter, std=0.3)
    for path, parameter in model.named_parameters():
        if "EncDecAttention" in path or "encoder_attn" in path or "shared" in path:
            parameter *= 5
    return model.eval()


@torch.no_grad()
def reference(model: Any, name: str, candidates: tuple[str, ...] = CANDIDATES) -> npt.NDArray[np.float64]:
    """One row and one candidate at a time, through the whole model."""
    found = np.empty((len(TEXTS), len(candidates)))
    for row, text in enumerate(TEXTS):
        inputs = TOKENIZER(text, return_tensors="pt")
        for place, candidate in enumerate(candidates):
            labels = TOKENIZER(text_target=candidate, return_tensors="pt")["input_ids"]
            with tg.rows(model, name):
                logits = model(**inputs, labels=labels).logits
            found[row, place] = sum(logits[0, at].log_softmax(-1)[token] for at, token in enumerate(labels[0]))
    return found


@pytest.mark.parametrize("at_once", [1, 4, 100])
@pytest.mark.parametrize("family", ["t5", "t5-v1.1", "mt5", "bart"])
def test_scores_are_those_of_the_whole_model(family: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "answers_at_once", lambda rows, device: at_once)
    model = grafted(family, torch.float64)
    found = {name: label_scores(model, name, TOKENIZER, encoded(), CANDIDATES, 4, CPU) for name in ("one", "two")}
    for name, scores in found.items():
        assert scores.shape == (len(TEXTS), len(CANDIDATES)) and scores.dtype == np.float64
        np.testing.assert_allclose(scores, reference(model, name), atol=1e-5)
    assert np.abs(found["one"] - found["two"]).max() > 0.1 and found["one"].std(0).min() > 1e-3


def test_rows_that_are_parted_for_memory_have_no_more_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "answers_at_once", lambda rows, device: 12 // rows)
    model, room = grafted(), 4
    plain, after = label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, 6, CPU), written.written_after

    def short(model: Any, read: Any, mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return after(model, read, mask, tokens)

    monkeypatch.setattr(written, "written_after", short)
    np.testing.assert_allclose(label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, 6, CPU), plain, atol=1e-4)


def test_neither_the_batch_nor_the_order_of_rows_and_candidates_matters() -> None:
    model = grafted()
    scores = label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, 64, CPU)
    for size in (1, 2, 5):
        again = label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, size, CPU)
        np.testing.assert_allclose(again, scores, atol=1e-4)
    turned = label_scores(model, "one", TOKENIZER, encoded(TEXTS[::-1]), CANDIDATES[::-1], 4, CPU)
    np.testing.assert_allclose(turned[::-1, ::-1], scores, atol=1e-4)


def test_rows_of_several_tasks_each_with_answers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grafted("t5", torch.float64)
    inputs = encoded(TEXTS[:3]).batch([0, 1, 2], CPU)[0]
    answers = [TOKENIZER(text_target=list(CANDIDATES[:count]))["input_ids"] for count in (3, 1, 6)]
    names = ["one", "two", "one"]
    with torch.inference_mode():
        alone = written.score(model, names, inputs, answers)
        monkeypatch.setattr(written, "answers_at_once", lambda rows, device: 4)
        np.testing.assert_allclose(written.score(model, names, inputs, answers), alone, atol=1e-9)
    for row, (name, own) in enumerate(zip(names, answers, strict=True)):
        np.testing.assert_allclose(alone[row, : len(own)], reference(model, name)[row, : len(own)], atol=1e-5)
        assert (alone[row, len(own) :] == -np.inf).all()
    monkeypatch.undo()
    assert [written.answers_at_once(256, torch.device(kind)) for kind in ("cpu", "cuda")] == [1, 4]
    assert written.answers_at_once(2_000, torch.device("cuda")) == 1


def test_the_chances_of_different_answers_sum_to_less_than_one() -> None:
    answers = [" ".join(words) for length in (0, 1, 2) for words in product(tiny.NUMBERS, repeat=length)]
    model = grafted("t5-v1.1")  # whose output layer is its own
    sums = np.exp(label_scores(model, "two", TOKENIZER, encoded(), answers, 8, CPU)).sum(1)
    assert (sums > 0).all() and (sums < 1).all()
    torch.nn.init.zeros_(model.lm_head.weight)  # every token is as likely as any other
    scores = label_scores(model, "two", TOKENIZER, encoded(), answers, 8, CPU)
    tokens = [len(answer.split()) + 2 for answer in answers]  # each answer is between [CLS] and [SEP]
    np.testing.assert_allclose(scores, np.tile(tokens, (len(TEXTS), 1)) * -np.log(VOCABULARY), rtol=1e-6)


def test_bfloat16_is_close() -> None:
    model = grafted()
    exact = label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, 4, CPU)
    rounded = label_scores(model, "one", TOKENIZER, encoded(), CANDIDATES, 4, CPU, bf16=True)
    assert 0 < np.abs(rounded - exact).max() < 0.5


def test_no_rows_and_no_candidates() -> None:
    model = grafted()
    none = Encoded({"input_ids": Ragged.of([]), "attention_mask": Ragged.of([])}, None, {}, 32, 0)
    assert label_scores(model, "one", TOKENIZER, none, CANDIDATES, 4, CPU).shape == (0, len(CANDIDATES))
    assert greedy(model, "one", TOKENIZER, none, 4, CPU) == []
    with pytest.raises(GraftError, match="no candidates"):
        label_scores(model, "one", TOKENIZER, encoded(), (), 4, CPU)


def test_greedy_writes_what_generate_does() -> None:
    model = grafted()
    found = {name: greedy(model, name, TOKENIZER, encoded(), 4, CPU) for name in ("one", "two")}
    for name, texts in found.items():
        for text, given in zip(texts, TEXTS, strict=True):
            with tg.rows(model, name):
                ids = model.generate(**TOKENIZER(given, return_tensors="pt"), max_new_tokens=32, do_sample=False)
            assert text == TOKENIZER.decode(ids[0], skip_special_tokens=True).strip()
    assert found["one"] != found["two"] and len(set(found["two"])) > 2
    short = greedy(model, "one", TOKENIZER, encoded(), 4, CPU, max_new_tokens=2)
    assert all(len(text.split()) <= 2 for text in short) and short != found["one"]
