"""SQuAD's windows: long contexts, answers found again to the character, whatever the tokenizer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from taskgraft.backbones.load import embedded_folder
from taskgraft.errors import GraftError
from taskgraft.tasks.benchmarks import load_benchmark
from taskgraft.tasks.metrics import evaluate
from taskgraft.tasks.squad import Answer, Windows, best_answers, windows
from taskgraft.tasks.task import schema_of

LONG = (
    "Once, in the year 1066, " + " ".join(f"the {n}th soldier of king Harold slept." for n in range(60)) + " The end."
)
ROWS = [  # question, context, answer
    ("Where is it?", "The Eiffel Tower is in Paris, France.", "Paris"),
    ("What is first?", "Paris is first.", "Paris"),
    ("What is last?", "The last is Paris", "Paris"),
    ("Who?", "À Zürich,  José   Müller naïvely ate crème brûlée.", "José   Müller"),
    ("What was eaten?", "À Zürich,  José   Müller naïvely ate crème brûlée.", "crème brûlée"),
    ("Which city?", "  \n\t 東京 is the capital — of Japan 🗼, they say.", "東京"),
    ("Where?", "東京 is the capital — of Japan 🗼, they say.", "Japan 🗼"),
    ("How much?", "It cost $1,234.50 (about £900).", "$1,234.50"),
    ("All?", "Everything here.", "Everything here."),
    ("When?", LONG, "1066"),
    ("Which soldier?", LONG, "the 31th soldier of king Harold"),
    ("What comes last?", LONG, "The end."),
]
ROWS += [(f"Soldier {n}?", LONG, f"{n}th soldier of king Harold slept") for n in range(10, 60)]


def table_of(rows: Sequence[tuple[str, str, str]]) -> pa.Table:
    return pa.table(
        {
            "text": [question for question, _, _ in rows],
            "pair": [context for _, context, _ in rows],
            "label": [[{"start": context.index(answer), "text": answer}] for _, context, answer in rows],
            "id": [str(n) for n in range(len(rows))],
        },
        schema=schema_of("spans", True),
    )


def word_pieces() -> Any:
    return AutoTokenizer.from_pretrained(embedded_folder())


def byte_pairs() -> Any:
    """A tokenizer like RoBERTa's, whose tokens hold the space before a word and may be a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for row in ROWS for text in row], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def perfect(made: Windows, positions: list[int]) -> list[np.ndarray]:
    return [10.0 * (np.arange(len(ids)) == at) for ids, at in zip(made.columns["input_ids"], positions, strict=True)]


def found(made: Windows, table: pa.Table, **options: Any) -> list[Answer]:
    return best_answers(made, table, perfect(made, made.start), perfect(made, made.end), **options)


@pytest.mark.parametrize("make", [word_pieces, byte_pairs])
@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (64, 30), (48, 24)])
def test_perfect_logits_find_every_answer_to_the_character(make: Any, max_length: int, stride: int) -> None:
    table = table_of(ROWS)
    made = windows(make(), table, max_length=max_length, stride=stride)
    assert len(made) > len(ROWS)  # some contexts need several windows
    assert all(len(ids) <= max_length for ids in made.columns["input_ids"])
    for answer, (_, context, wanted) in zip(found(made, table, max_answer_tokens=60), ROWS, strict=True):
        assert answer.text == wanted
        assert answer.start == context.index(wanted) and context[answer.start : answer.end] == wanted
        assert answer.score == 20


def test_an_answer_cut_by_a_border_is_whole_in_the_next_window() -> None:
    table = table_of(ROWS)
    made = windows(word_pieces(), table, max_length=64, stride=30)
    tokens = made.columns["input_ids"]
    cut = 0
    for row, (_, context, wanted) in enumerate(ROWS):
        begin, stop = context.index(wanted), context.index(wanted) + len(wanted)
        whole = []
        for window in (w for w in range(len(made)) if made.row[w] == row):
            inside = made.offsets[window][made.offsets[window][:, 0] >= 0]
            holds = inside[0, 0] <= begin and stop <= inside[-1, 1]
            cut += bool(not holds and inside[0, 0] < stop and begin < inside[-1, 1])
            assert (made.start[window] > 0) == holds, "an answer that is not whole points at the first token"
            assert (made.start[window] == 0) == (made.end[window] == 0)
            assert 0 <= made.start[window] <= made.end[window] < len(tokens[window])
            whole.append(holds)
        assert any(whole)
    assert cut > 10


def test_windows_cover_the_context_and_share_the_stride() -> None:
    made = windows(word_pieces(), table_of([("When?", LONG, "1066")]), max_length=64, stride=30)
    inside = [offsets[offsets[:, 0] >= 0] for offsets in made.offsets]
    assert inside[0][0, 0] == 0 and inside[-1][-1, 1] == len(LONG)
    for before, after in itertools.pairwise(inside):
        assert before[-30:].tolist() == after[:30].tolist()
    assert set(made.columns) == {"input_ids", "attention_mask", "token_type_ids"}
    assert all(len(rows) == len(made) for rows in made.columns.values())


def test_batches_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    table, tokenizer = table_of(ROWS), word_pieces()
    whole = windows(tokenizer, table, max_length=64, stride=30)
    monkeypatch.setattr("taskgraft.tasks.squad.BATCH", 7)
    parts = windows(tokenizer, table, max_length=64, stride=30)
    assert (whole.columns, whole.row, whole.start, whole.end) == (parts.columns, parts.row, parts.start, parts.end)


