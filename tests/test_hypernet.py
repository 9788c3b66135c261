"""HyperFormer: weights generated as the equations say, each row through its own task's, none trained by accident."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import Dataset

import taskgraft as tg
from taskgraft.nn.hypernet import HypernetBank

import tiny
from families import FAMILY_NAMES, SAMPLES, T5, batch, build, perturb, result

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# No two dimensions are equal, so that none can be taken for another.
DIMENSIONS: dict[str, Any] = {"size": 4, "task_dim": 6, "hidden_dim": 10, "projected_dim": 5}
ABLATIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "no blocks": {"blocks": False},
    "no conditional norm": {"conditional_norm": False},
    "no projector": {"projector": False},
}
shared_by = pytest.mark.parametrize("shared", [False, "layers", True])
ablations = pytest.mark.parametrize("ablation", ABLATIONS)


def hyperformer(shared: Any = False, **changes: Any) -> tg.HyperFormer:
    return tg.HyperFormer(shared=shared, **{**DIMENSIONS, **changes})


def is_new(path: str) -> bool:
    """Whether a parameter is one that taskgraft added."""
    return ".bank." in path or path.startswith("taskgraft_")


def heads_for(name: str) -> dict[str, Any]:
    return {"a": None, "b": None} if SAMPLES[name].writes else {"a": 2, "b": 5}


def grafted(name: str, method: tg.Method, tasks: Any = ("a", "b"), dtype: torch.dtype = torch.float32) -> Any:
    """A model with these tasks, every new weight moved by a normal of std 0.1."""
    model = tg.graft(build(name, dtype), method, tasks)
    return perturb(model, seed=1, only=is_new).eval()


def run(model: Any, inputs: dict[str, Tensor], rows: Any) -> Tensor:
    with tg.rows(model, rows):
        return torch.nan_to_num(result(model, inputs), neginf=0.0)  # beyond a row's own classes


def hypernet_of(model: Any) -> Any:
    return next(iter(model.taskgraft.hyper_kinds.values())).shared_bank


def embeddings_of(model: Any) -> Any:
    return next(iter(model.taskgraft.hyper_kinds.values())).banks["task"].embedding


def state_bits(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, after[key]) for key, value in before.items())


def backward(model: Any, rows: list[str | None], seed: int = 0) -> None:
    loss: Any = run(model, batch(model, rows=len(rows), seed=seed), rows).square().mean()
    loss.backward()


def steps(model: Any, rows: list[str | None], count: int = 3, **options: Any) -> None:
    optimizer = tg.AdamW(model, lr=1e-2, **options)
    for step in range(count):
        optimizer.zero_grad()
        backward(model, rows, seed=step)
        optimizer.step()


# -- the equations, written out


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def by_the_equations(
    method: tg.HyperFormer, places: list[str], w: dict[str, Tensor], z: Tensor, d: int
) -> dict[str, dict[str, Tensor]]:
    """Each place's weights for the task embedding z, one place after the other."""
    layers = list(dict.fromkeys(place.rpartition(".")[0] for place in places))
    positions = list(dict.fromkeys(re.sub(r"\.\d+", "", place) for place in places))
    b = method.bottleneck_size(d)
    found: dict[str, dict[str, Tensor]] = {}
    for number, place in enumerate(places):
        layer, position = layers.index(place.rpartition(".")[0]), positions.index(re.sub(r"\.\d+", "", place))
        stack = ["encoder", "decoder"].index(place.partition(".")[0]) if method.shared else 0
        e = z
        if method.shared:
            e = torch.cat([e, w["layers"][layer]])
        if method.shared is True:
            e = torch.cat([e, w["positions"][position]])
        if method.projector:
            e = torch.clamp(e @ w["project_in"][stack] + w["project_in_bias"][stack], min=0)
            e = e @ w["project_out"][stack] + w["project_out_bias"][stack]
        if method.shared:
            e = normalised(e, w["norm_weight"][stack], w["norm_bias"][stack], 1e-6)
        generator = {False: number, "layers": position, True: stack}[method.shared]
        rest = e @ w["generator"][generator] + w["generator_bias"][generator]
        found[place] = {}
        shapes = {"down": (d, b), "down_bias": (b,), "up": (b, d), "up_bias": (d,)} if method.blocks else {}
        shapes |= {"after_weight": (d,), "after_bias": (d,)} if method.conditional_norm else {}
        for name, shape in shapes.items():
            part, rest = rest[: torch.Size(shape).numel()], rest[torch.Size(shape).numel() :]
            found[place][name] = part.reshape(shape)
        assert not len(rest)
    return found


