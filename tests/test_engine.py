"""An engine: any tasks in any company answer what each answers alone, whatever happens around them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import taskgraft as tg
from taskgraft.errors import Closed, Expired, Failed, GraftError, Overloaded, UnknownTask, Unreadable
from taskgraft.serving import engine as engine_module
from taskgraft.serving import passes
from taskgraft.serving.answers import Answer, Question
from taskgraft.serving.engine import Engine, Watch
from taskgraft.serving.passes import bucket
from taskgraft.tasks.wording import Wording
from taskgraft.training.written import score

import tiny
from families import SAMPLES, perturb
from serving import (
    SECONDS,
    Counted,
    Held,
    World,
    ask,
    asking_of,
    close,
    engine_on,
    grafted,
    reader,
    readers,
    results,
    same,
    sentence,
    small,
    together,
    until,
    writer,
    writers,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "error::pytest.PytestUnhandledThreadExceptionWarning")

RECORDS = {
    "mood": {"task": {"kind": "classification", "labels": ["bad", "good"]}},
    "tags": {"task": {"kind": "tokens", "labels": ["a", "b", "c"]}},
}
HEADS: dict[str, tg.Head | None] = {
    "mood": tg.Head("classification", ("bad", "good")),
    "tags": tg.Head("tokens", ("a", "b", "c")),
}
DIMENSIONS: dict[str, Any] = {"size": 4, "task_dim": 6, "hidden_dim": 10, "projected_dim": 5}


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A store of tasks that heads answer, some of which were trained together. Tests do not change it."""
    world = World(tmp_path_factory.mktemp("reading"), reader())
    for graft in readers(world.alone).values():
        world.put(graft)
    world.put_joint(together(world.alone, tg.HyperFormer(shared=True, **DIMENSIONS), HEADS, RECORDS, 5), "hyper")
    world.put_joint(together(world.alone, tg.Adapter(size=4, norm_after="shared"), HEADS, RECORDS, 6), "dagger")
    return world


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same for a model that writes."""
    world = World(tmp_path_factory.mktemp("writing"), writer())
    for graft in writers(world.alone).values():
        world.put(graft)
    records = {name: {"task": world.grafts[name].task} for name in ("binary", "long")}  # type: ignore[union-attr]
    tasks: dict[str, tg.Head | None] = {"binary": None, "long": None}
    world.put_joint(together(world.alone, tg.HyperFormer(**DIMENSIONS), tasks, records, 7), "hyper")
    return world


@pytest.fixture
def own(reading: World, tmp_path: Path) -> World:
    """A copy of the store of readers, for a test that changes it."""
    folder = tmp_path / "store"
    shutil.copytree(reading.folder, folder, symlinks=True)
    return World(folder, reading.alone, dict(reading.grafts), reading._said)


def askings(world: World, seed: int, count: int = 40) -> list[Any]:
    draw = random.Random(seed)
    tasks = [*world.grafts]
    return [asking_of(world, task, draw) for task in (tasks + draw.choices(tasks, k=count))[:count]]


# -- what it answers


@pytest.mark.parametrize("tokens", [1, 60, 4096])
def test_every_kind_of_task_answers_what_it_answers_alone(reading: World, tokens: int) -> None:
    questions = askings(reading, 0, 50)
    counted = Counted()
    with engine_on(reading.folder, tokens=tokens, watch=counted) as engine:
        reading.check(engine.predict(questions), questions)
        assert engine.waiting == 0
    assert len(counted.answers) == 50 and {error for _, error in counted.answers} == {None}
    assert all(padded <= max(tokens, 40) for _, _, padded in counted.batches), "a batch keeps to its tokens"
    assert (len(counted.batches) < 20) == (tokens == 4096)
    assert sum(rows for rows, _, _ in counted.batches) > 50, "long contexts were read in windows"


def test_answers_say_something(reading: World) -> None:
    """The tests would be worth nothing if tasks said the same of all texts."""
    draw = random.Random(1)
    for task in reading.grafts:
        said = {json.dumps(reading.said(asking_of(reading, task, draw)).result) for _ in range(12)}
        assert len(said) > 3, task


def test_models_that_write_answer_what_they_answer_alone(writing: World) -> None:
    """Labels scored among different candidates, numbers and texts written up to different lengths, in one batch."""
    questions = askings(writing, 0, 45)
    with engine_on(writing.folder, writer()) as engine:
        with Held(engine):
            futures = engine.submit(questions)
            until(lambda: engine._inbox.empty())
        writing.check(results(futures), questions)
    written = {writing.said(asking).answer for asking in questions if asking[0] == "long"}
    assert max(len(str(text).split()) for text in written) > 5, "some are longer than others may be"
    assert len(written) > 2


def test_answers_of_any_number_and_length_are_scored_beside_each_other(writing: World) -> None:
    """One row may choose among two words, the next among sentences: each as if it were alone."""
    backbone = writer()
    model = tg.graft(backbone.model, tg.HeadOnly(), tasks=())
    tasks, texts = ["binary", "many", "score"], ["the film was good", "bad", "we saw it again today"]
    for task in tasks:
        graft = writing.grafts[task]
        assert isinstance(graft, tg.Graft)
        tg.add_graft(model, graft)
    inputs = dict(backbone.tokenizer(texts, return_tensors="pt", padding=True))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    answers = [[[5, 3]], [[5, 3], [6, 7, 8, 9, 3], [3]], [[9, 9, 9, 3], [4, 3]]]
    with torch.inference_mode():
        found = score(model, tasks, inputs, answers)
        for row, task in enumerate(tasks):
            alone = score(model, task, {name: value[row : row + 1] for name, value in inputs.items()}, [answers[row]])
            assert found[row, : len(answers[row])].tolist() == pytest.approx(alone[0].tolist(), abs=1e-4)
            one = [score(model, task, inputs, [[answer]] * 3)[row, 0] for answer in answers[row]]
            assert found[row, : len(answers[row])].tolist() == pytest.approx(one, abs=1e-4)
            assert all(value == -float("inf") for value in found[row, len(answers[row]) :])


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_tasks_in_any_order_and_any_company(engines: dict[str, tuple[World, Engine]], data: st.DataObject) -> None:
    world, engine = engines[data.draw(st.sampled_from(sorted(engines)))]
    tasks = data.draw(st.lists(st.sampled_from(sorted(world.grafts)), min_size=1, max_size=12))
    draw = random.Random(data.draw(st.integers(0, 8)))
    questions = [asking_of(world, task, draw, data.draw(st.sampled_from([2, 9, 45]))) for task in tasks]
    world.check(ask(engine, questions), questions)
    assert engine.waiting == 0


class Named(dict[str, Any]):
    def __repr__(self) -> str:
        return str(list(self))


@pytest.fixture(scope="module")
def engines(reading: World, writing: World) -> Iterator[dict[str, tuple[World, Engine]]]:
    """With room for all grafts and for few, with large batches and small ones."""
    made = Named(
        {
            "readers": (reading, Engine(reader(), reading.folder)),
            "few readers": (reading, Engine(reader(), reading.folder, memory=30_000, tokens=100)),
            "readers side by side": (reading, Engine(reader(), reading.folder, tokens=60, threads=3)),
            "writers": (writing, Engine(writer(), writing.folder)),
            "few writers": (writing, Engine(writer(), writing.folder, memory=80_000, tokens=100)),
            "few writers side by side": (
                writing,
                Engine(writer(), writing.folder, memory=80_000, tokens=60, threads=2),
            ),
        }
    )
    yield made
    for _, engine in made.values():
        close(engine)


def test_tasks_that_were_trained_together_are_served_by_both_names(reading: World) -> None:
    questions = [(f"{joint}/{task}", "the film was good") for joint in ("hyper", "dagger") for task in HEADS]
    with engine_on(reading.folder) as engine:
        found = engine.predict(questions)
        reading.check(found, questions)
        assert [answer.task for answer in found] == ["hyper/mood", "hyper/tags", "dagger/mood", "dagger/tags"]
        assert {*engine.library.names()} == {*reading.grafts}
        for name in ("hyper", "hyper/other", "hyper/", "mood/other", "mood/", "none", "none/mood"):
            [error] = ask(engine, [(name, "x")])
            assert isinstance(error, UnknownTask), f"{name}: {error!r}"


def test_a_joint_of_full_fine_tuning_is_refused(own: World) -> None:
    records = {"mood": RECORDS["mood"]}
    joint = together(own.alone, tg.FullFineTuning(backbone_dropout=False), {"mood": HEADS["mood"]}, records, 1)
    own.store.put(joint, "full")
    with engine_on(own.folder) as engine:
        wrong, right = ask(engine, [("full/mood", "good"), ("mood", "good")])
        assert isinstance(wrong, Unreadable) and "changes the backbone itself" in str(wrong)
        same(right, own.said(("mood", "good")))


def test_a_graft_that_changes_the_backbone_does_not_shut_the_others_out(own: World) -> None:
    """No method of the library makes one; a file can say anything."""
    path = own.folder / "parts" / "graft.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": tg.FullFineTuning().to_json()}))
    with engine_on(own.folder) as engine:
        [wrong] = ask(engine, [("parts", "good")])
        own.check(ask(engine, [("mood", "good")]), [("mood", "good")])
        assert isinstance(wrong, Unreadable), f"it was served: {wrong!r}"


@pytest.mark.parametrize("text", ["", " ", "\n\t", "é ü 漢字 🙂", "\x00", "good " * 500, "[PAD] [CLS]"])
def test_strange_texts(reading: World, text: str) -> None:
    questions = [("mood", text), ("nli", text, text), ("where", text, text), ("where", "good", text), ("stars", text)]
    with engine_on(reading.folder) as engine:
        reading.check(ask(engine, questions), questions)


@pytest.mark.parametrize("words", [[], [""], ["", "good", " "], ["good"] * 100, ("good", "bad"), "", "good bad"])
def test_strange_words(reading: World, words: Any) -> None:
    """What `tg.predict` answers an engine answers, and what it refuses an engine refuses with a sentence."""
    asking = ("entities", words)
    try:
        wanted = reading.said(asking)
    except Exception:
        wanted = None
    with engine_on(reading.folder) as engine:
        found, beside = ask(engine, [asking, ("mood", "good")])
        same(beside, reading.said(("mood", "good")))
        if wanted is None:
            assert isinstance(found, GraftError) and not isinstance(found, Failed), f"{found!r}"
        else:
            same(found, wanted)


def test_answers_as_json(reading: World, writing: World) -> None:
    for world in (reading, writing):
        draw = random.Random(3)
        for task in world.grafts:
            answer = world.said(asking_of(world, task, draw))
            record = json.loads(json.dumps(answer.to_json()))
            assert Answer.from_json(record) == answer and record["task"] == task and record["version"] == 1
    nothing = Answer("spoken", 1, "classification")  # what was written is no class
    assert nothing.to_json() == {"task": "spoken", "version": 1, "kind": "classification", "label": None}


def test_a_text_that_ends_where_it_must_is_the_same_in_longer_company(tmp_path: Path) -> None:
    """BART is made to end a text at its last token: that token depends on the row's own limit."""
    config = SAMPLES["bart"].config()
    config.forced_eos_token_id = 2

    def bart() -> tg.Backbone:
        torch.manual_seed(0)
        model = perturb(hf.BartForConditionalGeneration(config)).eval()
        model.final_logits_bias[:, [*range(4), *range(32, config.vocab_size)]] = -1e4  # words, and no end
        return tg.Backbone(model, tiny.tokenizer(), "tiny-bart")

    world = World(tmp_path, bart())
    for number, (name, length) in enumerate((("short", 4), ("long", 30))):
        task = {"kind": "text", "wording": Wording("text", (), ()).to_json()}
        training = {"settings": {"max_length": length}}
        world.put(grafted(world.alone, name, tg.Adapter(size=4), seed=number, task=task, training=training))
    draw = random.Random(0)
    questions = [(name, sentence(draw, 1, 9)) for _ in range(6) for name in ("short", "long")]
    assert {len(str(world.said(asking).answer).split()) for asking in questions} == {3, 29}
    with engine_on(tmp_path, bart()) as engine:
        with Held(engine) as held:
            first = engine.submit(questions[:1])
            assert held.entered.wait(SECONDS)
            futures = engine.submit(questions)
            until(lambda: len(engine._ready) == len(questions))
        world.check(results([*first, *futures]), [questions[0], *questions])


