"""Tasks that were trained together: saved with what they share, loaded elsewhere, and refused where they do not fit."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import taskgraft as tg
from taskgraft.grafts.graft import identity

from families import SMALL, batch, build, perturb, result

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DIMENSIONS: dict[str, Any] = {"size": 4, "task_dim": 6, "hidden_dim": 10, "projected_dim": 5}
METHODS: dict[str, tg.Method] = {
    "hyperformer": tg.HyperFormer(**DIMENSIONS),
    "between": tg.HyperFormer(shared="layers", **DIMENSIONS),
    "plus": tg.HyperFormer(shared=True, **DIMENSIONS),
    "dagger": tg.Adapter(size=4, norm_after="shared"),
    "full": tg.FullFineTuning(backbone_dropout=False),
}
TASKS = ["a", "b", "c"]
WRITING = {"max_new_tokens": 8, "min_new_tokens": 8, "no_repeat_ngram_size": 1, "do_sample": False}


def trained(method: tg.Method, tasks: Any = tuple(TASKS), name: str = "t5") -> Any:
    """A model whose tasks are far from where they began, in their own weights and in what they share."""
    model = tg.graft(build(name), method, tasks)
    return perturb(model, seed=1, std=0.3, only=lambda path: path in tg.trainable(model)).eval()


def saved(method: tg.Method, path: Path, **about: Any) -> Any:
    model = trained(method)
    tg.get_joint(model, backbone=identity(build("t5")), **about).save(path)
    return model


def logits(model: Any, rows: Any = tuple(TASKS)) -> Tensor:
    with torch.no_grad(), tg.rows(model, rows):
        return result(model, batch(model, rows=3))


def all_that_there_is(model: Any) -> dict[str, Tensor]:
    """What a user can see of a model, as it is and as it goes on: tokens, then logits after more training."""
    inputs = batch(model, rows=3)
    inputs.pop("decoder_input_ids")
    found = {"logits": logits(model)}
    for beams in (1, 3):
        with tg.rows(model, TASKS):
            found[f"beams {beams}"] = model.generate(**inputs, **WRITING, num_beams=beams)
    tg.train_only(model, TASKS)
    optimizer = tg.AdamW(model, lr=1e-2)
    for seed in range(3):
        with tg.rows(model, TASKS):
            loss: Any = result(model, batch(model, rows=3, seed=seed)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**found, "logits after training": logits(model)}


def state_of(model: Any) -> dict[str, Any]:
    """All that a refused call must leave as it was."""
    grafts = getattr(model, "taskgraft", None)
    tasks = {} if grafts is None else {task: grafts.read(task) for task in grafts.tasks}
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "modules": [path for path, _ in model.named_modules()],
        "required": [p.requires_grad for p in model.parameters()],
        "tasks": {f"{task}/{key}": value for task, values in tasks.items() for key, value in values.items()},
        "kinds": [] if grafts is None else list(grafts.kinds),
    }


def refused(model: Any, sentence: str, action: Callable[[], object]) -> None:
    """The action fails with one sentence, and the model is what it was."""
    before = state_of(model)
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        action()
    assert "\n" not in str(caught.value)
    after = state_of(model)
    for part in ("weights", "tasks"):
        assert before[part].keys() == after[part].keys()
        assert all(torch.equal(value, after[part][key]) for key, value in before[part].items())
    assert {**before, "weights": 0, "tasks": 0} == {**after, "weights": 0, "tasks": 0}


# -- elsewhere

CHILD = """
import sys
from pathlib import Path

import torch
from families import build
from safetensors.torch import save_file
from test_joint_files import METHODS, all_that_there_is

import taskgraft as tg

torch.set_num_threads(1)
folder = Path(sys.argv[1])
found = {}
for name in METHODS:
    model = build("t5")
    tg.add_joint(model, folder / name)
    assert not tg.trainable(model) and tg.tasks_of(model) == ["a", "b", "c"]
    found |= {f"{name} {key}": value.contiguous() for key, value in all_that_there_is(model).items()}