def adapter(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """`A(x) = LN(U(gelu_new(D(x)))) + x`, less what an ablation leaves out."""
    branch = x
    if "down" in w:
        h = x @ w["down"] + w["down_bias"]
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        branch = h @ w["up"] + w["up_bias"]
    return x + (normalised(branch, w["after_weight"], w["after_bias"], 1e-5) if "after_weight" in w else branch)


SITES = ("attention", "cross_attention", "feedforward")
LINEARS = {"attention": "SelfAttention.o", "cross_attention": "EncDecAttention.o", "feedforward": "DenseReluDense.wo"}


def uneven() -> Any:
    """A T5 with more layers, and more positions in each, in its decoder: 2 x 2 places and 3 x 3."""
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**{**T5, "num_decoder_layers": 3}))
    return perturb(model).double().eval()


@shared_by
@ablations
@torch.no_grad()
def test_generated_weights_and_logits_follow_the_equations(shared: Any, ablation: str) -> None:
    method = hyperformer(shared, sites=SITES, **ABLATIONS[ablation])
    model = perturb(tg.graft(uneven(), method, ["a", "b", "c"]), seed=1, only=is_new)
    places = [f"encoder.{i}.{site}" for i in range(2) for site in SITES[::2]]
    places += [f"decoder.{i}.{site}" for i in range(3) for site in SITES]
    rows = ["c", None, "a", "c", "b"]
    inputs = batch(model, rows=len(rows))
    logits = run(model, inputs, rows)
    hypernet = {name: getattr(hypernet_of(model), name)[0] for name in hypernet_of(model).weights}
    for number, task in enumerate(("a", "b", "c")):
        weights = by_the_equations(method, places, hypernet, embeddings_of(model)[number], 32)
        written = tg.materialise(model, task).tensors
        own = {name: value for name, value in written.items() if not name.startswith("norm.")}
        assert set(own) == {f"{place}.{name}" for place in places for name in weights[place]}
        for place in places:
            for name, value in weights[place].items():
                assert torch.allclose(own[f"{place}.{name}"], value, rtol=1e-12, atol=1e-12), (place, name)
        bare = uneven()
        for name, value in written.items():
            if name.startswith("norm."):
                bare.get_parameter(name.removeprefix("norm.")).copy_(value)
        for place in places:
            stack, layer, site = place.split(".")
            last = 2 if stack == "decoder" else 1
            sublayer = {"attention": 0, "cross_attention": 1, "feedforward": last}[site]
            linear = bare.get_submodule(f"{stack}.block.{layer}.layer.{sublayer}.{LINEARS[site]}")
            linear.register_forward_hook(lambda _, __, out, w=weights[place]: adapter(out, w))
        mine = [i for i, row in enumerate(rows) if row == task]
        expected = result(bare, {key: value[mine] for key, value in inputs.items()})
        assert torch.allclose(logits[mine], expected, rtol=1e-6, atol=1e-6), task
    assert torch.equal(logits[1], result(uneven(), inputs)[1])


# -- what reaches what


@pytest.mark.parametrize("name", FAMILY_NAMES)
@shared_by
def test_exactly_what_is_counted_trains_and_all_of_it_is_reached(name: str, shared: Any) -> None:
    labels = None if SAMPLES[name].writes else 3
    method = hyperformer(shared, hidden_dim=30)
    model = grafted(name, method, {"a": labels, "b": labels})
    trained = tg.trainable(model)
    expected = tg.count(method, model.config, tasks=2, labels=labels)
    assert sum(p.numel() for p in trained.values()) == expected
    assert f"{expected:,} parameters train" in tg.describe(model)
    backward(model.train(), ["a", "b", None, "a"])
    for path, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (path in trained)
    assert all(bool((p.grad != 0).any()) for p in trained.values())  # type: ignore[union-attr]
    assert (embeddings_of(model).grad != 0).all()
    for part in hypernet_of(model).weights:  # each layer, position, projector, norm and generator
        gradient = getattr(hypernet_of(model), part).grad[0].flatten(1)
        assert (gradient != 0).any(1).all(), part


