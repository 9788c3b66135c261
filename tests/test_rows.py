"""Rows: threads, packed batches, ids in the batch, and a model class's own head."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import taskgraft as tg

from families import SMALL, batch, build, perturb


def grafted(tasks: int = 3, dtype: torch.dtype = torch.float64) -> Any:
    model = build("bert", dtype)
    tg.graft(model, tg.Adapter(size=4, head_dropout=0.0), {f"t{i}": 2 + i for i in range(tasks)})
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads"))


def test_two_threads_do_not_see_each_others_rows() -> None:
    """Forward and backward at once on one checkpointed model, each thread with rows of its own."""
    model = grafted().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = batch(model)
    choices = [["t0"] * 6, ["t1", "t2"] * 3]

    def logits(rows: list[str]) -> Tensor:
        with tg.rows(model, rows):
            return model(**inputs).logits

    parameters = list(tg.trainable(model).values())

    def gradients(rows: list[str]) -> list[Tensor]:
        values = logits(rows)
        return list(torch.autograd.grad(torch.where(torch.isfinite(values), values, 0).square().sum(), parameters))

    expected = [gradients(rows) for rows in choices]
    failures: list[str] = []
    start = threading.Barrier(2)

    def work(number: int) -> None:
        start.wait()
        for _ in range(15):
            for got, want in zip(gradients(choices[number]), expected[number], strict=True):
                if not torch.allclose(got, want, atol=1e-12):
                    failures.append(f"thread {number} saw other rows")

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_rows_end_with_their_block_and_nest() -> None:
    model = grafted()
    inputs = batch(model, rows=2)
    with tg.rows(model, ["t0", "t1"]):
        outer = model(**inputs).logits
        with tg.rows(model, ["t1", "t0"]):
            inner = model(**inputs).logits
        assert torch.equal(outer, model(**inputs).logits)
    assert not torch.equal(outer, inner)
    with pytest.raises(tg.GraftError, match="no row says which"):
        model(**inputs)


def test_one_task_needs_no_rows() -> None:
    model = grafted(tasks=1)
    inputs = batch(model)
    with tg.rows(model, "t0"):
        expected = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)


def test_task_ids_in_the_batch_are_rows() -> None:
    model = grafted()
    inputs = batch(model, rows=3)
    rows = ["t2", None, "t0"]
    with tg.rows(model, rows):
        expected = model(**inputs).logits
        with pytest.raises(tg.GraftError, match="use one of them"):
            model(**inputs, task_ids=tg.task_ids(model, rows))
    assert torch.equal(model(**inputs, task_ids=tg.task_ids(model, rows)).logits, expected)
    with pytest.raises(tg.GraftError, match=r"\[7\] are of no task"):
        model(**inputs, task_ids=torch.tensor([1, 2, 7]))


def test_ids_stay_valid_when_tasks_come_and_go() -> None:
    model = grafted()
    before = tg.task_ids(model, ["t2"])
    tg.remove_task(model, "t0")
    tg.add_task(model, "t3", tg.Adapter(size=4), 2)
    assert torch.equal(tg.task_ids(model, ["t2"]), before)
    assert tg.task_ids(model, ["t3"]).item() not in (0, 1, 2, 3)
    assert tg.tasks_of(model) == ["t1", "t2", "t3"]


def test_sequences_packed_end_to_end_route_by_token() -> None:
    """Three sequences in one row, kept apart by a block mask, equal the same three padded."""
    model = grafted()
    lengths, rows = [5, 2, 4], ["t0", None, "t2"]
    padded = batch(model, rows=3, length=5)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    ids = padded["input_ids"].clamp(min=3)
    with tg.rows(model, rows):
        expected = model(input_ids=ids * mask, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    block = (owner[:, None] == owner[None])[None, None]
    flat = torch.cat([ids[i, :n] for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    additive = torch.zeros(block.shape, dtype=torch.float64).masked_fill(~block, float("-inf"))
    with tg.rows(model, rows, lengths=lengths):
        packed = model(input_ids=flat, attention_mask=additive, position_ids=positions, output_hidden_states=True)
        found = packed.hidden_states[-1][0]
    for i, n in enumerate(lengths):
        start = sum(lengths[:i])
        assert torch.allclose(found[start : start + n], expected[i, :n], atol=1e-10)
    labels = torch.tensor([1, -100, 0])
    with tg.rows(model, rows, lengths=lengths):
        loss = model(input_ids=flat, attention_mask=additive, position_ids=positions, labels=labels).loss
    with tg.rows(model, rows):
        assert torch.allclose(loss, model(input_ids=ids * mask, attention_mask=mask, labels=labels).loss, atol=1e-10)
    with tg.rows(model, rows, lengths=[5, 2, 5]), pytest.raises(tg.GraftError, match="sum to 12"):
        model(input_ids=flat, attention_mask=additive, position_ids=positions)


def test_rows_of_no_task_keep_the_model_classes_own_head() -> None:
    torch.manual_seed(0)
    model = perturb(hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=4))).double().eval()
    inputs = batch(model, rows=3)
    own = model(**inputs).logits
    tg.graft(model, tg.Adapter(size=4), {"a": 2, "b": 6})
    with tg.rows(model, ["a", None, "b"]):
        mixed = model(**inputs).logits
    assert mixed.shape == (3, 6)
    assert torch.allclose(mixed[1, :4], own[1], atol=1e-12) and not torch.isfinite(mixed[1, 4:]).any()
    with tg.rows(model, None):
        assert torch.equal(model(**inputs).logits, own)
    with tg.rows(model, ["a"] * 3):
        assert torch.allclose(model(**inputs).logits[0, :2], mixed[0, :2], atol=1e-12)


def test_names_alone_get_a_head_like_the_classes_own() -> None:
    torch.manual_seed(0)
    for cls, shape in (
        (hf.RobertaForSequenceClassification, (2, 3)),
        (hf.LlamaForSequenceClassification, (2, 3)),
        (hf.DistilBertForSequenceClassification, (2, 3)),
    ):
        config = cls.config_class(
            num_labels=3,
            **(
                SMALL
                if cls is not hf.DistilBertForSequenceClassification
                else {
                    "vocab_size": 99,
                    "dim": 32,
                    "n_layers": 2,
                    "n_heads": 4,
                    "hidden_dim": 48,
                    "max_position_embeddings": 40,
                }
            ),
        )
        model = tg.graft(cls(config).eval(), tg.Adapter(size=4), ["a", "b"])
        with tg.rows(model, ["a", "b"]):
            assert model(**batch(model, rows=2)).logits.shape == shape


@pytest.mark.parametrize(
    "cls", [hf.RobertaForSequenceClassification, hf.LlamaForCausalLM, hf.GPT2ForSequenceClassification]
)
def test_a_head_reads_the_last_hidden_state_of_any_class(cls: Any) -> None:
    """The last of `hidden_states` is what the headless model would give."""
    torch.manual_seed(0)
    config = (
        cls.config_class(**SMALL)
        if cls is not hf.GPT2ForSequenceClassification
        else hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=40, pad_token_id=0)
    )
    model = perturb(cls(config)).double().eval()
    inputs = batch(model)
    output = model(**inputs, output_hidden_states=True)
    assert torch.equal(output.hidden_states[-1], model.base_model(**inputs).last_hidden_state)


class CountOperations(TorchDispatchMode):
    """How many tensor operations run inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_forward_pass_has_no_loop_over_tasks() -> None:
    """The same number of operations for 2 and for 200 tasks, every row of the larger batch a different one."""
    model = build("bert")
    tg.graft(model, tg.Adapter(size=4), {f"t{i}": 2 for i in range(2)})
    for i in range(2, 200):
        tg.add_task(model, f"t{i}", tg.Adapter(size=4), 2, seed=i, train=False)
    perturb(model, seed=1, only=lambda path: ".bank." in path)
    tg.train_only(model, [])
    counts = []
    for tasks in (2, 200):
        rows = [f"t{i % tasks}" for i in range(200)]
        inputs = batch(model, rows=200)
        with torch.no_grad(), tg.rows(model, rows), CountOperations() as operations:
            model(**inputs)
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_a_thousand_tasks_in_one_bank() -> None:
    model = build("bert")
    tg.graft(model, tg.Adapter(size=4, init_std=0.1), {"t0": 2})
    for i in range(1, 1000):
        tg.add_task(model, f"t{i}", tg.Adapter(size=4, init_std=0.1), 2, seed=i, train=False)
    rows = [f"t{37 * i % 1000}" for i in range(32)]
    inputs = batch(model, rows=32)
    with torch.no_grad():
        with tg.rows(model, rows):
            mixed = model(**inputs).logits
        for i in (0, 1, 17, 31):
            with tg.rows(model, [rows[i]]):
                alone = model(**{key: value[i : i + 1] for key, value in inputs.items()}).logits
            assert torch.allclose(mixed[i], alone[0], atol=1e-5)
    assert len({tuple(row.tolist()) for row in mixed}) == 32
    bank = next(iter(next(iter(model.taskgraft.kinds.values())).banks.values()))
    assert bank.capacity == 1024


