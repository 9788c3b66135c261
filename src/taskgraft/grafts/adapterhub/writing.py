"""From a graft to a folder that `load_adapter` reads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.grafts.adapterhub.table import (
    ACTIVATIONS,
    CLASSES,
    CONFIG,
    HEAD_CONFIG,
    HEAD_TENSORS,
    HEADS,
    LOCATIONS,
    PATHS,
    TENSORS,
    check_family,
    sites_of,
)
from taskgraft.grafts.graft import Graft, materialise
from taskgraft.methods import Adapter
from taskgraft.names import check_task_name
from taskgraft.nn.heads import Head

VERSION = "adapters.1.3.0"  # whose format is written


def export_adapterhub(
    model: Any,
    task: str,
    folder: str | PathLike[str],
    name: str | None = None,
    *,
    drop_norms: bool = False,
    drop_head: bool = False,
) -> None:
    """Write a task as a folder that `model.load_adapter` of `adapters` reads.

    That format has no norms of the backbone, and no heads on the mean or the last token: a task with these is refused,
    unless it is said that they are to be left out, which changes its answers.
    """
    write_adapterhub(model, materialise(model, task), folder, name, drop_norms=drop_norms, drop_head=drop_head)


def write_adapterhub(
    model: Any,
    graft: Graft,
    folder: str | PathLike[str],
    name: str | None = None,
    *,
    drop_norms: bool = False,
    drop_head: bool = False,
) -> None:
    """A graft as the files of an AdapterHub folder, all of them or none."""
    name = graft.name if name is None else name
    check_task_name(name)
    if "." in name:
        raise GraftError(f"an adapter of the AdapterHub cannot be called {name!r}, with a dot: give another name.")
    files = encoded(model, graft, name, drop_norms, drop_head)
    if not isinstance(folder, str | PathLike):
        raise GraftError(f"{folder!r} is no folder to write to: give a path.")
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds files" if path.is_dir() else "is no folder"
        raise GraftError(f"{path} is there already and {what}: name another folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for file, content in files.items():
            (made / file).write_bytes(content)
        made.chmod(0o755)
        os.replace(made, path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if has_norms(graft):
        warnings.warn(f"the tuned norms of {graft.name!r} are left out: its answers will differ.", stacklevel=3)


def has_norms(graft: Graft) -> bool:
    return any(key.startswith("norm.") for key in graft.tensors)


def encoded(model: Any, graft: Graft, name: str, drop_norms: bool, drop_head: bool) -> dict[str, bytes]:
    """What the files hold."""
    model_type = check_family(model)
    method = graft.method
    if not isinstance(method, Adapter):
        raise GraftError(f"task {graft.name!r} is of method {method.name!r}, and the AdapterHub has adapters only.")
    if has_norms(graft) and not drop_norms:
        raise GraftError(
            f"task {graft.name!r} has tuned the backbone's norms, which the AdapterHub's format cannot hold: train it "
            'with norms="none" (--method seq_bn), or leave them out with drop_norms=True (--drop-norms), which changes '
            "answers."
        )
    about = {
        "hidden_size": int(model.config.hidden_size),
        "model_class": f"{CLASSES[model_type]}AdapterModel",
        "model_name": graft.backbone["name"],
        "model_type": model_type,
        "name": name,
        "version": VERSION,
    }
    config, tensors = Writer(model, graft, method, name).written()
    files = {
        CONFIG: json.dumps({**about, "config": config}, indent=2, sort_keys=True).encode(),
        TENSORS: safetensors.torch.save(tensors, metadata={"format": "pt"}),
    }
    if graft.head is None or drop_head:
        return files
    head_config, head_tensors = written_head(graft, graft.head, method, name, int(model.config.hidden_size))
    files[HEAD_CONFIG] = json.dumps({**about, "config": head_config}, indent=2, sort_keys=True).encode()
    files[HEAD_TENSORS] = safetensors.torch.save(head_tensors, metadata={"format": "pt"})
    return files


@dataclass(frozen=True)
class Writer:
    """From a graft's adapters to the AdapterHub's configuration and tensors."""

    model: Any
    graft: Graft
    method: Adapter
    name: str

    def refuse(self, what: str) -> GraftError:
        return GraftError(f"task {self.graft.name!r} has {what}, which the AdapterHub's format cannot say.")

    def written(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        method, model = self.method, self.model
        if method.depth != 1 or method.norm_inside is not None or method.multiplicative:
            raise self.refuse("depth, norm_inside or multiplicative")
        names = {own: theirs for theirs, own in reversed(ACTIVATIONS.items())}
        if method.activation not in names:
            raise self.refuse(f"the activation {method.activation!r}")
        d = int(model.config.hidden_size)
        sites = [site for site in self.graft.sites if site.split(".")[0] in ("encoder", "decoder")]
        config = {
            **{LOCATIONS[place]: place in method.sites for place in LOCATIONS},
            **self.wiring(post_norm=all(site.place.norm for site in sites_of(model))),
            "adapter_residual_before_ln": method.norm_sum,
            "dropout": method.dropout,
            "init_weights": "bert",
            "leave_out": self.left_out(sites),
            "ln_after": method.norm_after is not None,
            "ln_before": method.norm_before,
            "non_linearity": names[method.activation],
            "reduction_factor": reduction(d, method.bottleneck_size(d)),
            "scaling": 1.0 if self.folds else float(method.scaling),
        }
        tensors = {}
        for site in sites:
            stack, layer, place = site.split(".")
            path = PATHS[model.config.model_type][f"{stack}.{place}"].format(layer)
            for key, value in self.weights(site).items():
                tensors[f"{path}.adapters.{self.name}.{key}"] = value.contiguous()
        return config, tensors

    @property
    def folds(self) -> bool:
        """Whether the branch is scaled after its norm, which there is only in the norm's own weights."""
        return self.method.norm_after is not None and not self.method.norm_sum

    def wiring(self, post_norm: bool) -> dict[str, Any]:
        method = self.method
        parallel = method.reads == "residual" or (method.parallel and post_norm)
        if method.parallel and not parallel:
            raise self.refuse("parallel adapters that read a normed input")
        if method.keeps is not None and method.reads != "norm":
            raise self.refuse(f"keeps={method.keeps!r} without reads='norm'")
        if parallel and method.norm_sum:
            raise self.refuse("norm_sum on an adapter in parallel")
        after_add = "post_add" if post_norm else False  # without a norm, the sum is all there is
        residual = {None: True, "sum": after_add, "norm": False}[method.keeps]
        return {
            "is_parallel": parallel,
            "original_ln_before": method.reads == "norm",
            "original_ln_after": method.joined,
            "residual_before_ln": residual,
        }

    def left_out(self, sites: list[str]) -> list[int]:
        """Layers without adapters, numbered through all stacks."""
        have = dict.fromkeys(site.name.rpartition(".")[0] for site in sites_of(self.model))
        kept = {site.rpartition(".")[0] for site in sites}
        return [number for number, layer in enumerate(have) if layer not in kept]

    def weights(self, site: str) -> dict[str, Tensor]:
        own = {name: self.graft.tensors[f"{site}.{name}"] for name in ("down", "down_bias", "up", "up_bias")}
        linear = "adapter_down.1" if self.method.norm_before else "adapter_down.0"
        values = {f"{linear}.weight": own["down"].T, f"{linear}.bias": own["down_bias"]}
        values |= {"adapter_up.weight": own["up"].T, "adapter_up.bias": own["up_bias"]}
        for leaf in ("weight", "bias"):
            if self.method.norm_before:
                before = self.graft.tensors[f"{site}.before_{leaf}"]
                values |= {f"adapter_norm_before.{leaf}": before, f"adapter_down.0.{leaf}": before.clone()}
            if self.method.norm_after is not None:
                after = self.graft.tensors[f"{site}.after_{leaf}"]
                values[f"adapter_norm_after.{leaf}"] = after * (self.method.scaling if self.folds else 1.0)
        return values