@shared_by
@torch.no_grad()
def test_an_embedding_is_one_tasks_own(shared: Any) -> None:
    model = grafted("t5", hyperformer(shared), ["a", "b", "c"])
    inputs, rows = batch(model, rows=4), ["b", "a", None, "c"]
    mixed, alone = run(model, inputs, rows), run(model, inputs, "c")
    embeddings_of(model)[1] += 0.5
    now = run(model, inputs, rows)
    assert torch.equal(mixed[1:], now[1:]) and not torch.allclose(mixed[0], now[0], atol=1e-3)
    assert torch.equal(alone, run(model, inputs, "c"))


@pytest.mark.parametrize("shared", ["layers", True])
@torch.no_grad()
def test_encoder_and_decoder_have_hypernetworks_of_their_own(shared: Any) -> None:
    model = grafted("t5", hyperformer(shared))
    before = tg.materialise(model, "a").tensors
    for part in hypernet_of(model).weights:
        values = getattr(hypernet_of(model), part)[0]
        for half, (mine, others) in enumerate((("encoder.", "decoder."), ("decoder.", "encoder."))):
            rows = slice(half * len(values) // 2, (half + 1) * len(values) // 2)
            kept = values.clone()
            values[rows] += torch.randn(values[rows].shape)
            after = tg.materialise(model, "a").tensors
            values.copy_(kept)
            assert all(torch.equal(before[key], after[key]) for key in before if key.startswith(others)), part
            assert not any(torch.equal(before[key], after[key]) for key in before if key.startswith(mine)), part


@pytest.mark.parametrize("shared", ["layers", True])
def test_the_encoders_output_alone_does_not_train_the_decoders_hypernetwork(shared: Any) -> None:
    model = grafted("t5", hyperformer(shared))
    with tg.rows(model, ["a", "b"]):
        loss: Any = model(**batch(model, rows=2)).encoder_last_hidden_state.square().mean()
    loss.backward()
    for part in hypernet_of(model).weights:
        gradient = getattr(hypernet_of(model), part).grad[0]
        assert gradient[: len(gradient) // 2].any() and not gradient[len(gradient) // 2 :].any(), part


@pytest.mark.parametrize("name", ["t5", "bert"])
@shared_by
@ablations
@torch.no_grad()
def test_a_task_written_out_gives_the_generated_output(name: str, shared: Any, ablation: str) -> None:
    model = grafted(name, hyperformer(shared, **ABLATIONS[ablation]), heads_for(name))
    tg.add_task(model, "plain", tg.Adapter(size=3), None if name == "t5" else 3)
    perturb(model, seed=2, only=lambda path: ".bank." in path)
    written = build(name)
    for task in ("a", "b", "plain"):
        graft = tg.get_graft(model, task) if task == "plain" else tg.materialise(model, task)
        assert isinstance(graft.method, tg.Adapter) and graft.head == model.taskgraft.tasks[task].head
        tg.add_graft(written, graft)
    inputs = batch(model, rows=5)
    for rows in (["a", None, "plain", "b", "a"], "a", ["b"] * 5):
        generated, expected = run(model, inputs, rows), run(written, inputs, rows)
        assert (generated - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1)
    with tg.rows(model, ["a", None, "plain", "b", None]):
        mixed = model(**inputs, output_hidden_states=True)
    hidden = mixed.decoder_hidden_states if name == "t5" else mixed.hidden_states
    bare = build(name)(**inputs, output_hidden_states=True)
    untouched = bare.decoder_hidden_states if name == "t5" else bare.hidden_states
    for ours, theirs in zip(hidden, untouched, strict=True):
        assert torch.equal(ours[[1, 4]], theirs[[1, 4]]), "rows of no task: to the bit"


# -- generate


@shared_by
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generate_with_a_task_per_row_generates_weights_once(
    shared: Any, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = perturb(grafted("t5", hyperformer(shared), ["a", "b", "c"]), seed=2, std=0.5, only=is_new)
    tg.add_task(model, "plain", tg.Adapter(size=3, init_std=0.5))
    inputs, rows = batch(model, rows=5), ["a", None, "c", "b", "plain"]
    inputs.pop("decoder_input_ids")
    calls = counted(monkeypatch)
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "num_beams": beams, "do_sample": False}
    options["no_repeat_ngram_size"] = 1  # else so small a model writes one word again and again
    with tg.rows(model, rows):
        together = model.generate(**inputs, **options)
    assert calls == [3], "once, for the three tasks of the batch that are generated"
    by_ids = model.generate(**inputs, **options, task_ids=tg.task_ids(model, rows))
    assert calls == [3, 3] and torch.equal(together, by_ids)
    alone = []
    for i, task in enumerate(rows):
        with tg.rows(model, [task]):
            alone.append(model.generate(**{key: value[i : i + 1] for key, value in inputs.items()}, **options)[0])
    assert torch.equal(together, torch.stack(alone))
    assert len({tuple(row.tolist()) for row in together}) == len(rows)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each call of a hypernetwork is for, from now on."""
    calls: list[int] = []
    generate = HypernetBank.generate

    def counting(self: HypernetBank, tasks: Tensor, blank: bool = False) -> Any:
        calls.append(len(tasks))
        return generate(self, tasks, blank)

    monkeypatch.setattr(HypernetBank, "generate", counting)
    return calls


def test_a_forward_pass_generates_once_and_only_what_its_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grafted("t5", hyperformer(True), ["a", "b", "c"])
    calls = counted(monkeypatch)
    inputs = batch(model, rows=4)
    with tg.rows(model, ["a", "c", "a", None]):
        for _ in range(2):
            model(**inputs)
    assert calls == [2, 2]
    run(model, inputs, "b")
    model(**inputs, task_ids=tg.task_ids(model, ["a", "b", "c", "a"]))
    run(model, inputs, None)
    assert calls == [2, 2, 1, 3]
    with (
        tg.rows(model, "a"),
        pytest.raises(tg.GraftError, match="a part of it was called alone: call the model itself"),
    ):
        model.encoder(inputs["input_ids"])


# -- at the start


@pytest.mark.parametrize(
    ("method", "fraction", "tolerance", "printed"),
    [
        (tg.HyperFormer(), 5e-4, 0.1, r"0\.000\d+ of x"),
        (tg.HyperFormer(shared=True), 0.11, 0.1, "0.11 of x"),
        (tg.Adapter(reduction=32, norm_after="own", init_std=1e-2), 0.90, 0.1, r"0\.8\d of x"),
        (tg.Adapter(reduction=32, init_std=1e-2), 0.007, 0.4, r"0\.00\d+ of x"),
    ],
    ids=["hyperformer", "hyperformer++", "with a norm", "without"],
)
@torch.no_grad()
def test_how_far_a_fresh_branch_is_from_nothing(method: Any, fraction: float, tolerance: float, printed: str) -> None:
    config = hf.T5Config(vocab_size=9, d_model=768, num_layers=1, num_heads=12, d_ff=8, d_kv=64)
    model = tg.graft(hf.T5ForConditionalGeneration(config), method, [f"task{i}" for i in range(4)])
    x = torch.randn(64, 768)
    sizes = []
    for task in tg.tasks_of(model):
        written = tg.materialise(model, task).tensors
        for place in ("encoder.0.attention", "encoder.0.feedforward", "decoder.0.attention", "decoder.0.feedforward"):
            own = {key.rpartition(".")[2]: value for key, value in written.items() if key.startswith(f"{place}.")}
            sizes.append(float((adapter(x, own) - x).norm() / x.norm()))
    assert sum(sizes) / len(sizes) == pytest.approx(fraction, rel=tolerance)
    described = re.findall(r"[\d.e-]+ of x", tg.describe(model))
    assert len(described) == 4 and any(re.fullmatch(printed, text) for text in described)
    assert all(float(text.split()[0]) == pytest.approx(fraction, rel=0.4) for text in described)


# -- around the model


@pytest.mark.parametrize("name", ["t5", "bert"])
@shared_by
def test_checkpointing_gives_the_same_gradients(name: str, shared: Any) -> None:
    model = grafted(name, hyperformer(shared), heads_for(name), torch.float64).train()

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with tg.rows(model, ["a", "b", None]):
            first = result(model, batch(model, rows=3))
        with tg.rows(model, ["b", "b", "a"]):
            second = result(model, batch(model, rows=3, seed=5))
        # Both blocks have ended before anything is recomputed.
        loss: Any = sum(torch.nan_to_num(logits, neginf=0.0).square().mean() for logits in (first, second))
        loss.backward()
        return {path: p.grad.clone() for path, p in tg.trainable(model).items() if p.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert set(plain) == set(recomputed) == set(tg.trainable(model))
    for path, gradient in plain.items():
        assert torch.allclose(gradient, recomputed[path], rtol=1e-10, atol=1e-12), path


@pytest.mark.parametrize("name", ["t5", "bert"])
@torch.no_grad()
def test_a_compiled_model_gives_the_same_output(name: str) -> None:
    torch._dynamo.reset()
    model = grafted(name, hyperformer(True), heads_for(name))
    inputs = batch(model, rows=3)
    compiled = torch.compile(model, backend="eager")
    with tg.rows(model, ["a", None, "b"]):
        expected = torch.nan_to_num(result(model, inputs), neginf=0.0)
        assert torch.allclose(torch.nan_to_num(result(compiled, inputs), neginf=0.0), expected, atol=1e-6)


@torch.no_grad()
def test_it_compiles_to_one_graph_for_all_rows() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = grafted("bert", hyperformer(True), heads_for("bert"))
    inputs, counter = batch(model, rows=3), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (["a", None, "b"], ["b", None, "a"]):
        with tg.rows(model, rows):
            result(compiled, inputs)
    assert counter.frame_count == 1


@torch.no_grad()
def test_threads_do_not_disturb_each_other() -> None:
    model = grafted("t5", hyperformer(True), ["a", "b"])
    plans = [(["a", "b", None], batch(model, rows=3)), (["b", "b", "a"], batch(model, rows=3, seed=1))]
    expected = [run(model, inputs, rows) for rows, inputs in plans]
    together = threading.Barrier(2)
    differing: list[str] = []

    def work(number: int) -> None:
        rows, inputs = plans[number]
        together.wait()
        with torch.no_grad():  # grad mode is each thread's own
            for _ in range(20):
                if not torch.equal(run(model, inputs, rows), expected[number]):
                    differing.append(str(rows))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@shared_by
def test_half_precision_backbones_train_hypernetworks_in_float32(dtype: torch.dtype, shared: Any) -> None:
    half = grafted("t5", hyperformer(shared), dtype=dtype)
    whole = grafted("t5", hyperformer(shared))
    inputs, rows = batch(half, rows=3), ["a", None, "b"]
    with torch.no_grad():
        exact, rounded = run(whole, inputs, rows), run(half, inputs, rows)
    assert rounded.dtype == dtype
    assert (rounded.float() - exact).norm() <= 5e-2 * exact.norm()
    weights = [embeddings_of(half), *(getattr(hypernet_of(half), name) for name in hypernet_of(half).weights)]
    assert all(isinstance(p, torch.nn.Parameter) and p.dtype == torch.float32 for p in weights)
    before = [p.detach().clone() for p in weights]
    steps(half, rows, 2)
    assert not any(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


# -- training


@pytest.mark.parametrize("name", ["t5", "bert"])
@pytest.mark.parametrize("method", [hyperformer(), hyperformer(True), tg.Adapter(size=4, norm_after="shared")])
def test_a_newcomer_trains_alone_without_what_it_shares(name: str, method: tg.Method) -> None:
    head = heads_for(name)["a"]
    model = grafted(name, method, {"a": head, "b": head})
    inputs = batch(model)
    with torch.no_grad():
        a, mixed = run(model, inputs, "a"), run(model, inputs, ["a", "b"] * 3)
        tg.add_task(model, "new", method, head, like="a")
        assert torch.equal(run(model, inputs, "new"), a)
    tg.train_only(model, ["new"], shared=False)
    own = {"embedding"} if isinstance(method, tg.HyperFormer) else {"down", "down_bias", "up", "up_bias"}
    own |= {"weight", "bias"} if head else set()
    assert {path.rpartition(".")[2] for path in tg.trainable(model)} == own
    assert all(len(p) == 1 for p in tg.trainable(model).values())
    trained = sum(p.numel() for p in tg.trainable(model).values())
    assert f"{trained:,} parameters train" in tg.describe(model)
    weights = {task: model.taskgraft.read(task) for task in ("a", "b")}
    steps(model, ["new", "new", "a"], 4, weight_decay=0.1)
    with torch.no_grad():
        assert torch.equal(run(model, inputs, "a"), a) and torch.equal(run(model, inputs, ["a", "b"] * 3), mixed)
        assert not torch.allclose(run(model, inputs, "new"), a, atol=1e-3)
    assert all(same_bits(weights[task], model.taskgraft.read(task)) for task in weights)


def test_training_a_hypernetwork_for_some_of_its_tasks_is_refused() -> None:
    model = grafted("t5", hyperformer(True), ["a", "b"])
    before, parameters = state_bits(model), tg.trainable(model)
    refusal = r"'b' and 'a' share a hypernetwork, .* train all of its tasks together"
    with pytest.raises(tg.GraftError, match=refusal) as caught:
        tg.train_only(model, "b")
    assert "\n" not in str(caught.value)
    assert all(tg.trainable(model)[path] is p for path, p in parameters.items()), "the optimiser's own Parameters"
    tg.train_only(model, [])
    with pytest.raises(tg.GraftError, match="share a hypernetwork"):
        tg.add_task(model, "new", hyperformer(True), like="a")
    assert tg.tasks_of(model) == ["a", "b"]
    tg.add_task(model, "new", hyperformer(True), like="a", train=False)
    tg.train_only(model, ["new", "a", "b"])
    assert len(embeddings_of(model)) == 3
    tg.remove_task(model, "new")
    tg.train_only(model, ["a", "b"])
    assert same_bits(before, model.state_dict())


@shared_by
def test_the_others_go_on_training_when_one_leaves(shared: Any) -> None:
    model = grafted("t5", hyperformer(shared), ["a", "b", "c"])
    steps(model, ["a", "b", "c"])
    inputs = batch(model, rows=2)
    with torch.no_grad():
        before = run(model, inputs, ["a", "c"])
        hypernet = [getattr(hypernet_of(model), name) for name in hypernet_of(model).weights]
        tg.remove_task(model, "b")
        assert tg.tasks_of(model) == ["a", "c"] and torch.equal(run(model, inputs, ["a", "c"]), before)
    assert all(
        getattr(hypernet_of(model), name) is p for name, p in zip(hypernet_of(model).weights, hypernet, strict=True)
    )
    embeddings = embeddings_of(model).detach().clone()
    steps(model, ["a", "c"])
    assert (embeddings_of(model) != embeddings).any(1).all()
    tg.remove_task(model, "a")
    tg.remove_task(model, "c")
    assert not [path for path, _ in model.named_parameters() if is_new(path)]


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_ungraft_gives_the_model_back_to_the_bit(name: str) -> None:
    model = build(name)
    inputs = batch(model)
    modules, attributes, original = dict(model.named_modules()), set(vars(model)), state_bits(model)
    with torch.no_grad():
        before = result(model, inputs)
    tg.graft(model, hyperformer(True), heads_for(name))
    tg.add_task(model, "c", hyperformer(), heads_for(name)["b"])
    steps(model.train(), ["a", "b", "c", None])
    assert same_bits(original, model.state_dict())
    tg.ungraft(model.eval())
    assert list(original) == list(model.state_dict()) and same_bits(original, model.state_dict())
    assert dict(model.named_modules()) == modules and set(vars(model)) == attributes
    with torch.no_grad():
        assert torch.equal(result(model, inputs), before)


def test_weight_decay_spares_hypernetworks_and_embeddings() -> None:
    plain, decayed = (grafted("bert", hyperformer(True), heads_for("bert")) for _ in range(2))
    backward(plain, ["a", "b"])
    backward(decayed, ["a", "b"])
    tg.AdamW(plain, lr=1e-2, weight_decay=0.0).step()
    tg.AdamW(decayed, lr=1e-2, weight_decay=50.0).step()
    spared = {
        path: torch.equal(p, q)
        for (path, p), q in zip(tg.trainable(plain).items(), tg.trainable(decayed).values(), strict=True)
    }
    assert {path for path, same in spared.items() if not same} == {
        path for path in spared if path.startswith("taskgraft_heads.") and path.endswith("weight")
    }
    embeddings = embeddings_of(decayed).detach().clone()
    steps(decayed, ["a", None], weight_decay=50.0)  # b has no rows: its gradient is zero
    assert torch.equal(embeddings_of(decayed)[1], embeddings[1])
    assert not torch.equal(embeddings_of(decayed)[0], embeddings[0])


def test_tasks_that_disagree_in_shared_norms_are_not_trained_together() -> None:
    model = build("t5")
    for seed, task in enumerate(("a", "b")):
        other = perturb(tg.graft(build("t5"), hyperformer(), [task]), seed=seed, only=is_new)
        tg.add_joint(model, tg.get_joint(other))
    before = {task: model.taskgraft.read(task) for task in ("a", "b")}
    for shared in (True, False):
        with pytest.raises(tg.GraftError, match="were trained apart"):
            tg.train_only(model, ["a", "b"], shared=shared)
    tg.train_only(model, ["b"], shared=False)
    assert all(same_bits(before[task], model.taskgraft.read(task)) for task in before)


class Rows(Dataset[dict[str, Tensor]]):
    """Texts to be copied, under two tasks."""

    def __init__(self, model: Any, tasks: list[str], count: int = 24) -> None:
        self.inputs = batch(model, rows=count, seed=3)
        self.inputs.pop("decoder_input_ids")
        self.tasks = tg.task_ids(model, [tasks[i % len(tasks)] for i in range(count)])

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = {key: value[i] for key, value in self.inputs.items()}
        return {**row, "task_ids": self.tasks[i], "labels": row["input_ids"]}


def test_the_transformers_trainer_trains_it(tmp_path: Path) -> None:
    model = tg.graft(build("t5"), hyperformer(True), ["a", "b"])
    backbone, started = state_bits(build("t5")), state_bits(model)
    data = Rows(model, ["a", "b"])
    arguments = hf.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=5,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="no",
        disable_tqdm=True,
        label_names=["labels"],
    )
    trainer = hf.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, optimizers=(tg.AdamW(model, lr=1e-2), None)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    now = model.state_dict()
    assert same_bits(backbone, now)
    assert not any(torch.equal(started[path], p) for path, p in tg.trainable(model).items())
    resumed = tg.graft(build("t5"), hyperformer(True), ["a", "b"])
    checkpoint = max(tmp_path.glob("checkpoint-*"))
    optimizers = (tg.AdamW(resumed, lr=1e-2), None)
    hf.Trainer(resumed, arguments, train_dataset=data, optimizers=optimizers).train(
        resume_from_checkpoint=str(checkpoint)
    )
    assert same_bits(now, resumed.state_dict())


# -- found by reading


def test_other_rows_inside_generate_have_weights_of_their_own() -> None:
    model = grafted("t5", hyperformer(True), ["a", "b"])
    inputs = batch(model, rows=2)
    ids = inputs["input_ids"]
    start = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad(), tg.rows(model, "b"):
        alone = model(input_ids=ids, decoder_input_ids=start).logits
    seen: list[Tensor] = []

    def look(_: Tensor, scores: Tensor) -> Tensor:
        with tg.rows(model, ["b", "b"]):
            seen.append(model(input_ids=ids, decoder_input_ids=start).logits)
        return scores

    with tg.rows(model, ["a", "b"]):
        model.generate(input_ids=ids, max_new_tokens=2, logits_processor=[look])
    assert seen and all(torch.allclose(found, alone, atol=1e-6) for found in seen)


def test_a_task_can_start_from_one_of_the_same_form_and_size_alone() -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=16), {"a": 2})
    for method in (tg.Adapter(size=4), tg.Adapter(size=16, activation="relu"), tg.NormsOnly(norms="layers")):
        with pytest.raises(tg.GraftError, match="cannot start from 'a', whose method is another"):
            tg.add_task(model, "b", method, 2, like="a", train=False)
        assert tg.tasks_of(model) == ["a"]
    tg.add_task(model, "b", tg.Adapter(size=16), 2, like="a")


def test_what_trains_is_remembered_while_another_task_is_fitted() -> None:
    backbone = tiny.backbone()
    tg.graft(backbone.model, tg.HyperFormer(shared=True, size=4), {"a": 2, "b": 2})
    tg.train_only(backbone.model, ["a"], shared=False)
    before = {name: tuple(value.shape) for name, value in tg.trainable(backbone.model).items()}
    tg.fit(backbone, tiny.task(count=20), tg.Adapter(size=4), epochs=1, progress=False)
    assert {name: tuple(value.shape) for name, value in tg.trainable(backbone.model).items()} == before


def test_tasks_without_weights_of_their_own_have_nothing_to_train_alone() -> None:
    model = tg.graft(build("bert"), tg.NormsOnly(norms="shared"), {"a": None, "b": None})
    with pytest.raises(tg.GraftError, match="no weights of their own"):
        tg.train_only(model, ["a", "b"], shared=False)


def test_the_papers_recipe_has_dropout_on() -> None:
    paper = tg.HyperFormer.paper()
    assert (paper.shared, paper.reduction, paper.backbone_dropout) == (True, 32, True)
    assert tg.HyperFormer.paper(shared=False, size=8, reduction=None).size == 8
