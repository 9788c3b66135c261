"""Write tests/golden/VERSION: grafts of every kind as this version saves them, with what they say of a fixed batch.

    python tests/write_golden.py

Once a version is released its folder never changes: every later version must read it, and say the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

import taskgraft as tg
from taskgraft.grafts.graft import encode, identity

GOLDEN = Path(__file__).parent / "golden"
OUTPUTS = "outputs.safetensors"
BERT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
T5: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
LETTERS = ("a", "b", "c")
GRAFTS: dict[str, tuple[tg.Method, tg.Head | None]] = {
    "classification": (tg.Adapter(size=4), tg.Head("classification", ("no", "yes"))),
    "paper": (tg.Adapter.paper(4), tg.Head("classification", LETTERS)),
    "multilabel": (tg.Adapter(size=3, activation="relu", layers=(1,)), tg.Head("multilabel", LETTERS)),
    "regression": (tg.Adapter(reduction=8, norm_inside="batch", depth=2), tg.Head("regression")),
    "tokens": (tg.Adapter(size=4, norm_after="own", parallel=True), tg.Head("tokens", LETTERS)),
    "spans": (tg.Adapter(size=4, norm_before=True, norms="layers"), tg.Head("spans")),
    "norms": (tg.NormsOnly(), tg.Head("classification", LETTERS)),
    "head": (tg.HeadOnly(hidden=5, pooling="cls"), tg.Head("classification", LETTERS)),
    "written": (tg.Adapter(size=4), None),
}
SMALL: dict[str, Any] = {"size": 3, "task_dim": 4, "hidden_dim": 5, "projected_dim": 4}
JOINTS: dict[str, tg.Method] = {
    "hyperformer": tg.HyperFormer(**SMALL),
    "hyperformer-shared": tg.HyperFormer(shared=True, **SMALL),
    "dagger": tg.Adapter(size=3, norm_after="shared"),
    "full": tg.FullFineTuning(backbone_dropout=False),
}
TOGETHER = {"mood": tg.Head("classification", ("bad", "good")), "stars": tg.Head("regression")}


def made(name: str) -> Any:
    """A backbone whose weights are nowhere zero or one."""
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**BERT)) if name == "bert" else hf.T5ForConditionalGeneration(hf.T5Config(**T5))
    return shaken(model, model.named_parameters())


def shaken(model: Any, parameters: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(parameters):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def loaded(folder: Path, name: str) -> Any:
    kind = hf.AutoModel if name == "bert" else hf.AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder / name).eval()


def outputs(model: Any, task: str) -> Tensor:
    """What a task says of the batch: in float64, so that machines agree."""
    ids = torch.tensor([[2, 7, 30, 11, 3], [2, 19, 3, 0, 0], [2, 5, 39, 25, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    model.double()
    with torch.no_grad(), tg.rows(model, task):
        output = model(**inputs)
    head = model.taskgraft.tasks[task].head
    if head is None:
        return output.logits
    found = output.token_logits if head.per_token else output.logits
    return found[..., : head.width].contiguous()


def write(folder: Path) -> None:
    for name in ("bert", "t5"):
        made(name).save_pretrained(folder / name)
    said: dict[str, Tensor] = {}
    files: dict[str, dict[str, bytes]] = {}
    for name, (method, head) in GRAFTS.items():
        on = "bert" if head else "t5"
        model = tg.graft(loaded(folder, on), method, {name: head}, seed=2)
        shaken(model, tg.trainable(model).items())
        files[name] = encode(tg.get_graft(model, name, metrics={"score": 0.5}, backbone=on))
        said[name] = outputs(model, name)
    for name, method in JOINTS.items():
        model = loaded(folder, "bert")
        before = identity(model, "bert")
        shaken(tg.graft(model, method, TOGETHER, seed=2), tg.trainable(model).items())
        files[name] = tg.get_joint(model, backbone=before).files(name)
        if name == "hyperformer-shared":
            materialised = tg.materialise(model, "mood", backbone="bert")
        said |= {f"{name}/{task}": outputs(model, task) for task in TOGETHER}
    files["materialised"] = encode(materialised)
    tg.add_graft(plain := loaded(folder, "bert"), materialised)
    said["materialised"] = outputs(plain, "mood")
    for name, contents in files.items():
        (folder / "grafts" / name).mkdir(parents=True)
        for file, content in contents.items():
            if file != "README.md":
                (folder / "grafts" / name / file).write_bytes(content)
    save_file(said, folder / OUTPUTS)


if __name__ == "__main__":
    target = GOLDEN / tg.__version__
    if target.exists():
        sys.exit(f"{target} exists: what a version wrote is not written again.")
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=GOLDEN) as draft:
        write(Path(draft) / "new")
        (Path(draft) / "new").rename(target)
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file()):,} bytes")