save_file(found, folder / "found.safetensors")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What each method gives here, and in a process that has only the files and the backbone."""
    folder = tmp_path_factory.mktemp("joints")
    torch.set_num_threads(1)
    here: dict[str, Tensor] = {}
    for name, method in METHODS.items():
        model = saved(method, folder / name)
        here |= {f"{name} {key}": value.contiguous() for key, value in all_that_there_is(model).items()}
    child = [sys.executable, "-c", CHILD, str(folder)]
    subprocess.run(child, check=True, cwd=Path(__file__).parent, capture_output=True)
    save_file(here, folder / "here.safetensors")
    return load_file(folder / "here.safetensors"), load_file(folder / "found.safetensors")


@pytest.mark.parametrize("name", METHODS)
def test_another_process_writes_the_same_and_goes_on_training(
    name: str, outputs: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    here, there = outputs
    mine = [key for key in here if key.startswith(f"{name} ")]
    assert len(mine) == 4
    for key in mine:
        assert torch.equal(here[key], there[key]), key
    assert not torch.allclose(here[f"{name} logits"], here[f"{name} logits after training"], atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_a_joint_holds_what_was_trained_once(name: str, tmp_path: Path) -> None:
    records = {task: {"task": {"text": task}, "metrics": {"accuracy": 0.5}} for task in TASKS}
    about: dict[str, Any] = {"records": records, "metrics": {"mean": 0.5}, "training": {"steps": 9}}
    model = saved(METHODS[name], tmp_path / "glue", **about)
    joint = tg.load_joint(tmp_path / "glue")
    one_backbone = tg.count(METHODS[name], model.config)  # which all tasks share
    count = one_backbone if name == "full" else tg.count(METHODS[name], model.config, tasks=3)
    assert joint.parameters == count == sum(p.numel() for p in tg.trainable(model).values())
    assert joint.method == METHODS[name] and list(joint.tasks) == TASKS
    assert joint.metrics == {"mean": 0.5} and joint.training == {"steps": 9}
    assert all(member.task == {"text": t} and member.metrics["accuracy"] == 0.5 for t, member in joint.tasks.items())
    again = build("t5")
    tg.add_joint(again, joint)
    assert torch.equal(logits(again), logits(model))
    taken = tg.get_joint(again, backbone=joint.backbone)
    assert taken.company == joint.company and taken.backbone == joint.backbone
    assert all(torch.equal(taken.tensors[key], value) for key, value in joint.tensors.items())
    bare = build("t5")
    tg.ungraft(again)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in bare.state_dict().items())


def test_embeddings_come_from_hyperformer_alone(tmp_path: Path) -> None:
    model = trained(METHODS["plus"])
    embeddings = tg.get_joint(model).embeddings()
    assert list(embeddings) == TASKS
    assert all(torch.equal(value, model.taskgraft.read(t)["task.embedding"]) for t, value in embeddings.items())
    with pytest.raises(tg.GraftError, match="'a' has no embedding, since it was trained by 'adapter'"):
        tg.get_joint(trained(METHODS["dagger"])).embeddings()


@pytest.mark.parametrize("name", ["hyperformer", "plus", "dagger"])
def test_some_of_the_tasks(name: str, tmp_path: Path) -> None:
    model = saved(METHODS[name], tmp_path / "glue")
    some = build("t5")
    tg.add_joint(some, tmp_path / "glue", ["c", "a"])
    assert tg.tasks_of(some) == ["c", "a"]
    assert torch.equal(logits(some, ["c", "a", None]), logits(model, ["c", "a", None]))
    tg.add_joint(some, tmp_path / "glue", ["b"])  # and the rest later: they share again
    assert torch.equal(logits(some), logits(model))
    tg.train_only(some, ["b", "a", "c"])
    only = tg.get_joint(model, ["b"])
    assert list(only.tasks) == ["b"] and only.company == tg.load_joint(tmp_path / "glue").company
    alone = build("t5")
    tg.add_joint(alone, only)
    assert torch.equal(logits(alone, "b"), logits(model, "b"))


@pytest.mark.parametrize("name", ["hyperformer", "plus", "dagger"])
def test_beside_other_tasks_of_the_same_method(name: str, tmp_path: Path) -> None:
    """Tasks that share a hypernetwork, or norms, of another joint: each goes on with its own."""
    model = saved(METHODS[name], tmp_path / "glue")
    other = perturb(
        tg.graft(build("t5"), METHODS[name], ["d", "e"]), seed=7, only=lambda p: "taskgraft" in p or "bank" in p
    )
    expected = logits(other, ["d", "e", None])
    tg.train_only(other, [])
    tg.add_joint(other, tmp_path / "glue")
    assert torch.allclose(logits(other), logits(model), atol=1e-5)
    assert torch.allclose(logits(other, ["d", "e", None]), expected, atol=1e-5)
    tg.train_only(other, TASKS)
    with torch.no_grad():
        for parameter in tg.trainable(other).values():
            parameter += 0.1
    assert torch.allclose(logits(other, ["d", "e", None]), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["hyperformer", "plus", "dagger"])
def test_a_newcomer_starts_from_a_task_that_was_loaded(name: str, tmp_path: Path) -> None:
    expected = logits(saved(METHODS[name], tmp_path / "glue"), "b")
    model = build("t5")
    tg.add_joint(model, tmp_path / "glue")
    before = {task: logits(model, task) for task in TASKS}
    tg.add_task(model, "new", METHODS[name], like="b", train=False)
    assert torch.equal(logits(model, "new"), expected)
    tg.train_only(model, "new", shared=False)
    with torch.no_grad():
        for parameter in tg.trainable(model).values():
            parameter += 0.1
    assert all(torch.equal(logits(model, task), before[task]) for task in TASKS)
    assert not torch.allclose(logits(model, "new"), expected, atol=1e-3)
    joint = tg.get_joint(model)  # the newcomer shares what the others share
    assert list(joint.tasks) == [*TASKS, "new"] and joint.company == tg.load_joint(tmp_path / "glue").company


def test_the_rest_of_a_joint_whose_first_tasks_were_trained_on() -> None:
    model = trained(METHODS["hyperformer"], ["a", "b"])
    joint, expected = tg.get_joint(model), logits(model, "b")
    later = build("t5")
    tg.add_joint(later, joint, ["a"])
    tg.train_only(later, "a")
    with torch.no_grad():
        for parameter in tg.trainable(later).values():
            parameter += 0.1
    try:
        tg.add_joint(later, joint, ["b"])
    except tg.GraftError:
        return  # to refuse is as good
    assert torch.allclose(logits(later, "b"), expected, atol=1e-5)


def test_heads_come_back(tmp_path: Path) -> None:
    heads = {
        "a": tg.Head("classification", ("no", "yes")),
        "b": tg.Head("regression"),
        "c": tg.Head("tokens", ("x", "y")),
    }
    model = trained(METHODS["plus"], heads, "bert")
    tg.get_joint(model).save(tmp_path / "glue")
    again = build("bert")
    tg.add_joint(again, tmp_path / "glue")
    for task, head in heads.items():
        assert again.taskgraft.tasks[task].head == head
        with torch.no_grad(), tg.rows(model, task), tg.rows(again, task):
            ours, theirs = model(**batch(model)), again(**batch(model))
        logits = "token_logits" if head.per_token else "logits"
        assert torch.equal(ours[logits], theirs[logits])


def test_another_precision_only_when_asked(tmp_path: Path) -> None:
    model = saved(METHODS["plus"], tmp_path / "glue")
    half = build("t5", torch.bfloat16)
    refused(half, "in another precision .*other_precision=True", lambda: tg.add_joint(half, tmp_path / "glue"))
    tg.add_joint(half, tmp_path / "glue", other_precision=True)
    assert (logits(half).float() - logits(model)).norm() <= 5e-2 * logits(model).norm()


def test_full_fine_tuning_keeps_its_backbone_until_its_last_task_leaves(tmp_path: Path) -> None:
    model = saved(METHODS["full"], tmp_path / "glue")
    expected = logits(model, "a")
    for grafted in (model, build("t5")):
        if grafted is not model:
            tg.add_joint(grafted, tmp_path / "glue")
        tg.remove_task(grafted, "c")
        assert torch.equal(logits(grafted, "a"), expected)
        tg.remove_task(grafted, "b")
        tg.remove_task(grafted, "a")
        assert all(torch.equal(value, grafted.state_dict()[key]) for key, value in build("t5").state_dict().items())


# -- refusals


def edited(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def later(data: bytes) -> bytes:
    return data.replace(b'"format": 1', b'"format": 9', 1)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors cut": (edited("joint.safetensors", lambda data: data[:-9]), "was truncated or changed"),
    "tensors empty": (edited("joint.safetensors", lambda _: b""), "was truncated or changed"),
    "a bit of the tensors": (edited("joint.safetensors", flipped), "was truncated or changed"),
    "no tensors": (lambda folder: (folder / "joint.safetensors").unlink(), "has no joint.safetensors"),
    "record cut": (edited("joint.json", lambda data: data[:-9]), "joint.json of graft 'glue' is not JSON"),
    "record empty": (edited("joint.json", lambda _: b""), "is not JSON"),
    "no record": (lambda folder: (folder / "joint.json").unlink(), "has no (graft|joint).json"),
    "a later format": (edited("joint.json", later), "format 9 and this version reads 1: update taskgraft"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    saved(METHODS["plus"], tmp_path / "glue")
    change, sentence = DAMAGES[damage]
    change(tmp_path / "glue")
    for model in (build("t5"), trained(METHODS["dagger"], ["d"])):
        refused(model, sentence, lambda model=model: tg.add_joint(model, tmp_path / "glue"))  # type: ignore[misc]
    (entry,) = tg.Store(tmp_path).list()
    assert entry.name == "glue"
    assert (entry.error is not None) == (damage != "a bit of the tensors")  # a listing reads no tensors


def test_every_damaged_field_of_the_record_is_refused_or_harmless(tmp_path: Path) -> None:
    tg.get_joint(trained(METHODS["plus"]), ["a"]).save(tmp_path / "glue")
    path = tmp_path / "glue" / "joint.json"
    record = json.loads(path.read_text())

    def places(part: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
        below = [place for k, v in part.items() if isinstance(v, dict) for place in places(v, *above, k)]
        return [(*above, key) for key in part] + below

    values: list[Any] = ["gone", None, 7, "x", {}]
    sentences = []
    for place in places(record):
        for value in values:
            changed = copy.deepcopy(record)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            if value == "gone":
                del holder[place[-1]]
            path.write_text(json.dumps(changed))
            try:
                tg.add_joint(build("t5"), tmp_path / "glue")
            except tg.GraftError as error:  # anything else is a failure
                sentences.append(str(error))
            assert tg.Store(tmp_path).names() == [entry.name for entry in tg.Store(tmp_path).list()]
    assert len(sentences) > 100 and not any("\n" in sentence for sentence in sentences)


OTHERS: dict[str, Any] = {
    "weights": lambda: build("t5", seed=1),
    "class": lambda: build("mt5"),
    "family": lambda: build("bert"),
    "depth": lambda: hf.BertModel(hf.BertConfig(**{**SMALL, "num_hidden_layers": 1})),
}


@pytest.mark.parametrize("name", ["plus", "dagger", "full"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_backbone_is_refused(tmp_path: Path, name: str, other: str) -> None:
    saved(METHODS[name], tmp_path / "glue")
    model = OTHERS[other]()
    refused(model, "was made for another backbone", lambda: tg.add_joint(model, tmp_path / "glue"))
    assert not hasattr(model, "taskgraft")


def test_joints_are_no_grafts_and_grafts_no_joints(tmp_path: Path) -> None:
    model = saved(METHODS["plus"], tmp_path / "glue")
    tg.materialise(model, "a").save(tmp_path / "one")
    bare = build("t5")
    refused(
        bare, "'glue' is not one graft .* load all with tg.load_joint", lambda: tg.add_graft(bare, tmp_path / "glue")
    )
    refused(bare, "'one' is one graft, .* load it with tg.load_graft", lambda: tg.add_joint(bare, tmp_path / "one"))
    refused(model, "generated by a hypernetwork that it shares: tg.materialise", lambda: tg.get_graft(model, "a"))
    tg.add_graft(bare, tmp_path / "one")
    assert torch.allclose(logits(bare, "one"), logits(model, "a"), atol=1e-5)


def test_tasks_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    model = saved(METHODS["plus"], tmp_path / "glue")
    joint = tg.load_joint(tmp_path / "glue")
    bare = build("t5")
    refused(bare, "'z' is not among those saved together: a, b, c are", lambda: tg.add_joint(bare, joint, ["a", "z"]))
    refused(model, "'a' is already on this model", lambda: tg.add_joint(model, joint))
    taken = trained(METHODS["dagger"], ["c"])
    refused(taken, "'c' is already on this model", lambda: tg.add_joint(taken, joint))  # after a and b were put on
    refused(taken, "'a' is not on this model", lambda: tg.get_joint(taken, ["a"]))
    tg.add_joint(taken, joint, ["a"])
    refused(taken, "'c' and 'a' are of different methods", lambda: tg.get_joint(taken))
    plain = trained(tg.Adapter(size=4), ["p"])
    tg.add_task(plain, "d", METHODS["dagger"])
    refused(plain, "'p' and 'd' are of different methods", lambda: tg.get_joint(plain))
    apart = build("t5")
    for seed, task in enumerate("de"):
        other = perturb(tg.graft(build("t5"), METHODS["plus"], [task]), seed=seed, only=lambda p: "taskgraft" in p)
        tg.add_joint(apart, tg.get_joint(other))
    refused(apart, "'d' and 'e' differ in .*: they were not trained together", lambda: tg.get_joint(apart))
    empty = tg.graft(build("t5"), METHODS["plus"], [])
    refused(empty, "there are no tasks to keep together", lambda: tg.get_joint(empty))


def test_full_fine_tuning_has_a_model_to_itself(tmp_path: Path) -> None:
    model = saved(METHODS["full"], tmp_path / "full")
    refused(model, "the backbone was fine-tuned: give what identified it", lambda: tg.get_joint(model))
    refused(model, "train all of its tasks together", lambda: tg.train_only(model, ["a"]))
    refused(model, "train all of its tasks together", lambda: tg.train_only(model, TASKS, shared=False))
    other = trained(METHODS["plus"], ["d"])
    refused(other, "cannot share the backbone with d", lambda: tg.add_joint(other, tmp_path / "full"))


def test_what_cannot_be_written_leaves_the_disk_as_it_was(tmp_path: Path) -> None:
    joint = tg.get_joint(trained(METHODS["plus"]), metrics={"accuracy": object()})
    with pytest.raises(tg.GraftError, match="'glue' cannot be written as JSON"):
        joint.save(tmp_path / "glue")
    with pytest.raises(tg.GraftError, match="need a name"):
        tg.Store(tmp_path).put(joint)
    assert not list(tmp_path.iterdir())


# -- in a store


def test_a_store_holds_joints_beside_grafts(tmp_path: Path) -> None:
    store = tg.Store(tmp_path)
    model = trained(METHODS["plus"])
    store.put(tg.materialise(model, "a"))
    (graft,) = store.list()
    first = tg.get_joint(model, metrics={"mean": 0.1})
    assert first.save(tmp_path / "glue") == 1
    assert tg.get_joint(model, metrics={"mean": 0.2}).save(tmp_path / "glue") == 2
    assert store.names() == ["a", "glue"] and store.list()[0] == graft
    entry = store.list()[1]
    assert (entry.name, entry.version, entry.error) == ("glue", 2, None)
    assert entry.method == "hyperformer" and entry.together == ("a", "b", "c") and not graft.together
    assert entry.metrics == {"mean": 0.2} and entry.parameters == first.parameters
    assert entry.bytes == sum(file.stat().st_size for file in (tmp_path / "glue").iterdir())
    assert store.rollback("glue") == 1 and store.get_joint("glue").metrics == {"mean": 0.1}
    assert store.get_joint("glue", version=2).metrics == {"mean": 0.2}
    with pytest.raises(tg.GraftError, match="'glue' is not one graft"):
        store.get("glue")
    store.rename("glue", "together")
    assert store.versions("together") == [1, 2] and store.prune("together", keep=0) == 1
    assert torch.equal(store.get_joint("together").tensors["a/task.embedding"], first.tensors["a/task.embedding"])
    store.remove("together")
    assert store.list() == [graft]