def reduction(d: int, size: int) -> float:
    """A factor by which `int(d // factor)` is the size."""
    return d // size if d % size == 0 else d / (size + 0.5)


def written_head(
    graft: Graft, head: Head, method: Adapter, name: str, d: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    unsaid = None
    if not head.per_token and method.pooling not in ("cls", "pooler"):
        unsaid = f"reads the backbone by {method.pooling!r}"
    elif method.head_hidden not in (None, d):
        unsaid = f"has {method.head_hidden} hidden units instead of {d}"
    if unsaid is not None:
        raise GraftError(
            f"the head of task {graft.name!r} {unsaid}, which the AdapterHub's format cannot say: train it with "
            'pooling="cls", or leave the head out with drop_head=True (--drop-head).'
        )
    kinds = {own: theirs for theirs, own in HEADS.items()} | {"regression": "classification"}
    config: dict[str, Any] = {
        "head_type": kinds[head.kind],
        "num_labels": head.width,
        "layers": 1 if method.head_hidden is None else 2,
        "activation_function": "tanh",
        "label2id": {label: number for number, label in enumerate(head.labels)} or None,
        "dropout_prob": method.head_dropout,
    }
    if not head.per_token:
        config |= {"use_pooler": method.pooling == "pooler", "bias": True}
    own = graft.tensors
    last = 1 if method.head_hidden is None else 4
    tensors = {f"{last}.weight": own["head.weight"].T, f"{last}.bias": own["head.bias"]}
    if method.head_hidden is not None:
        tensors |= {"1.weight": own["head.hidden"].T, "1.bias": own["head.hidden_bias"]}
    return config, {f"heads.{name}.{key}": value.contiguous() for key, value in tensors.items()}
