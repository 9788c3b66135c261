"""Whole models by the kernels: the same logits and gradients as by torch's operations, residuals joined or not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taskgraft as tg
from taskgraft.nn import norms

from families import SAMPLES, batch, build, perturb

norm_kernels = pytest.importorskip("taskgraft.nn.norm_kernels", reason="the kernels need Triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy, in the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JOINS = {"bert": 4, "roberta": 4, "electra": 4, "deberta-v2": 4, "mpnet": 2}  # in two layers
OTHERS = ["distilbert", "albert", "modernbert", "t5", "bart", "gpt2", "llama", "gemma3_text"]
MIXED, BARE, ALIKE = ["b", "a", "b"], ["b", None, "a"], ["a", "a"]
Rows = Sequence[str | None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many norms were computed by the kernel, of those with a residual, and by torch's operations."""
    found: Counter[str] = Counter()
    fused, plain = norm_kernels.row_norm, norms.normalise

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        found["fused"] += 1
        found["joined"] += kwargs["residual"] is not None
        return fused(*args, **kwargs)

    def counting_plain(*args: Any, **kwargs: Any) -> Tensor:
        found["plain"] += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(norm_kernels, "row_norm", counting)
    monkeypatch.setattr(norms, "normalise", counting_plain)
    return found


def grafted(name: str, method: tg.Method | None = None, tasks: str = "abc") -> Any:
    model = build(name).to(DEVICE)
    heads = dict.fromkeys(tasks) if SAMPLES[name].writes else {task: 2 + i for i, task in enumerate(tasks)}
    tg.graft(model, method or tg.Adapter(size=8), heads)
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_"))


def logits(model: Any, inputs: dict[str, Tensor], rows: Rows) -> Tensor:
    with tg.rows(model, rows):
        values: Tensor = model(**inputs).logits
    return torch.where(torch.isfinite(values), values, 0.0)


def given(model: Any, rows: int, length: int = 3) -> dict[str, Tensor]:
    return {key: value.to(DEVICE) for key, value in batch(model, rows, length).items()}


def computed(model: Any, kernel: str, rows: Rows, seed: int = 0) -> dict[str, Tensor]:
    """The logits, and the gradients of all that trains."""
    tg.use_kernels(model, kernel)  # type: ignore[arg-type]
    model.zero_grad()
    torch.manual_seed(seed)
    found = logits(model, given(model, len(rows)), rows)
    found.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in tg.trainable(model).items() if p.grad is not None}
    return {"logits": found.detach(), **grads}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], at_most: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= at_most * value.norm(), name


@pytest.mark.parametrize("name", JOINS)
def test_models_that_join_their_residuals(name: str, calls: Counter[str]) -> None:
    model = grafted(name)
    for rows in (MIXED, BARE, ALIKE) if name == "bert" else (BARE, ALIKE):
        calls.clear()
        wanted = computed(model, "eager", rows)
        plain = calls["plain"]
        assert plain > 0 and not calls["fused"]
        calls.clear()
        assert_close(computed(model, "triton", rows), wanted)
        assert calls == {"fused": plain, "joined": JOINS[name]}


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_norms_alone_are_fused(name: str, calls: Counter[str]) -> None:
    model = grafted(name)
    wanted = computed(model, "eager", MIXED)
    plain = calls.pop("plain")
    assert_close(computed(model, "triton", MIXED), wanted)
    assert calls["fused"] == plain and not calls["plain"] and not calls["joined"]


@torch.no_grad()
@pytest.mark.parametrize(
    "rows",
    [
        ["b", "c", None, "a"],
        ["c", "b", "c"],
        ["b", "b"],
    ],
)
def test_rows_at_rest_in_inference(rows: Rows, calls: Counter[str]) -> None:
    model = grafted("bert")
    tg.train_only(model, "a")
    inputs = given(model, len(rows))
    tg.use_kernels(model, "eager")
    wanted = logits(model, inputs, rows)
    calls.clear()
    tg.use_kernels(model, "triton")
    found = logits(model, inputs, rows)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm() and calls["joined"] == 4


def test_two_kinds_of_norms_in_one_batch_are_not_joined(calls: Counter[str]) -> None:
    model = grafted("bert")
    tg.add_task(model, "d", tg.Adapter(size=8, norms="layers"), 2)
    perturb(model, seed=2, only=lambda path: ".bank." in path)
    for rows, joined in ((["d", "a", None], 0), (["d", None, "d"], 4)):
        wanted = computed(model, "eager", rows)
        calls.clear()
        assert_close(computed(model, "triton", rows), wanted)
        assert calls["joined"] == joined