def test_rows_named_before_their_tasks_changed_are_refused() -> None:
    """A freed slot may be another task's by now, and a trained one lies elsewhere: never a silently wrong result."""
    model = grafted()
    inputs = batch(model, rows=2)
    with tg.rows(model, ["t0", "t1"]):
        tg.train_only(model, "t1")
        with pytest.raises(tg.GraftError, match="name them again"):
            model(**inputs)
    with tg.rows(model, ["t0", "t0"]):
        expected = model(**inputs).logits
        tg.add_task(model, "t9", tg.Adapter(size=4), 2, train=False)  # a newcomer at rest changes nothing for others
        tg.remove_task(model, "t2")
        assert torch.equal(model(**inputs).logits, expected)
    with tg.rows(model, ["t0", "t0"]):
        tg.remove_task(model, "t0")
        with pytest.raises(tg.GraftError, match="name them again"):
            model(**inputs)


def test_a_task_may_be_called_none() -> None:
    model = build("bert")
    tg.graft(model, tg.Adapter(size=4), {"None": 2, "b": 3})
    tg.train_only(model, [])
    with tg.rows(model, ["b", None]):
        assert not torch.isfinite(model(**batch(model, rows=2)).logits[1]).any()


def test_one_block_of_rows_can_be_entered_twice() -> None:
    model = grafted()
    rows = tg.rows(model, "t0")
    with rows, rows:
        pass
    assert model.taskgraft.bound.route is None


