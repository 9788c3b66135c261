"""Adapters of the AdapterHub: what `adapters` 1.3.0 saved answers the same here, and what is written reads back."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf

import taskgraft as tg
from taskgraft.grafts.adapterhub.reading import read_adapterhub

import tiny
from families import SMALL, T5, batch, build, perturb
from hub_files import backbone_of, difference, expected_of, logits_of, packed_cases, unpack
from test_cli import taskgraft
from test_docs import ROOT, commands_in, write_messages

CASES = packed_cases()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("adapterhub"))


def changed(folder: Path, to: Path, file: str = "adapter_config.json", **config: Any) -> Path:
    """A copy of an adapter with another configuration: keys of the inner one, or of the outer one as `outer_KEY`."""
    shutil.copytree(folder, to)
    record = json.loads((to / file).read_text())
    for key, value in config.items():
        place = record if key.startswith("outer_") else record["config"]
        if value is ...:
            del place[key.removeprefix("outer_")]
        else:
            place[key.removeprefix("outer_")] = value
    (to / file).write_text(json.dumps(record))
    return to


# -- what it saved, here


@pytest.mark.parametrize("case", CASES)
def test_what_adapters_saved_has_its_logits(files: Path, case: str) -> None:
    home = (files / case).parent
    model = backbone_of(home)
    inputs, expected = expected_of(home)
    name = tg.import_adapterhub(model, files / case)
    assert name == Path(case).name and not list(tg.trainable(model))
    assert difference(logits_of(model, [name] * 3, inputs), expected[name], inputs["attention_mask"]) < 1e-5


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_all_of_them_in_one_batch_answer_as_alone(files: Path, family: str) -> None:
    home = files / family
    model = backbone_of(home, torch.float64)
    names = [tg.import_adapterhub(model, files / case, head=False) for case in CASES if case.startswith(f"{family}/")]
    inputs, _ = expected_of(home)
    rows: list[str | None] = [*names, None]
    one = {name: value[:1] for name, value in inputs.items()}
    many = {name: value.expand(len(rows), -1) for name, value in one.items()}

    @torch.no_grad()
    def states(rows: list[str | None], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with tg.rows(model, rows):
            output = model(**inputs)
        return output.logits if family == "t5" else output.last_hidden_state

    together = states(rows, many)
    for row, name in enumerate(rows):
        assert torch.allclose(together[row], states([name], one)[0], atol=1e-10), name
    assert (together[:-1] - together[-1]).abs().amax((1, 2)).min() > 1e-3, "each of them does something"


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_gradients_of_a_mixed_batch_are_the_sum_of_those_alone(family: str) -> None:
    wirings: list[dict[str, Any]] = [
        {"reads": "norm"},
        {"reads": "residual", "scaling": 4.0},
        {"reads": "norm", "keeps": "norm", "joined": False},
        {"keeps": "sum", "norms": "all"},
        {"norm_after": "own", "norm_sum": True},
    ]
    model = build(family, torch.float64)
    tasks = [f"task{number}" for number in range(len(wirings))]
    tg.graft(model, tg.Adapter(size=4, norms="none"), [])
    for task, wiring in zip(tasks, wirings, strict=True):
        tg.add_task(model, task, tg.Adapter(**{"size": 4, "norms": "none", **wiring}))
    tg.train_only(model, tasks)
    perturb(model, seed=3, only=lambda path: ".bank." in path)
    inputs = batch(model, rows=len(tasks))
    trained = dict(tg.trainable(model))

    def backward(rows: list[str], chosen: slice) -> None:
        with tg.rows(model, rows):
            output = model(**{name: value[chosen] for name, value in inputs.items()})
        states = output.logits if family == "t5" else output.last_hidden_state
        weight = torch.linspace(-1, 1, states.numel() // states.shape[0], dtype=states.dtype).view(states.shape[1:])
        (states * weight).sum().backward()

    backward(tasks, slice(None))
    together = {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
    model.zero_grad()
    for number, task in enumerate(tasks):
        backward([task], slice(number, number + 1))
    assert together and all(grad.abs().max() > 0 for grad in together.values())
    for name, grad in together.items():
        assert torch.allclose(grad, trained[name].grad, atol=1e-10), name  # type: ignore[arg-type]


def test_older_names_and_an_older_gelu_are_understood(files: Path, tmp_path: Path) -> None:
    """adapter-transformers: other names of modules, no version, "gelu" for the tanh approximation."""
    folder = changed(
        files / "bert" / "gelu_new", tmp_path / "old", outer_version=..., non_linearity="gelu", MH_Adapter=False
    )
    stored = torch.load(folder / "pytorch_adapter.bin")
    old = {
        key.replace(".output.adapters.", ".output.layer_text_task_adapters."): value for key, value in stored.items()
    }
    torch.save(old, folder / "pytorch_adapter.bin")
    model = backbone_of(files / "bert")
    inputs, expected = expected_of(files / "bert")
    name = tg.import_adapterhub(model, folder, "aged")
    assert name == "aged"
    found = logits_of(model, ["aged"] * 3, inputs)
    assert difference(found, expected["gelu_new"], inputs["attention_mask"]) < 1e-5


def test_heads_bring_their_labels_and_the_way_they_read(files: Path) -> None:
    model = backbone_of(files / "bert")
    graft = read_adapterhub(model, files / "bert" / "double_seq_bn")
    assert graft.head == tg.Head("classification", ("bad", "fair", "good"))
    assert isinstance(graft.method, tg.Adapter)
    assert (graft.method.pooling, graft.method.head_hidden, graft.method.norms) == ("cls", 16, "none")
    assert graft.training["imported"]["from"] == "AdapterHub"
    kinds = {read_adapterhub(model, files / case).head.kind for case in CASES if case.startswith("bert/")}  # type: ignore[union-attr]
    assert kinds == {"classification", "multilabel", "tokens", "spans", "regression"}
    assert read_adapterhub(model, files / "bert" / "double_seq_bn", head=False).head is None


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_head_of_a_class_of_transformers_is_found(files: Path, tmp_path: Path, family: str) -> None:
    """`adapters.init(BertForSequenceClassification)` saves the head of that class, by its own names."""
    model_class = {"bert": hf.BertForSequenceClassification, "roberta": hf.RobertaForSequenceClassification}[family]
    labels = {0: "no", 1: "maybe", 2: "yes"}
    torch.manual_seed(0)
    original = model_class.from_pretrained(files / family / "backbone", id2label=labels).eval()
    folder = tmp_path / "static"
    shutil.copytree(files / family / "seq_bn", folder)
    for file in folder.glob("*head*"):
        file.unlink()
    record = {"model_class": model_class.__name__, "name": None, "config": None, "num_labels": 3}
    record["label2id"] = {label: number for number, label in labels.items()}
    (folder / "head_config.json").write_text(json.dumps(record))
    head = {name: value.contiguous() for name, value in original.state_dict().items() if "classifier" in name}
    safetensors.torch.save_file(head, folder / "model_head.safetensors")
    inputs, _ = expected_of(files / family)
    tg.import_adapterhub(original, folder, head=False)
    with tg.rows(original, ["seq_bn"] * 3), torch.no_grad():
        states = original.base_model(**inputs)
    wanted = original.classifier(states.pooler_output if family == "bert" else states.last_hidden_state)
    model = backbone_of(files / family)
    model.load_state_dict(original.base_model.state_dict(), strict=False)
    tg.import_adapterhub(model, folder)
    assert torch.allclose(logits_of(model, ["seq_bn"] * 3, inputs), wanted, atol=1e-5)
    assert model.taskgraft.tasks["seq_bn"].head.labels == ("no", "maybe", "yes")


# -- and back


@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_reads_back_as_it_was(files: Path, tmp_path: Path, case: str) -> None:
    home = (files / case).parent
    model = backbone_of(home)
    inputs, expected = expected_of(home)
    name = tg.import_adapterhub(model, files / case)
    tg.export_adapterhub(model, name, tmp_path / "out", "again")
    assert tg.import_adapterhub(model, tmp_path / "out") == "again"
    found = logits_of(model, ["again"] * 3, inputs)
    assert difference(found, expected[name], inputs["attention_mask"]) < 1e-5
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (files / case, tmp_path / "out")
    )
    said = ("mh_adapter", "output_adapter", "cross_adapter", "original_ln_before", "original_ln_after", "is_parallel")
    for key in (*said, "ln_before", "ln_after"):
        assert ours["config"][key] == theirs["config"][key], key
    assert set(ours) >= {"config", "hidden_size", "model_class", "model_name", "model_type", "name", "version"}


@pytest.mark.parametrize("config", ["seq_bn", "double_seq_bn", "par_bn"])
def test_a_task_in_one_of_its_configurations_is_written_whole(config: str, tmp_path: Path) -> None:
    model = build("bert")
    tg.graft(model, tg.Adapter.adapterhub(config, size=5), {"mood": ["bad", "good"]})
    perturb(model, seed=1, only=lambda path: ".bank." in path or "heads" in path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tg.export_adapterhub(model, "mood", tmp_path / "mood")
    other = build("bert")
    tg.import_adapterhub(other, tmp_path / "mood")
    inputs = batch(model)
    assert torch.equal(logits_of(model, ["mood"] * 6, inputs), logits_of(other, ["mood"] * 6, inputs))
    record = json.loads((tmp_path / "mood" / "adapter_config.json").read_text())
    assert int(32 // record["config"]["reduction_factor"]) == 5


def test_a_generated_adapter_is_written_out(tmp_path: Path) -> None:
    model = build("t5")
    tg.graft(model, tg.HyperFormer(shared=True, size=4, norms="none"), ["a", "b"])
    perturb(model, seed=1, only=lambda path: "taskgraft" in path)
    tg.export_adapterhub(model, "b", tmp_path / "b")
    other = build("t5")
    tg.import_adapterhub(other, tmp_path / "b")
    inputs = batch(model)
    assert torch.allclose(logits_of(model, ["b"] * 6, inputs), logits_of(other, ["b"] * 6, inputs), atol=1e-5)


def test_norms_and_heads_are_left_out_only_when_asked(tmp_path: Path) -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=4), {"mood": ["bad", "good"]})
    with pytest.raises(tg.GraftError, match=r"tuned the backbone's norms.*drop_norms=True"):
        tg.export_adapterhub(model, "mood", tmp_path / "mood")
    with pytest.raises(tg.GraftError, match=r"reads the backbone by 'mean'.*drop_head=True"):
        tg.export_adapterhub(model, "mood", tmp_path / "mood", drop_norms=True)
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="norms of 'mood' are left out"):
        tg.export_adapterhub(model, "mood", tmp_path / "mood", drop_norms=True, drop_head=True)
    assert sorted(path.name for path in (tmp_path / "mood").iterdir()) == ["adapter.safetensors", "adapter_config.json"]
    with pytest.raises(tg.GraftError, match="holds files: name another"):
        tg.export_adapterhub(model, "mood", tmp_path / "mood", drop_norms=True, drop_head=True)


@pytest.mark.parametrize(
    ("family", "method", "said"),
    [
        ("bert", tg.Adapter(depth=2, norms="none"), "depth"),
        ("bert", tg.Adapter(multiplicative=True, norms="none"), "multiplicative"),
        ("bert", tg.Adapter(activation="softplus", norms="none"), "softplus"),
        ("bert", tg.Adapter(keeps="sum", norms="none"), "keeps='sum'"),
        ("t5", tg.Adapter(parallel=True, norms="none"), "normed input"),
        ("bert", tg.NormsOnly(), "'norms'"),
        ("gpt2", tg.Adapter(norms="none"), "'gpt2'"),
    ],
)
def test_what_its_format_cannot_say_is_refused(family: str, method: tg.Method, said: str, tmp_path: Path) -> None:
    model = tg.graft(build(family), method, {"a": None})
    with pytest.raises(tg.GraftError, match=said):
        tg.export_adapterhub(model, "a", tmp_path / "a")
    assert not list(tmp_path.iterdir())


# -- what cannot be imported


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (exec, ("raise SystemExit('the pickle ran')",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "lora"}, "'lora' and no bottleneck"),
        ({"phm_layer": True}, "phm_layer"),
        ({"use_gating": True}, "use_gating"),
        ({"non_linearity": "mish"}, "'mish'"),
        ({"ln_before": True}, "lacks 'adapter_down.1"),
        ({"outer_hidden_size": 768}, "hidden_size 768"),
        ({"outer_model_type": "roberta"}, "model_type 'roberta'"),
        ({"outer_name": "else"}, "has a weight"),
        ({"outer_config": "seq_bn"}, "not a configuration"),
        ({"dropout": "much"}, "dropout"),
        ({"scaling": "much"}, "scaling"),
    ],
)
def test_what_is_not_known_here_is_refused_and_changes_nothing(
    files: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    model = backbone_of(files / "bert")
    with pytest.raises(tg.GraftError, match=said):
        tg.import_adapterhub(model, changed(files / "bert" / "seq_bn", tmp_path / "x", **change))
    assert getattr(model, "taskgraft", None) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_type": "masked_lm"}, "'masked_lm'"),
        ({"layers": 3}, "3 layers"),
        ({"layers": 2, "activation_function": "relu"}, "relu"),
        ({"outer_config": None, "outer_model_class": "BertForMaskedLM"}, "BertForMaskedLM"),
    ],
)
def test_a_head_that_is_not_known_is_refused_by_how_to_go_on(
    files: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    model = backbone_of(files / "bert")
    folder = changed(files / "bert" / "seq_bn", tmp_path / "x", "head_config.json", **change)
    with pytest.raises(tg.GraftError, match=f"{said}.*--no-head"):
        tg.import_adapterhub(model, folder)
    assert tg.import_adapterhub(model, folder, head=False) == "seq_bn"


def test_broken_files_are_told_by_what_is_wrong(files: Path, tmp_path: Path) -> None:
    model = backbone_of(files / "bert")
    with pytest.raises(tg.GraftError, match=r"has no adapter_config\.json"):
        tg.import_adapterhub(model, tmp_path)
    folder = tmp_path / "x"
    shutil.copytree(files / "bert" / "seq_bn", folder)
    whole = (folder / "adapter.safetensors").read_bytes()
    (folder / "adapter.safetensors").write_bytes(whole[:-100])
    with pytest.raises(tg.GraftError, match="could not be read"):
        tg.import_adapterhub(model, folder)
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(tg.GraftError, match=r"neither adapter.safetensors nor pytorch_adapter.bin"):
        tg.import_adapterhub(model, folder)
    (folder / "pytorch_adapter.bin").write_bytes(pickle.dumps({"weight": Bomb()}))
    with pytest.raises(tg.GraftError, match=r"holds more than tensors, or is broken: it is not read\.$"):
        tg.import_adapterhub(model, folder)
    torch.save([1, 2], folder / "pytorch_adapter.bin")
    with pytest.raises(tg.GraftError, match="other things than tensors"):
        tg.import_adapterhub(model, folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(tg.GraftError, match="could not be read"):
        tg.import_adapterhub(model, folder)


def test_a_smaller_model_is_refused_by_the_place_it_lacks(files: Path, tmp_path: Path) -> None:
    config = hf.AutoConfig.from_pretrained(files / "bert" / "backbone")
    config.num_hidden_layers = 1
    with pytest.raises(tg.GraftError, match=r"weights for encoder\.1\.feedforward"):
        tg.import_adapterhub(hf.BertModel(config), files / "bert" / "seq_bn")
    stack = hf.T5EncoderModel(hf.AutoConfig.from_pretrained(files / "t5" / "backbone"))
    with pytest.raises(tg.GraftError, match=r"weights for decoder\.0\.attention"):
        tg.import_adapterhub(stack, files / "t5" / "double_seq_bn")


def test_families_that_join_otherwise_refuse_the_wirings() -> None:
    with pytest.raises(tg.GraftError, match="not known for model family 'gpt2'"):
        tg.graft(build("gpt2"), tg.Adapter(reads="norm"), ["a"])


# -- the command line


def write_mood(folder: Path) -> list[str]:
    """A backbone, and the folder of a task for it; the words that name a store beside them."""
    tiny.backbone(folder / "backbone")
    model = hf.BertModel.from_pretrained(folder / "backbone").eval()
    tg.graft(model, tg.Adapter.adapterhub("seq_bn"), {"mood": ["bad", "good"]})
    tg.export_adapterhub(model, "mood", folder / "mood")
    return ["--store", str(folder / "grafts")]


def test_an_adapter_goes_through_a_store_and_out_again(tmp_path: Path) -> None:
    at = write_mood(tmp_path)
    named = ["--backbone", str(tmp_path / "backbone")]
    done = taskgraft("import", str(tmp_path / "mood"), *at, "--name", "tone", "--json")
    assert done.code == 0, done.err  # the folder names its backbone
    assert done.record["task"] == "tone" and done.record["head"] == "classification"
    asked = taskgraft("predict", "tone", "a good film", *at, *named, "--json")
    assert asked.code == 0 and asked.lines[0]["label"] in ("bad", "good"), asked.err
    done = taskgraft("export", "tone", str(tmp_path / "out"), *at, *named, "--json")
    assert done.code == 0, done.err
    assert done.record["files"] == [
        "adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors"
    ]  # fmt: skip
    assert taskgraft("export", "tone", str(tmp_path / "out"), *at, *named).code == 2
    refused = taskgraft("import", str(tmp_path), *at, *named)
    assert refused.code == 2 and "has no adapter_config.json" in refused.err


def test_a_task_of_several_that_share_a_hypernetwork_is_exported(tmp_path: Path) -> None:
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5)).eval()
    model.save_pretrained(tmp_path / "backbone")
    tiny.tokenizer().save_pretrained(tmp_path / "backbone")
    tg.graft(model, tg.HyperFormer(shared=True, size=4), ["a", "b"])
    tg.get_joint(model).save(tmp_path / "grafts" / "both")
    at = ["--store", str(tmp_path / "grafts"), "--backbone", str(tmp_path / "backbone")]
    done = taskgraft("export", "both/b", str(tmp_path / "out"), *at, "--drop-norms", "--json")
    assert done.code == 0 and "Note: the tuned norms of 'b' are left out" in done.err
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["name"] == "b"


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_messages(tmp_path / "reviews.csv", "text", "label")
    made = tg.load_backbone()
    tg.graft(made.model, tg.Adapter.adapterhub(), {"reviews": ["no", "yes"]})
    tg.export_adapterhub(made.model, "reviews", "reviews-adapter")
    for command in commands_in("docs/adapterhub.md"):
        done = taskgraft(*command[1:])
        assert done.code == 0, done.err
    scope: dict[str, object] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapterhub.md").read_text(), re.DOTALL):
        exec(compile(snippet, "adapterhub.md", "exec"), scope)
    assert (tmp_path / "mood-adapter" / "head_config.json").is_file()


def test_its_configurations_have_short_names() -> None:
    from taskgraft.methods import method_named

    assert method_named("seq_bn-48")[0] == tg.Adapter.adapterhub("seq_bn", 48)
    assert tg.Adapter.adapterhub("par_bn").bottleneck_size(SMALL["hidden_size"]) == 16
    with pytest.raises(tg.GraftError, match="use one of seq_bn"):
        tg.Adapter.adapterhub("prefix_tuning")


def test_what_does_not_fit_is_neither_stored_nor_written(tmp_path: Path) -> None:
    at = write_mood(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "mood" / "adapter.safetensors")
    bias = next(key for key in tensors if key.endswith("adapter_up.bias"))
    for name, wrong, said in (
        ("narrow", tensors[bias][:-1].clone(), "has shape"),
        ("nan", torch.full_like(tensors[bias], float("nan")), "is not a tensor of finite numbers"),
        ("whole", tensors[bias].int(), "is not a tensor of finite numbers"),
    ):
        shutil.copytree(tmp_path / "mood", tmp_path / name)
        safetensors.torch.save_file({**tensors, bias: wrong}, tmp_path / name / "adapter.safetensors")
        done = taskgraft("import", str(tmp_path / name), *at)
        assert done.code == 2 and said in done.err, done.err
        assert not (tmp_path / "grafts" / "mood").exists()
    assert taskgraft("import", str(tmp_path / "mood"), *at).code == 0
    wider = hf.BertConfig(**{**SMALL, "hidden_size": 48, "num_attention_heads": 4})
    hf.BertModel(wider).save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    done = taskgraft("export", "mood", str(tmp_path / "out"), *at, "--backbone", str(tmp_path / "other"))
    assert done.code == 2 and not (tmp_path / "out").exists(), done.err


def test_an_adapter_without_a_head_says_that_it_has_no_answers(tmp_path: Path) -> None:
    at = write_mood(tmp_path)
    done = taskgraft("import", str(tmp_path / "mood"), *at, "--no-head")
    assert done.code == 0 and "Without a head it has no answers of its own" in done.out
    (tmp_path / "rows.csv").write_text("text,label\na good film,good\n")
    for words in (["predict", "mood", "a good film"], ["evaluate", "mood", str(tmp_path / "rows.csv")]):
        done = taskgraft(*words, *at)
        assert done.code == 2 and "has no head and BertModel does not write" in done.err, done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("adapter_config.json", {"outer_peft_type": "LORA"}, "is a LORA of peft"),
        ("adapter_config.json", {"residual_before_ln": "zork"}, "residual_before_ln 'zork'"),
        ("adapter_config.json", {"ln_after": True, "scaling": "x"}, "not as `save_adapter` writes it"),
        ("head_config.json", {"num_labels": 7}, "says that it has 7"),
        ("head_config.json", {"label2id": {"a": 0, "b": 0}}, "two labels of the head have one number"),
        ("head_config.json", {"label2id": ["a"]}, "not as `save_adapter` writes it"),
        ("head_config.json", {"dropout_prob": "x"}, "not as `save_adapter` writes it"),
    ],
)
def test_what_a_configuration_cannot_mean_is_a_sentence(
    files: Path, tmp_path: Path, file: str, change: dict[str, Any], said: str
) -> None:
    folder = changed(files / "bert" / "seq_bn", tmp_path / "x", file, **change)
    with pytest.raises(tg.GraftError, match=said):
        tg.import_adapterhub(backbone_of(files / "bert"), folder)


def test_wrong_arguments_are_sentences(tmp_path: Path) -> None:
    backbone = tiny.backbone()
    tg.graft(backbone.model, tg.Adapter.adapterhub("seq_bn"), {"mood": ["bad", "good"]})
    for source in (None, 5):
        with pytest.raises(tg.GraftError, match="no folder of an adapter"):
            tg.import_adapterhub(backbone.model, source)  # type: ignore[arg-type]
    tg.export_adapterhub(backbone.model, "mood", tmp_path / "mood")
    with pytest.raises(tg.GraftError, match=r"give the model itself \(`backbone.model`\)"):
        tg.import_adapterhub(backbone, tmp_path / "mood")
    with pytest.raises(tg.GraftError, match="no folder to write to"):
        tg.export_adapterhub(backbone.model, "mood", None)  # type: ignore[arg-type]
    for name in ("", "a/b", 5):
        with pytest.raises(tg.GraftError, match="name"):
            tg.export_adapterhub(backbone.model, "mood", tmp_path / "other", name)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_the_embedded_default_goes_by_its_name(tmp_path: Path) -> None:
    backbone = tg.load_backbone()
    tg.graft(backbone.model, tg.Adapter.adapterhub("seq_bn"), {"mood": ["bad", "good"]})
    tg.export_adapterhub(backbone.model, "mood", tmp_path / "mood")
    record = json.loads((tmp_path / "mood" / "adapter_config.json").read_text())
    assert record["model_name"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert tg.get_graft(backbone.model, "mood").backbone["name"] == record["model_name"]