def test_bare_rows_alone_go_through_the_backbone_itself(calls: Counter[str]) -> None:
    bare, model = build("bert").to(DEVICE), grafted("bert")
    tg.use_kernels(model, "triton")
    inputs = given(model, 3)
    for rows in (None, [None, None, None]):
        with tg.rows(model, rows):
            assert torch.equal(model(**inputs).last_hidden_state, bare(**inputs).last_hidden_state)
    assert not calls


@pytest.mark.parametrize("name", JOINS)
def test_ungraft_gives_the_original_back(name: str) -> None:
    model, original = grafted(name), build(name).to(DEVICE)
    tg.use_kernels(model, "triton")
    inputs = given(model, 2)
    with torch.no_grad():
        logits(model, inputs, ["a", "b"])
    tg.ungraft(model)
    assert [path for path, module in model.named_modules() if "forward" in vars(module)] == []
    assert torch.equal(model(**inputs).last_hidden_state, original(**inputs).last_hidden_state)
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in model.state_dict().items())


def test_dropout_draws_the_same_either_way() -> None:
    model = grafted("bert", tg.Adapter(size=8, norm_after="own", backbone_dropout=True, head_dropout=0.1)).train()
    wanted = computed(model, "eager", MIXED, seed=3)
    assert_close(computed(model, "triton", MIXED, seed=3), wanted)
    other = computed(model, "eager", MIXED, seed=4)["logits"]
    assert (other - wanted["logits"]).norm() > 1e-3 * other.norm()


def test_checkpointed_layers_are_joined_again_in_the_backward_pass(calls: Counter[str]) -> None:
    model = grafted("bert").train()
    wanted = computed(model, "eager", MIXED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()
    assert_close(computed(model, "triton", MIXED), wanted)
    assert calls["joined"] == 8


@torch.no_grad()
def test_a_copy_of_a_model_joins_by_its_own_weights() -> None:
    model = grafted("bert")
    tg.use_kernels(model, "triton")
    inputs = given(model, 3)
    before = logits(model, inputs, MIXED)
    twin = perturb(copy.deepcopy(model), seed=5, only=lambda path: ".bank.norms" in path)
    found = logits(twin, inputs, MIXED)
    tg.use_kernels(twin, "eager")
    assert (logits(twin, inputs, MIXED) - found).norm() <= 1e-5 * found.norm()
    assert (found - before).norm() > 1e-2 * before.norm()
    assert torch.equal(logits(model, inputs, MIXED), before)


@pytest.mark.parametrize(
    "method",
    [
        tg.Adapter(size=8, norms="shared"),
        tg.Adapter(size=8, norm_after="shared"),
        tg.HyperFormer(size=8, task_dim=8, hidden_dim=8, projected_dim=8),
    ],
    ids=["norms", "norm after", "hyperformer"],
)
def test_weights_that_tasks_share(method: tg.Method) -> None:
    model = grafted("bert", method, tasks="abcd")
    assert_close(computed(model, "triton", ["d", None]), computed(model, "eager", ["d", None]))


@pytest.mark.parametrize("method", [tg.Adapter(size=8, norms="shared"), tg.HyperFormer(size=8, task_dim=8)])
def test_norms_that_tasks_share_in_a_batch_of_trained_rows(method: tg.Method) -> None:
    model = grafted("bert", method, tasks="abcd")
    assert_close(computed(model, "triton", ["d", "c"]), computed(model, "eager", ["d", "c"]))


class Eighths(nn.Module):
    """A linear layer that keeps its weight in eight bits, as quantised backbones do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = float(base.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((base.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def test_a_quantised_layer_before_an_adapter() -> None:
    model = build("bert").to(DEVICE)
    for layer in model.encoder.layer:
        layer.attention.output.dense = Eighths(layer.attention.output.dense)
    tg.graft(model, tg.Adapter(size=8), {"a": 2, "b": 3})
    perturb(model, seed=1, only=lambda path: ".bank." in path)
    assert_close(computed(model, "triton", MIXED), computed(model, "eager", MIXED))


def test_a_hook_on_a_norm_sees_it_run() -> None:
    model = grafted("bert")
    seen: list[str] = []
    model.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda *_: seen.append("norm"))
    computed(model, "triton", ["a", "b"])
    assert seen == ["norm"]