@pytest.mark.parametrize("words", [20, 100, 3_000])
def test_a_long_question_is_cut_and_leaves_room_for_the_context(words: int) -> None:
    question = "why " * words
    made = windows(word_pieces(), table_of([(question, LONG, "The end.")]), max_length=64, stride=20)
    assert all(len(ids) <= 64 for ids in made.columns["input_ids"])
    assert all((offsets[:, 0] >= 0).sum() > 20 for offsets in made.offsets[:-1])
    assert found(made, table_of([(question, LONG, "The end.")]))[0].text == "The end."


def test_the_best_span_over_all_windows_inside_the_context() -> None:
    table = table_of([("Where is it?", LONG, "1066")])
    made = windows(word_pieces(), table, max_length=64, stride=20)
    rng = np.random.default_rng(0)
    starts, ends = ([rng.normal(size=len(ids)) for ids in made.columns["input_ids"]] for _ in range(2))
    for logits in (*starts, *ends):
        logits[:3] += 100  # the first token and the question: never an answer
    best = -np.inf
    for offsets, s, e in zip(made.offsets, starts, ends, strict=True):
        inside = np.flatnonzero(offsets[:, 0] >= 0)
        best = max(best, max(s[i] + e[j] for i in inside for j in inside if i <= j < i + 5))
    answer = best_answers(made, table, starts, ends, max_answer_tokens=5)[0]
    assert answer.score == pytest.approx(best)
    assert LONG[answer.start : answer.end] == answer.text != ""
    padded = [np.full((len(made), 64), 1e4) for _ in range(2)]  # what stands in the padding does not count
    for array, logits in zip(padded, (starts, ends), strict=True):
        for row, values in zip(array, logits, strict=True):
            row[: len(values)] = values
    assert best_answers(made, table, *padded, max_answer_tokens=5) == [answer]


def test_an_end_before_its_start_is_no_answer() -> None:
    table = table_of([ROWS[0]])
    made = windows(word_pieces(), table)
    tokens = len(made.columns["input_ids"][0])
    starts, ends = np.zeros((1, tokens)), np.zeros((1, tokens))
    starts[0, tokens - 3], ends[0, tokens - 6] = 9, 9
    answer = best_answers(made, table, starts, ends)[0]
    assert answer.score == 9 and answer.start < answer.end


def test_rows_without_anything_to_choose_from_are_empty() -> None:
    table = table_of([("Where?", "", ""), ("Where?", "   ", ""), ROWS[0]])
    made = windows(word_pieces(), table)
    answers = found(made, table)
    assert [answer.text for answer in answers] == ["", "", "Paris"]
    assert (answers[0].start, answers[0].end) == (0, 0)
    nothing = [np.full(len(ids), np.nan) for ids in made.columns["input_ids"]]
    assert [answer.text for answer in best_answers(made, table, nothing, nothing)] == ["", "", ""]


def test_contexts_without_answers_can_be_asked() -> None:
    table = table_of([ROWS[0]])
    made = windows(word_pieces(), table.select(["text", "pair"]), with_answers=False)
    assert made.start == made.end == [0]
    with_answers = windows(word_pieces(), table)
    answer = best_answers(made, table, perfect(made, with_answers.start), perfect(made, with_answers.end))[0]
    assert answer == Answer("Paris", 23, 28, 20.0)


def test_mistakes() -> None:
    table, tokenizer = table_of([ROWS[0]]), word_pieces()
    with pytest.raises(GraftError, match=r"64 tokens that share 64 leave no room .* stride from 0 to 59"):
        windows(tokenizer, table, max_length=64, stride=64)
    with pytest.raises(GraftError, match="object is not a fast tokenizer"):
        windows(object(), table)
    made = windows(tokenizer, table)
    tokens = len(made.columns["input_ids"][0])
    with pytest.raises(GraftError, match="2 rows of start logits were given for 1 windows"):
        best_answers(made, table, np.zeros((2, tokens)), np.zeros((1, tokens)))
    with pytest.raises(GraftError, match=rf"window 0 has {tokens} tokens, and its logits the shape \(3,\)"):
        best_answers(made, table, np.zeros((1, tokens)), np.zeros((1, 3)))
    with pytest.raises(GraftError, match="at most 0 tokens"):
        best_answers(made, table, np.zeros((1, tokens)), np.zeros((1, tokens)), max_answer_tokens=0)


@pytest.mark.skipif("TASKGRAFT_DATA" not in os.environ, reason="TASKGRAFT_DATA names no folder of data")
def test_all_of_squads_questions() -> None:
    table = load_benchmark("squad", os.environ["TASKGRAFT_DATA"]).split("test")
    assert table.num_rows == 10_570
    made = windows(word_pieces(), table)
    answers = found(made, table)
    contexts = table["pair"].to_pylist()
    assert all(context[a.start : a.end] == a.text for a, context in zip(answers, contexts, strict=True))
    scores = evaluate("spans", ("squad_f1",), (), table["label"].to_pylist(), [answer.text for answer in answers])
    assert scores["exact_match"] > 0.99 and scores["squad_f1"] > 0.99