def test_labels_of_a_task_without_a_head_are_not_dropped_silently() -> None:
    model = tg.graft(build("llama"), tg.Adapter(size=4), {"classifies": 2, "writes": None})
    inputs = batch(model, rows=2)
    with tg.rows(model, ["classifies", "writes"]):
        with pytest.raises(tg.GraftError, match="'writes' has no head"):
            model(**inputs, labels=torch.tensor([0, 1]))
        with pytest.raises(tg.GraftError, match="'classifies' has a head and writes no text"):
            model.generate(**inputs, max_new_tokens=2)


def test_generate_takes_its_beams_from_wherever_they_are_given() -> None:
    model = tg.graft(build("t5"), tg.Adapter(size=4), ["a", "b"])
    inputs = batch(model, rows=2)["input_ids"]
    with tg.rows(model, ["a", "b"]):
        expected = model.generate(inputs, num_beams=3, max_new_tokens=3)
        assert torch.equal(expected, model.generate(inputs, hf.GenerationConfig(num_beams=3, max_new_tokens=3)))
        model.generation_config.num_beams = 3
        assert torch.equal(expected, model.generate(inputs, max_new_tokens=3))


def test_rows_of_no_task_keep_the_own_head_of_a_question_answerer() -> None:
    torch.manual_seed(0)
    model = hf.BertForQuestionAnswering(hf.BertConfig(**SMALL)).eval()
    inputs = batch(model, rows=2)
    own = model(**inputs)
    tg.graft(model, tg.Adapter(size=4), ["a"])
    with tg.rows(model, ["a", None]):
        found = model(**inputs).token_logits[1]
    assert torch.allclose(found[:, 0], own.start_logits[1], atol=1e-5)
    assert torch.allclose(found[:, 1], own.end_logits[1], atol=1e-5)


def test_a_task_that_came_in_inference_mode_is_like_any_other() -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=4), {"a": 2})
    with torch.inference_mode():
        tg.add_task(model, "b", tg.Adapter(size=4), 2, train=False)
    for name in "cde":  # the banks grow
        tg.add_task(model, name, tg.Adapter(size=4), 2)
    with tg.rows(model, ["b", "e"]):
        model(**batch(model, rows=2)).logits.sum().backward()
    assert tg.tasks_of(model) == ["a", "b", "c", "d", "e"]