@pytest.mark.parametrize("writes", [False, True], ids=["readers", "writers"])
def test_what_fills_a_batch_up_for_a_gpu_changes_nothing(
    reading: World, writing: World, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """Rows and tokens up to one of few shapes, never beyond the positions that the backbone has."""
    world, inputs_of = (writing, writer()) if writes else (reading, reader()), passes.inputs_of
    shapes: list[Any] = []

    def on_cpu(rows: Any, device: Any, multiple: int) -> Any:
        inputs = inputs_of(rows, torch.device("cpu"), multiple)
        shapes.append(tuple(inputs["input_ids"].shape))
        return inputs

    monkeypatch.setattr(passes, "inputs_of", on_cpu)
    questions = askings(world[0], 8, 45)
    with engine_on(world[0].folder, world[1], tokens=500, waiting=50) as engine:
        engine.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        with Held(engine):
            futures = engine.submit(questions)
            until(lambda: engine._inbox.empty())
        world[0].check(results(futures), questions)
    assert all(rows == bucket(rows) and 16 <= tokens <= 48 for rows, tokens in shapes) and len(shapes) > 2
    assert writes or max(tokens for _, tokens in shapes) == 40


# -- questions that cannot be answered


@pytest.mark.parametrize(
    "asking",
    [
        ("mood", 5),
        ("mood", None),
        ("mood", ["a", "list"]),
        ("mood", b"bytes"),
        ("mood", "a \ud800 half"),
        ("mood", "one", "and another"),
        ("nli", "no second"),
        ("nli", "good", 5),
        ("nli", "good", 0),
        ("nli", "good", []),
        ("nli", "good", b"bytes"),
        ("nli", "good", "a \udfff half"),
        ("where", "no context"),
        ("where", "good", {}),
        ("entities", 5),
        ("entities", None),
        ("entities", [1, 2]),
        ("entities", ["good", None]),
        ("entities", ["good", "a \ud800 half"]),
        ("entities", [["nested"]]),
        ("../mood", "good"),
        ("", "good"),
        (".versions", "good"),
        ("a" * 300, "good"),
        ("mood\x00", "good"),
        Question(5, "good"),  # type: ignore[arg-type]
        Question(None, "good"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_bad_question_gets_a_sentence_and_harms_nobody(reading: World, asking: Any) -> None:
    good = [("mood", "good"), ("nli", "good", "bad"), ("where", "it was", "a good film"), ("entities", "good film")]
    with engine_on(reading.folder) as engine:
        with Held(engine):
            blocked = engine.submit([("mood", "we saw it")])
            futures = engine.submit([*good, asking, *good])
            until(lambda: engine._inbox.empty())
        found = results([*blocked, *futures])
        reading.check([*found[1:5], *found[6:]], [*good, *good])
        assert isinstance(found[5], GraftError) and not isinstance(found[5], Failed), repr(found[5])
        assert str(found[5]).endswith(".") and engine.waiting == 0


@pytest.mark.parametrize("asking", ["mood", ("mood",), ("mood", "a", "b", "c"), ["mood", "a"], (5, "good"), None, 5])
def test_what_is_no_question_is_refused_at_once(reading: World, asking: Any) -> None:
    with engine_on(reading.folder) as engine:
        with pytest.raises(GraftError, match="no question"):
            engine.submit([("mood", "good"), asking])
        assert engine.waiting == 0


def test_a_tokenizer_that_fails_on_one_text_does_not_harm_its_company(
    reading: World, caplog: pytest.LogCaptureFixture
) -> None:
    backbone = reader()
    backbone = tg.Backbone(backbone.model, Touchy(backbone.tokenizer), backbone.name)
    good = [("mood", "good"), ("stars", "bad film"), ("plain", "the shop"), ("nli", "good", "bad")]
    with engine_on(reading.folder, backbone) as engine:
        with Held(engine):
            first = engine.submit([("mood", "we")])
            futures = engine.submit([*good, ("mood", "poison"), *good])
        found = results([*first, *futures])[1:]
    reading.check([*found[:4], *found[5:]], [*good, *good])
    assert isinstance(found[4], Failed) and found[4].id in caplog.text


class Touchy:
    """A tokenizer that cannot stand some text, nor two threads at a time: fast ones lose their truncation then."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.lock = tokenizer, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("two threads are in the tokenizer")
        try:
            time.sleep(0.001)
            given = options.get("text") or []
            if any("poison" in str(text) for text in given):
                raise RuntimeError("this tokenizer does not like the text")
            return self.tokenizer(*args, **options)
        finally:
            self.lock.release()


def test_no_two_threads_are_in_the_tokenizer_at_once(writing: World) -> None:
    """Truncation is a state of a fast tokenizer: one thread's call changes what another's gives, or fails it."""
    for seed in range(3):
        backbone = writer()
        backbone = tg.Backbone(backbone.model, Touchy(backbone.tokenizer), backbone.name)
        with engine_on(writing.folder, backbone) as engine:
            questions = [("binary", "good"), ("many", "good"), ("both", "good", "bad")]
            questions += [asking_of(writing, "short", random.Random(seed)) for _ in range(30)]
            futures = []
            for asking in questions:
                futures += engine.submit([asking])
                time.sleep(0.002)
            writing.check(results(futures), questions)


# -- versions


def v2(world: World, name: str = "mood", seed: int = 77) -> tg.Graft:
    head = tg.Head("classification", ("poor", "fine", "great"))
    task = {"kind": "classification", "labels": list(head.labels)}
    return grafted(world.alone, name, tg.Adapter(size=7), head, seed=seed, task=task)


def test_questions_are_answered_by_the_version_they_came_to(own: World) -> None:
    old, new = own.grafts["mood"], v2(own)
    text = ("mood", "the film was good")
    with engine_on(own.folder) as engine:
        engine.predict([("stars", "good")])
        with Held(engine) as held:
            first = engine.submit([("stars", "bad"), text])
            assert held.entered.wait(SECONDS)
            waiting = engine.submit([text] * 3)
            until(lambda: engine._inbox.empty())
            putting = threading.Thread(target=lambda: engine.put(new, "mood"), daemon=True)
            putting.start()
        putting.join(SECONDS)
        assert not putting.is_alive()
        for answer in results([*first[1:], *waiting]):
            same(answer, own.said(text, 1, old))
        [answer] = ask(engine, [text])
        same(answer, own.said(text, 2, new))
        [answer] = engine.predict([text], version=1)
        same(answer, own.said(text, 1, old))
        assert engine.rollback("mood") == 1
        same(*ask(engine, [text]), own.said(text, 1, old))
        assert engine.rollback("mood", 2) == 2
        same(*ask(engine, [text]), own.said(text, 2, new))
        with pytest.raises(GraftError, match="no version 9"):
            engine.predict([text], version=9)
        with pytest.raises(GraftError, match="no version 9"):
            engine.rollback("mood", 9)


def test_a_put_while_the_old_version_is_only_waiting_to_be_read(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, text = own.grafts["mood"], v2(own), ("mood", "the film was good")
    with engine_on(own.folder) as engine, Reading(monkeypatch) as reads:
        waiting = engine.submit([text])
        assert reads.entered.wait(SECONDS)
        assert engine.put(new, "mood") == 2
        later = engine.submit([text])
        reads.go.set()
        same(*results(waiting), own.said(text, 1, old))
        same(*results(later), own.said(text, 2, new))


class Reading:
    """Holds those who read grafts from disk until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        original = engine_module.read_weights

        def read(version: Any) -> Any:
            self.entered.set()
            assert self.go.wait(SECONDS)
            return original(version)

        monkeypatch.setattr(engine_module, "read_weights", read)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


def test_a_refused_put_changes_nothing(own: World) -> None:
    torch.manual_seed(1)
    other = tg.Backbone(hf.BertModel(reader().model.config).eval(), tiny.tokenizer(), "other")
    foreign = v2(World(own.folder, other))
    text = ("mood", "good")
    with engine_on(own.folder) as engine:
        before = engine.predict([text])
        with pytest.raises(GraftError, match="made for another backbone"):
            engine.put(foreign, "mood")
        with pytest.raises(GraftError, match="cannot be used"):
            engine.put(v2(own), "../mood")
        with pytest.raises(GraftError, match="trained together"):
            engine.put(v2(own), "hyper")
        assert engine.predict([text]) == before and own.store.versions("mood") == [1]


def test_questions_that_are_here_survive_a_removal(own: World) -> None:
    text = ("mood", "the film was good")
    with engine_on(own.folder) as engine:
        engine.predict([text])
        with Held(engine) as held:
            first = engine.submit([("stars", "good")])
            assert held.entered.wait(SECONDS)
            waiting = engine.submit([text])
            until(lambda: engine._inbox.empty())
            engine.remove("mood")
            later = engine.submit([text])
        own.check(results(waiting), [text])
        assert isinstance(results(later)[0], UnknownTask)
        own.check(results(first), [("stars", "good")])
        assert "mood" not in engine.library.names()
        with pytest.raises(UnknownTask):
            engine.remove("mood")
        again = v2(own)
        assert engine.put(again, "mood") == 1
        same(*ask(engine, [text]), own.said(text, 1, again))


@pytest.mark.parametrize("task", ["mood", "hyper/mood"])
def test_questions_whose_graft_is_being_read_survive_a_removal(
    own: World, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    with engine_on(own.folder) as engine, Reading(monkeypatch) as reads:
        waiting = engine.submit([(task, "good")])
        assert reads.entered.wait(SECONDS)
        removing = threading.Thread(target=engine.remove, args=(task.partition("/")[0],), daemon=True)
        removing.start()
        removing.join(0.3)
        reads.go.set()
        removing.join(SECONDS)
        own.check(results(waiting), [(task, "good")])
        assert isinstance(ask(engine, [(task, "good")])[0], UnknownTask)


def test_questions_of_an_older_version_that_is_being_read_survive_a_removal(
    own: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, text = own.grafts["mood"], ("mood", "good")
    with engine_on(own.folder) as engine, Reading(monkeypatch) as reads:
        waiting = engine.submit([text])
        assert reads.entered.wait(SECONDS)
        engine.put(v2(own), "mood")
        with pytest.raises(UnknownTask):
            engine.library.find("mood x")
        engine.library.find("mood")  # as the next question would
        removing = threading.Thread(target=engine.remove, args=("mood",), daemon=True)
        removing.start()
        removing.join(0.3)
        reads.go.set()
        removing.join(SECONDS)
        same(*results(waiting), own.said(text, 1, old))


def test_another_process_puts_rolls_back_and_removes(own: World, tmp_path: Path) -> None:
    text, new = ("mood", "the film was good"), v2(own)
    new.save(tmp_path / "elsewhere" / "mood")

    def elsewhere(code: str) -> None:
        program = f"import taskgraft as tg; store = tg.Store({str(own.folder)!r}); {code}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)

    with engine_on(own.folder) as engine:
        own.check(ask(engine, [text]), [text])
        elsewhere(f"store.put(tg.load_graft({str(tmp_path / 'elsewhere' / 'mood')!r}))")
        same(*ask(engine, [text]), own.said(text, 2, new))
        tg.Store(own.folder).rollback("mood")
        own.check(ask(engine, [text]), [text])
        tg.Store(own.folder).remove("mood")
        assert isinstance(ask(engine, [text])[0], UnknownTask)
        tg.Store(own.folder).put(new)
        same(*ask(engine, [text]), own.said(text, 1, new))


def test_a_version_that_was_pruned_while_it_was_read_is_not_missed(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process puts a new version and prunes the old one: the task was there at every moment."""
    new, text = v2(own), ("mood", "the film was good")
    with engine_on(own.folder) as engine, Reading(monkeypatch) as reads:
        waiting = engine.submit([text])
        assert reads.entered.wait(SECONDS)
        tg.Store(own.folder).put(new)
        tg.Store(own.folder).prune("mood", keep=0)
        reads.go.set()
        same(*results(waiting), own.said(text, 2, new))


# -- broken files


def truncate(folder: Path) -> None:
    path = folder / "graft.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flip(folder: Path) -> None:
    data = bytearray((folder / "graft.safetensors").read_bytes())
    data[-3] ^= 0xFF
    (folder / "graft.safetensors").write_bytes(data)


def change(**fields: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        record = json.loads((folder / "graft.json").read_text())
        (folder / "graft.json").write_text(json.dumps({**record, **fields}))

    return changed


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "a flipped bit": flip,
    "empty": lambda folder: (folder / "graft.safetensors").write_bytes(b""),
    "no tensors": lambda folder: (folder / "graft.safetensors").unlink(),
    "no record": lambda folder: (folder / "graft.json").unlink(),
    "half a record": lambda folder: os.truncate(folder / "graft.json", 100),
    "no JSON": lambda folder: (folder / "graft.json").write_bytes(b"\xff\xfe{"),
    "a list": lambda folder: (folder / "graft.json").write_text("[]"),
    "deep": lambda folder: (folder / "graft.json").write_text("[" * 100_000),
    "another method": change(method={"method": "adapter", "size": 9}),
    "an unknown method": change(method={"method": "magic"}),
    "other labels": change(head={"kind": "classification", "labels": ["a", "b", "c", "d"]}),
    "columns that are none": change(task={"columns": None}),
    "columns that are a list": change(task={"columns": ["text"]}),
    "labels that are a number": change(head=None, task={"labels": 5}),
    "settings that are a list": change(training={"settings": [1]}),
    "a length that is a word": change(training={"settings": {"max_length": "long"}}),
    "a length below zero": change(training={"settings": {"max_length": -3}}),
    "a wording that is none": change(head=None, task={"wording": 5}),
    "no such kind": change(head=None, task={"kind": "poem"}),
    "a folder where a file was": lambda folder: ((folder / "graft.json").unlink(), (folder / "graft.json").mkdir()),  # type: ignore[dict-item, return-value]
    "another's tensors": lambda folder: shutil.copy(folder.parent / "mood" / "graft.safetensors", folder),  # type: ignore[dict-item, return-value]
    "another's files": lambda folder: [  # type: ignore[dict-item, return-value]
        shutil.copy(folder.parent / "stars" / name, folder) for name in ("graft.safetensors",)
    ],
}


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "on disk"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_graft_fails_alone_and_answers_when_it_is_mended(own: World, damage: str, resident: bool) -> None:
    folder, whole = own.folder / "topic", own.folder.parent / "whole"
    shutil.copytree(folder, whole)
    bad, good = ("topic", "the film was good"), [("mood", "the film was good"), ("where", "it was", "a good film")]
    with engine_on(own.folder) as engine:
        if resident:
            own.check(ask(engine, [bad]), [bad])
        DAMAGES[damage](folder)
        for _ in range(2):
            found = ask(engine, [good[0], bad, good[1], bad])
            own.check([found[0], found[2]], good)
            for wrong in (found[1], found[3]):
                assert isinstance(wrong, Unreadable), f"{wrong!r}"
                assert not re.search(r"'v\d+'", str(wrong)), f"a name that nobody gave: {wrong}"
        for path in [*folder.iterdir()]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        own.check(ask(engine, [bad, *good]), [bad, *good])


def test_a_record_of_any_shape_fails_alone(own: World) -> None:
    """Every field of a record in turn is replaced by something of another type: no question is lost over it."""
    path = own.folder / "topic" / "graft.json"
    whole = path.read_text()
    good, problems = ("mood", "good"), []
    with engine_on(own.folder) as engine:
        for keys in paths(json.loads(whole)):
            for value in (None, 5, "word", [], {}, [None], {"a": 1}):
                record = json.loads(whole)
                holder = record
                for key in keys[:-1]:
                    holder = holder[key]
                if type(holder[keys[-1]]) is type(value):
                    continue
                holder[keys[-1]] = value
                path.write_text(json.dumps(record))
                with Held(engine) as held:  # so that they are in one batch
                    first = engine.submit([good])
                    assert held.entered.wait(SECONDS)
                    futures = engine.submit([("topic", "the film"), good])
                    until(lambda: engine._inbox.empty())
                engine._forward = held.original  # type: ignore[method-assign]
                wrong, right, _ = results([*futures, *first])
                if not isinstance(wrong, Answer | Unreadable) or not isinstance(right, Answer):
                    problems.append(f"{'.'.join(keys)} = {value!r}: {wrong!r}, and beside it {right!r}")
    assert not problems, "\n".join(problems)


def paths(record: Any) -> Iterator[list[Any]]:
    for key in record if isinstance(record, dict) else ():
        yield [key]
        for rest in paths(record[key]):
            yield [key, *rest]


def test_a_file_that_could_not_be_read_once_is_read_again(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, a permission that is given back: nothing on the file's face tells that it is mended."""
    text, read = ("mood", "good"), Path.read_bytes
    failing = True

    def refused(path: Path) -> bytes:
        if failing and path.name == "graft.json":
            raise OSError(24, "Too many open files")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with engine_on(own.folder) as engine:
        [wrong] = ask(engine, [text])
        assert isinstance(wrong, Unreadable) and "Too many open files" in str(wrong)
        failing = False
        own.check(ask(engine, [text]), [text])


def test_a_broken_task_costs_no_memory_however_often_it_is_asked(own: World) -> None:
    truncate(own.folder / "mood")
    (own.folder / "topic" / "graft.json").write_text("{")

    def length(error: BaseException) -> int:
        count, trace = 0, error.__traceback__
        while trace is not None:
            count, trace = count + 1, trace.tb_next
        return count

    with engine_on(own.folder) as engine:
        for task in ("mood", "topic"):
            lengths = [length(ask(engine, [(task, "x")])[0]) for _ in range(10)]
            assert max(lengths) == lengths[1], "an error that is raised again and again remembers every time"


def test_a_graft_for_another_backbone_is_unreadable(own: World) -> None:
    torch.manual_seed(1)
    other = tg.Backbone(hf.BertModel(reader().model.config).eval(), tiny.tokenizer(), "other")
    own.store.put(v2(World(own.folder, other), "foreign"))
    with engine_on(own.folder) as engine:
        wrong, right = ask(engine, [("foreign", "good"), ("mood", "good")])
        assert isinstance(wrong, Unreadable) and "another backbone" in str(wrong)
        same(right, own.said(("mood", "good")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("task", ["mood", "flags", "stars", "nli", "entities", "where", "price"])
def test_weights_that_are_no_numbers_harm_nobody_else(own: World, task: str, value: float) -> None:
    graft = own.grafts[task]
    assert isinstance(graft, tg.Graft)
    tensors = {name: tensor.clone() for name, tensor in graft.tensors.items()}
    tensors["head.bias"][0] = value
    own.store.put(tg.Graft(**{**vars(graft), "tensors": tensors}))
    draw = random.Random(0)
    good = [asking_of(own, name, draw) for name in own.grafts if name != task]
    with engine_on(own.folder) as engine:
        with Held(engine):
            futures = engine.submit([*good, asking_of(own, task, draw), *good])
            until(lambda: engine._inbox.empty())
        found = results(futures)
        wrong = found[len(good)]
        if isinstance(wrong, Answer) and value != value:
            pytest.fail(f"not a number was read as an answer: {wrong}")
        if isinstance(wrong, Answer):
            json.dumps(wrong.to_json(), allow_nan=False)
        else:
            assert isinstance(wrong, Unreadable) and task in str(wrong), repr(wrong)
        own.check([*found[: len(good)], *found[len(good) + 1 :]], [*good, *good])


# -- a backbone that fails


def test_a_batch_that_fails_says_so_and_the_next_one_works(reading: World, caplog: pytest.LogCaptureFixture) -> None:
    questions = [("mood", "good"), ("stars", "bad"), ("where", "it was", "the good film " * 15)]
    with engine_on(reading.folder) as engine:
        original = engine._forward

        def fails(rows: Any) -> int:
            engine._forward = original  # type: ignore[method-assign]
            raise RuntimeError("the secret of the matter")

        engine._forward = fails  # type: ignore[method-assign, assignment]
        with caplog.at_level(logging.ERROR):
            found = ask(engine, questions)
        broken = [error for error in found if isinstance(error, Failed)]
        assert broken and len({error.id for error in broken}) == 1
        assert broken[0].id in caplog.text and "the secret of the matter" in caplog.text
        assert broken[0].id in str(broken[0]) and "secret" not in str(broken[0])
        for answer, asking in zip(found, questions, strict=True):
            if not isinstance(answer, Failed):
                same(answer, reading.said(asking))
        reading.check(ask(engine, questions), questions)
        assert engine.waiting == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_batch_that_does_not_fit_in_memory_is_split(reading: World, most: int) -> None:
    questions = [asking for asking in askings(reading, 4, 30) if asking[0] != "where"]
    with engine_on(reading.folder) as engine:
        original = engine._forward

        def tight(rows: Any) -> int:
            if len(rows) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(rows)

        engine._forward = tight  # type: ignore[method-assign, assignment]
        found = ask(engine, questions)
        if most:
            reading.check(found, questions)
        else:
            assert {type(error) for error in found} == {Failed}
        engine._forward = original  # type: ignore[method-assign]
        reading.check(ask(engine, questions[:3]), questions[:3])


class Rude(Watch):
    def batch(self, rows: int, tokens: int, padded: int, seconds: float) -> None:
        raise RuntimeError("a metric that fails")

    def answered(self, asked: Any, error: BaseException | None) -> None:
        raise RuntimeError("another one")


def test_a_watch_that_fails_costs_no_answer(reading: World) -> None:
    with engine_on(reading.folder, watch=Rude()) as engine:
        for _ in range(2):
            questions = [("mood", "good"), ("none", "good"), ("stars", "bad")]
            found = ask(engine, questions)
            reading.check(found[::2], questions[::2])
            assert isinstance(found[1], UnknownTask)


# -- too much, too late, not wanted any more


def test_more_than_may_wait_is_refused_at_once_and_nothing_is_lost(reading: World) -> None:
    with engine_on(reading.folder, waiting=10) as engine:
        with Held(engine) as held:
            taken = engine.submit([("mood", "good")] * 8)
            assert held.entered.wait(SECONDS)
            started = time.monotonic()
            with pytest.raises(Overloaded, match="ask again in") as refused:
                engine.submit([("mood", "bad")] * 3)
            assert time.monotonic() - started < 1 and refused.value.retry_after > 0
            assert engine.waiting == 8, "of a call that is refused nothing is taken"
            taken += engine.submit([("mood", "bad")] * 2)
            with pytest.raises(Overloaded):
                engine.submit([("none", "bad")])
            with pytest.raises(Overloaded):
                asyncio.run(engine.ask([("mood", "bad")]))
        reading.check(results(taken), [("mood", "good")] * 8 + [("mood", "bad")] * 2)
        assert engine.waiting == 0
        with Held(engine) as held:
            taken = engine.submit([("mood", "good")] * 10)
            with pytest.raises(Overloaded) as refused:
                engine.submit([("mood", "bad")])
            assert refused.value.retry_after > 0
        results(taken)


def test_a_call_that_can_never_be_taken_is_not_told_to_come_again(reading: World) -> None:
    with engine_on(reading.folder, waiting=4) as engine:
        with pytest.raises(GraftError) as refused:
            engine.submit([("mood", "good")] * 5)
        assert not isinstance(refused.value, Overloaded), str(refused.value)


def test_predict_waits_where_submit_is_refused(reading: World) -> None:
    questions = askings(reading, 5, 30)
    with engine_on(reading.folder, waiting=3, tokens=64) as engine:
        reading.check(engine.predict(iter(questions)), questions)
        assert engine.predict([]) == [] and engine.submit([]) == [] and asyncio.run(engine.ask([])) == []


def test_answers_that_come_too_late_are_not_computed(reading: World) -> None:
    with engine_on(reading.folder) as engine:
        with Held(engine) as held:
            first = engine.submit([("mood", "good")], timeout=SECONDS)
            assert held.entered.wait(SECONDS)
            late = engine.submit([("mood", "bad"), ("where", "it", "good " * 60)], timeout=0.05)
            timely = engine.submit([("stars", "bad")], timeout=SECONDS)
            time.sleep(0.1)
        found = results([*first, *late, *timely])
        reading.check([found[0], found[3]], [("mood", "good"), ("stars", "bad")])
        assert [type(error) for error in found[1:3]] == [Expired, Expired] and "seconds" in str(found[1])
        assert sum(held.rows) == 2 and engine.waiting == 0
        assert isinstance(ask(engine, [("mood", "good")], timeout=-1)[0], Expired)
        reading.check(ask(engine, [("mood", "good")], timeout=SECONDS), [("mood", "good")])


def test_a_question_that_is_late_is_told_so_in_time(reading: World) -> None:
    """Not only when the model comes round to it, which may take as long as all that is before it."""
    with engine_on(reading.folder) as engine:
        with Held(engine) as held:
            first = engine.submit([("mood", "good")])
            assert held.entered.wait(SECONDS)
            started = time.monotonic()
            [late] = asyncio.run(asyncio.wait_for(engine.ask([("mood", "bad")], timeout=0.1), 3))
            assert isinstance(late, Expired) and time.monotonic() - started < 2
        reading.check(results(first), [("mood", "good")])
        until(lambda: engine.waiting == 0)
        assert sum(held.rows) == 1


def test_cancelled_questions_are_not_computed_and_harm_nobody(reading: World) -> None:
    counted = Counted()
    with engine_on(reading.folder, watch=counted) as engine:
        with Held(engine) as held:
            running = engine.submit([("mood", "good")])
            assert held.entered.wait(SECONDS)
            waiting = engine.submit([("mood", "bad"), ("stars", "bad"), ("where", "it", "good " * 60)])
            until(lambda: len(engine._ready) > 3)  # all of them, so that they are in one batch
            assert not running[0].cancel(), "what is being computed cannot be stopped"
            assert waiting[0].cancel() and waiting[2].cancel()
        reading.check(results([running[0], waiting[1]]), [("mood", "good"), ("stars", "bad")])
        assert {type(error) for error in results([waiting[0], waiting[2]])} == {CancelledError}
        until(lambda: engine.waiting == 0 and len(counted.answers) == 4)
        assert sum(held.rows) == 2
        reading.check(ask(engine, [("mood", "good")]), [("mood", "good")])


def test_cancelled_before_it_is_tokenised_or_read(reading: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(reading.folder) as engine, Reading(monkeypatch) as reads:
        [future] = engine.submit([("mood", "good")])
        assert reads.entered.wait(SECONDS) and future.cancel()
        futures = engine.submit([("none", "x")] * 50)
        for one in futures:
            one.cancel()
        reads.go.set()
        until(lambda: engine.waiting == 0)
        reading.check(ask(engine, [("mood", "good")]), [("mood", "good")])


@pytest.mark.parametrize("reason", ["expired", "cancelled", "another backbone", "too large"])
def test_grafts_that_are_read_and_not_wanted_do_not_stop_the_readers(
    own: World, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Only so many grafts are read ahead: those that will never be placed must not count for ever."""
    monkeypatch.setattr(engine_module, "READ_AHEAD", 2)
    alone = own.alone
    if reason == "another backbone":
        torch.manual_seed(1)
        alone = tg.Backbone(hf.BertModel(reader().model.config).eval(), tiny.tokenizer(), "other")
    size = 200 if reason == "too large" else 4
    for number in range(4):
        own.store.put(small(alone, number, size))
    memory = 60_000 if reason == "too large" else None
    with engine_on(own.folder, memory=memory) as engine:
        with Held(engine) as held:
            first = engine.submit([("stars", "good")])
            assert held.entered.wait(SECONDS)
            unwanted = [
                future
                for number in range(4)
                for future in engine.submit([(f"t{number}", "good")], timeout=0.05 if reason == "expired" else None)
            ]
            if reason == "cancelled":
                until(lambda: len(engine._unplaced) == 2)
                cancelled = [future.cancel() for future in unwanted]
                assert all(cancelled)
            time.sleep(0.1)
        own.check(results(first), [("stars", "good")])
        errors = results(unwanted)
        expected = {"expired": Expired, "cancelled": CancelledError}.get(reason, Unreadable)
        assert {type(error) for error in errors} == {expected}, errors
        questions = [("mood", "good"), ("topic", "good"), ("plain", "good")]
        own.check(ask(engine, questions), questions)


# -- the end


def test_closing_answers_all_that_was_taken_and_gives_the_backbone_back(reading: World) -> None:
    backbone = reader()
    names = [path for path, _ in backbone.model.named_modules()]
    inputs = dict(backbone.tokenizer(["the film was good"], return_tensors="pt"))
    with torch.no_grad():
        before = backbone.model(**inputs).last_hidden_state
    questions = askings(reading, 6, 30)
    for _ in range(2):
        engine = Engine(backbone, reading.folder)
        with Held(engine):
            futures = engine.submit(questions)
            closing = threading.Thread(target=engine.close, daemon=True)
            closing.start()
            until(lambda engine=engine: engine._closed)  # type: ignore[misc]
            with pytest.raises(Closed):
                engine.submit([("mood", "late")])
            with pytest.raises(Closed):
                engine.predict([("mood", "late")])
        closing.join(SECONDS)
        assert not closing.is_alive()
        reading.check(results(futures), questions)
        close(engine)  # a second time
        with pytest.raises(Closed):
            engine.put(small(reading.alone, 1))
        assert not hasattr(backbone.model, "taskgraft")
        assert [path for path, _ in backbone.model.named_modules()] == names
        with torch.no_grad():
            assert torch.equal(backbone.model(**inputs).last_hidden_state, before)
        assert all(parameter.requires_grad for parameter in backbone.model.parameters())


def test_a_backbone_that_was_being_trained_is_given_back_so(reading: World) -> None:
    backbone = reader()
    backbone.model.train()
    backbone.model.embeddings.eval()
    before = [module.training for module in backbone.model.modules()]
    with engine_on(reading.folder, backbone) as engine:
        reading.check(ask(engine, [("mood", "good")]), [("mood", "good")])
    assert [module.training for module in backbone.model.modules()] == before


def test_an_engine_that_was_never_asked_closes(tmp_path: Path) -> None:
    with engine_on(tmp_path / "nothing there") as engine:
        assert isinstance(ask(engine, [("mood", "good")])[0], UnknownTask)
        assert engine.library.names() == []
    assert not (tmp_path / "nothing there").exists(), "asking changes nothing on disk"


def test_whoever_closes_waits_until_all_is_done(reading: World) -> None:
    engine = Engine(reader(), reading.folder)
    with Held(engine) as held:
        [future] = engine.submit([("mood", "good")])
        assert held.entered.wait(SECONDS)
        closings = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
        for closing in closings:
            closing.start()
        time.sleep(0.2)
        assert all(closing.is_alive() for closing in closings), "closed, it says, and an answer is still to come"
    for closing in closings:
        closing.join(SECONDS)
    assert future.done()


def test_those_who_wait_for_room_hear_that_it_is_closed(reading: World) -> None:
    engine = Engine(reader(), reading.folder, waiting=1)
    heard: list[Any] = []

    def predict() -> None:
        try:
            heard.append(engine.predict([("mood", "good"), ("stars", "good")]))
        except GraftError as error:
            heard.append(error)

    with Held(engine) as held:
        asking = threading.Thread(target=predict, daemon=True)
        asking.start()
        assert held.entered.wait(SECONDS)
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        asking.join(SECONDS)
        assert [type(error) for error in heard] == [Closed]
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_threads_do_not_outlive_their_engine(reading: World) -> None:
    gc.collect()
    before = threading.active_count()
    for _ in range(3):
        with engine_on(reading.folder) as engine:
            engine.predict([("mood", "good")])
    assert threading.active_count() == before


# -- many at once


def test_batches_run_beside_one_another(own: World) -> None:
    """As many as there are threads: each waits inside its batch until the others are there too."""
    together = threading.Barrier(3)
    name = next(iter(own.grafts))
    draw = random.Random(0)
    questions = [asking_of(own, name, draw, 12) for _ in range(3)]
    with engine_on(own.folder, tokens=1, threads=3) as engine:
        ask(engine, questions)  # now it is on the model
        forward = engine._forward

        def held(rows: Sequence[Any]) -> int:
            together.wait(SECONDS)
            return forward(rows)

        engine._forward = held  # type: ignore[method-assign]
        own.check(ask(engine, questions), questions)
        assert not together.broken


@pytest.mark.parametrize(("running", "memory"), [(None, 60_000), (3, 60_000), (3, 10_000_000)])
def test_many_threads_ask_while_tasks_come_and_go(own: World, running: int | None, memory: int) -> None:
    """Every question is answered once: by the version that was there, or by nobody if there was none."""
    draw = random.Random(0)
    asked = [asking_of(own, task, draw, 12) for task in own.grafts for _ in range(3)]
    wanted = {repr(asking): own.said(asking) for asking in asked}
    comers = [small(own.alone, number, 3 + number, "guest") for number in range(3)]
    guest = ("guest", "the film was good")
    allowed = [own.said(guest, None, graft) for graft in comers]
    problems: list[str] = []
    counted = Counted()
    with engine_on(own.folder, memory=memory, tokens=200, threads=running, watch=counted) as engine:
        over = threading.Event()

        def change() -> None:
            number = 0
            while not over.is_set():
                for _ in range(2):
                    engine.put(comers[number % 3])
                    number += 1
                if number % 4:
                    engine.rollback("guest")
                engine.remove("guest")

        def query(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(50):
                asking = mine.choice([*asked, guest, guest])
                try:
                    [answer] = ask(engine, [asking])
                    if isinstance(answer, UnknownTask) and asking is guest:
                        continue
                    if asking is not guest:
                        same(answer, wanted[repr(asking)])
                    elif not any(answer.probabilities == pytest.approx(one.probabilities, abs=1e-5) for one in allowed):
                        problems.append(f"{answer} is of no version")
                except BaseException as error:
                    problems.append(f"{asking}: {error!r}")

        threads = [threading.Thread(target=query, args=(seed,), daemon=True) for seed in range(8)]
        changing = threading.Thread(target=change, daemon=True)
        changing.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * SECONDS)
        over.set()
        changing.join(SECONDS)
        assert not changing.is_alive() and not any(thread.is_alive() for thread in threads)
        assert not problems, problems[:3]
        until(lambda: engine.waiting == 0 and len(counted.answers) >= 400)
        assert len(counted.answers) == 400, "each is answered once"
        assert counted.most_held <= engine.residents.budget
        with engine._lock:
            known = [*engine.library._known.values(), *engine.residents.order.values()]
            assert all(version.waiting == 0 for version in known if not isinstance(version, tuple))


def test_one_may_ask_from_where_an_answer_arrives(reading: World) -> None:
    arrived = threading.Event()
    with engine_on(reading.folder) as engine:
        second: list[Any] = []

        def then(_: Any) -> None:
            second.extend(engine.submit([("stars", "good")]))
            arrived.set()

        [future] = engine.submit([("mood", "good")])
        future.add_done_callback(then)
        assert arrived.wait(SECONDS)
        reading.check(results([future, *second]), [("mood", "good"), ("stars", "good")])


def test_from_an_event_loop(reading: World) -> None:
    questions = [*askings(reading, 7, 12), ("none", "x"), ("mood", 5)]

    async def main() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.002)

        ticking = asyncio.create_task(tick())
        many = await asyncio.gather(*(engine.ask([asking], timeout=SECONDS) for asking in questions))
        ticking.cancel()
        return [*await engine.ask(questions), *(answers[0] for answers in many)], ticks

    with engine_on(reading.folder) as engine:
        found, ticks = asyncio.run(asyncio.wait_for(main(), SECONDS))
    half = len(questions)
    for part in (found[:half], found[half:]):
        reading.check(part[:12], questions[:12])
        assert isinstance(part[12], UnknownTask) and isinstance(part[13], GraftError)
    assert ticks > 1


def test_a_coroutine_that_is_cancelled_leaves_the_engine_whole(reading: World) -> None:
    async def main(engine: Engine, held: Held) -> None:
        first = asyncio.create_task(engine.ask([("mood", "good")]))
        await asyncio.to_thread(held.entered.wait, SECONDS)
        waiting = asyncio.create_task(engine.ask([("stars", "good"), ("where", "it", "good " * 60)]))
        other = asyncio.create_task(engine.ask([("topic", "good")]))
        await asyncio.sleep(0.05)
        first.cancel()
        waiting.cancel()
        gone = await asyncio.gather(first, waiting, return_exceptions=True)
        assert {type(error) for error in gone} == {asyncio.CancelledError}
        held.go.set()
        reading.check(await other, [("topic", "good")])
        reading.check(await engine.ask([("mood", "bad")]), [("mood", "bad")])

    with engine_on(reading.folder) as engine, Held(engine) as held:
        asyncio.run(asyncio.wait_for(main(engine, held), SECONDS))
        until(lambda: engine.waiting == 0)


def test_a_loop_that_is_gone_leaves_the_engine_whole(reading: World) -> None:
    with engine_on(reading.folder) as engine, Held(engine) as held:

        async def main() -> None:
            task = asyncio.create_task(engine.ask([("mood", "good"), ("stars", "good")]))
            await asyncio.to_thread(held.entered.wait, SECONDS)
            task.cancel()

        asyncio.run(main())
        held.go.set()
        until(lambda: engine.waiting == 0)
        reading.check(ask(engine, [("mood", "bad")]), [("mood", "bad")])


@given(st.integers(1, 1 << 20))
def test_buckets_are_few_and_never_too_small(number: int) -> None:
    assert number <= bucket(number) <= max(1.5 * number, number + 1) and bucket(bucket(number)) == bucket(number)
