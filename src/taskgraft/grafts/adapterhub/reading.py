"""From a folder that `save_adapter` wrote to a graft."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from huggingface_hub import is_offline_mode
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.grafts.adapterhub.table import (
    ACTIVATIONS,
    CLASSES,
    CONFIG,
    HEAD_CONFIG,
    HEAD_PICKLE,
    HEAD_TENSORS,
    HEADS,
    LOCATIONS,
    PATHS,
    PICKLE,
    TENSORS,
    check_family,
    sites_of,
)
from taskgraft.grafts.graft import Graft, add_graft, identity
from taskgraft.grafts.hub import downloaded
from taskgraft.methods import Activation, Adapter
from taskgraft.names import check_task_name
from taskgraft.nn.heads import Head

LEGACY = re.compile(r"\b(attention|layer)_text_(task|lang)_adapters\b")
OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}  # as files without a version call them

# The heads of Transformers' own classes: what they are, whether they read the pooler, and their linear layers.
STATIC_HEADS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "BertForSequenceClassification": ("classification", True, ("classifier",)),
    "RobertaForSequenceClassification": ("classification", False, ("classifier.dense", "classifier.out_proj")),
    "XLMRobertaForSequenceClassification": ("classification", False, ("classifier.dense", "classifier.out_proj")),
    **{f"{name}ForTokenClassification": ("tagging", False, ("classifier",)) for name in CLASSES.values()},
    **{f"{name}ForQuestionAnswering": ("question_answering", False, ("qa_outputs",)) for name in CLASSES.values()},
}
WRITERS = ("seq2seq_lm", "causal_lm")  # heads that a model which writes has itself


def import_adapterhub(
    model: Any, source: str | PathLike[str], name: str | None = None, *, head: bool = True, revision: str | None = None
) -> str:
    """Put an adapter that `adapters` or adapter-transformers saved on a model, as a task, and return its name.

    `source` is a folder, or a repository of the Hub (at a `revision`). `head=False` leaves its prediction head out.
    That the backbone's weights are those it was trained on is for the caller to know: it holds only their name.
    """
    if not isinstance(source, str | PathLike):
        raise GraftError(f"{source!r} is no folder of an adapter: give a path, or OWNER/NAME of the Hub.")
    graft = read_adapterhub(model, located(source, revision), name, head=head)
    add_graft(model, graft)
    return graft.name


def located(source: str | PathLike[str], revision: str | None = None) -> Path:
    """The folder of an adapter; OWNER/NAME that is no folder here is a repository of the Hub, and is downloaded."""
    path = Path(source)
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return path
    files = (CONFIG, TENSORS, PICKLE, HEAD_CONFIG, HEAD_TENSORS, HEAD_PICKLE)
    return downloaded(str(source), revision, None, is_offline_mode(), [files])


def read_adapterhub(model: Any, folder: str | PathLike[str], name: str | None = None, *, head: bool = True) -> Graft:
    """The graft that an AdapterHub folder holds, for this backbone; nothing is put on it."""
    path = Path(folder)
    record = read_config(path / CONFIG)
    try:
        return graft_in(path, record, model, name, head)
    except GraftError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise GraftError(
            f"{path} is not as `save_adapter` writes it ({type(error).__name__}: {error}): copy the adapter again."
        ) from error


def graft_in(path: Path, record: Mapping[str, Any], model: Any, name: str | None, head: bool) -> Graft:
    model_type = check_family(model)
    for key, own in (("model_type", model_type), ("hidden_size", model.config.hidden_size)):
        if record.get(key, own) not in (own, None):
            raise GraftError(
                f"{path} was made for a backbone with {key} {record[key]!r}, and this one has {own!r}: "
                f"load {record.get('model_name') or 'the one it was made for'}."
            )
    name = record.get("name") if name is None else name
    check_task_name(name)
    assert isinstance(name, str)
    found = read_tensors(path, TENSORS, PICKLE)
    method, tensors = Reader(path, model, record, found).read()
    wanted = read_head(path, model, str(record.get("name"))) if head else None
    if wanted is not None:
        method = replace(method, **wanted.method)
        tensors |= wanted.tensors
    made_with = {key: record[key] for key in ("model_name", "model_class", "version") if record.get(key)}
    return Graft(
        name=name,
        method=method,
        head=None if wanted is None else wanted.head,
        tensors=tensors,
        backbone=identity(model),
        training={"imported": {"from": "AdapterHub", "name": record.get("name"), **made_with}},
    )


def read_config(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GraftError(f"{path.parent} has no {path.name}: name the folder that `save_adapter` wrote.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise GraftError(f"{path} could not be read: {error}.") from error
    if isinstance(record, dict) and "peft_type" in record:
        raise GraftError(
            f"{path.parent} is a {record['peft_type']} of peft, and only bottleneck adapters that `adapters` saved can "
            "be imported: train the task here."
        )
    about = {"model_class", "model_type", "hidden_size"}  # of which the oldest files lack some
    if not isinstance(record, dict) or not about & set(record) or not isinstance(record.get("config"), dict | None):
        raise GraftError(f"{path} is not a configuration of the AdapterHub: copy the adapter again.")
    return record


def read_tensors(folder: Path, safe: str, pickled: str) -> dict[str, Tensor]:
    """Safetensors, or the older pickle, of which nothing but tensors is read."""
    try:
        if (folder / safe).is_file():
            return checked(folder, safetensors.torch.load_file(folder / safe))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on what the file holds, of which nothing runs
            loaded = torch.load(folder / pickled, map_location="cpu", weights_only=True)
    except GraftError:
        raise
    except FileNotFoundError as error:
        raise GraftError(f"{folder} has neither {safe} nor {pickled}: copy the adapter again.") from error
    except Exception as error:  # what readers raise of broken files is of many types
        if type(error).__name__ == "UnpicklingError":  # with advice to let the file run code
            raise GraftError(f"{pickled} in {folder} holds more than tensors, or is broken: it is not read.") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise GraftError(f"the weights in {folder} could not be read ({reason}): copy the adapter again.") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise GraftError(f"{pickled} in {folder} holds other things than tensors: copy the adapter again.")
    return checked(folder, {str(key): value for key, value in loaded.items()})


def checked(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Refuse what is no weight."""
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise GraftError(f"{name!r} in {folder} is not a tensor of finite numbers: copy the adapter again.")
    return tensors


@dataclass(frozen=True)
class Reader:
    """From the AdapterHub's configuration and tensors to a method and the names that weights have in a graft."""

    folder: Path
    model: Any
    record: Mapping[str, Any]
    found: Mapping[str, Tensor]

    def refuse(self, what: str) -> GraftError:
        return GraftError(f"the adapter in {self.folder} {what}, which taskgraft has not: it cannot be imported.")

    @property
    def config(self) -> dict[str, Any]:
        return {str(key).lower(): value for key, value in (self.record.get("config") or {}).items()}

    @property
    def activation(self) -> Activation:
        name = str(self.config.get("non_linearity")).lower()
        if "version" not in self.record:
            name = OLD_ACTIVATIONS.get(name, name)
        if name not in ACTIVATIONS:
            raise self.refuse(f"has the non-linearity {name!r}")
        return ACTIVATIONS[name]

    def read(self) -> tuple[Adapter, dict[str, Tensor]]:
        config, modules = self.config, self.modules()
        if config.get("architecture") is not None or not config:
            raise self.refuse(f"is {config.get('architecture') or 'no bottleneck'!r} and no bottleneck")
        for key in ("use_gating", "phm_layer"):
            if config.get(key):
                raise self.refuse(f"has {key}")
        sites = {site: self.weights(site, parts) for site, parts in modules.items()}
        size = max(parts["down"].shape[1] for parts in sites.values())
        method = replace(self.wiring(), size=size, **self.extent(list(sites)))
        for site in set(self.expected(method)) - set(sites):
            sites[site] = self.silent(method, site, size)
        scaling = config.get("scaling", 1.0)
        if scaling not in ("learned", "channel") and method.norm_after is None:
            method = replace(method, scaling=scaling)
        tensors: dict[str, Tensor] = {}
        for site, parts in sites.items():
            if method.norm_after is not None or "scaling" in parts:  # what is learned, or scaled before a norm
                factor = parts.pop("scaling", None)
                factor = torch.tensor(scaling) if factor is None else factor
                parts["up"], parts["up_bias"] = parts["up"] * factor, parts["up_bias"] * factor
            tensors |= {f"{site}.{name}": value.contiguous() for name, value in padded(parts, size).items()}
        return method, tensors

    def modules(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each site's adapter, by their names in it."""
        name = re.escape(str(self.record.get("name")))
        paths = PATHS[self.model.config.model_type].items()
        numbered = {site: re.escape(path).replace(r"\{\}", r"(\d+)") for site, path in paths}
        patterns = {site: re.compile(rf"(?:.*\.)?{path}\.adapters\.{name}\.(.+)") for site, path in numbered.items()}
        modules: dict[str, dict[str, Tensor]] = {}
        for key, value in self.found.items():
            matches = ((site, pattern.fullmatch(LEGACY.sub("adapters", key))) for site, pattern in patterns.items())
            site, match = next(((site, match) for site, match in matches if match), ("", None))
            if match is None:
                raise self.refuse(f"has a weight {key!r}")
            stack, _, place = site.partition(".")
            modules.setdefault(f"{stack}.{match[1]}.{place}", {})[match[2]] = value
        if not modules:
            raise GraftError(f"{self.folder} holds no weights: copy the adapter again.")
        return modules

    def weights(self, site: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """One bottleneck's weights by the names they have here."""
        linear = "adapter_down.1" if self.config.get("ln_before") else "adapter_down.0"
        names = {f"{linear}.bias": "down_bias", "adapter_up.bias": "up_bias", "scaling": "scaling"}
        names |= {"adapter_norm_before.weight": "before_weight", "adapter_norm_before.bias": "before_bias"}
        names |= {"adapter_norm_after.weight": "after_weight", "adapter_norm_after.bias": "after_bias"}
        matrices = {f"{linear}.weight": "down", "adapter_up.weight": "up"}
        again = ("adapter_down.0.weight", "adapter_down.0.bias") if self.config.get("ln_before") else ()
        unknown = sorted(set(parts) - set(names) - set(matrices) - set(again))
        missing = sorted({*matrices, f"{linear}.bias", "adapter_up.bias"} - set(parts))
        if unknown or missing:
            what = f"has a weight {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
            raise self.refuse(f"{what} at {site}")
        values = {own: parts[theirs] for theirs, own in names.items() if theirs in parts}
        return values | {own: parts[theirs].T for theirs, own in matrices.items()}

    def wiring(self) -> Adapter:
        config = self.config
        parallel, before = bool(config.get("is_parallel")), bool(config.get("original_ln_before"))
        residual = config.get("residual_before_ln", True)
        if residual not in (True, False, "post_add"):
            raise self.refuse(f"has residual_before_ln {residual!r}")
        keeps = None if parallel or not before or residual is True else "sum" if residual == "post_add" else "norm"
        return Adapter(
            activation=self.activation,
            norms="none",
            norm_before=bool(config.get("ln_before")),
            norm_after="own" if config.get("ln_after") else None,
            norm_sum=bool(config.get("ln_after") and config.get("adapter_residual_before_ln") and not parallel),
            reads="residual" if parallel else "norm" if before else None,
            keeps=cast(Any, keeps),
            joined=bool(config.get("original_ln_after", True)),
            dropout=config.get("dropout") or 0.0,
            backbone_dropout=True,
        )

    def extent(self, sites: list[str]) -> dict[str, Any]:
        """Which sites of which layers have an adapter."""
        have = {site.name for site in sites_of(self.model)}
        beyond = sorted(set(sites) - have)
        if beyond:
            raise GraftError(
                f"the adapter in {self.folder} has weights for {beyond[0]}, and this {type(self.model).__name__} has "
                "no such place: load the model class and size that it was made for."
            )
        places = dict.fromkeys(site.rpartition(".")[2] for site in sites)
        layers = sorted({int(site.split(".")[1]) for site in sites})
        every = sorted({int(site.split(".")[1]) for site in have})
        order = tuple(site for site in LOCATIONS if site in places)
        return {"sites": order, "layers": None if layers == every else tuple(layers)}

    def expected(self, method: Adapter) -> Iterator[str]:
        for site in sites_of(self.model):
            place = site.name.rpartition(".")[2]
            if place in method.sites and (method.layers is None or site.layer in method.layers):
                yield site.name

    def silent(self, method: Adapter, site: str, size: int) -> dict[str, Tensor]:
        """Weights that leave a site as it is: layers can be left out in one stack of a model and not in the other."""
        if method.keeps is not None or not method.joined or method.norm_before or method.norm_after is not None:
            raise self.refuse(f"leaves out {site} alone, in a wiring that nothing can stand for")
        d = int(self.model.config.hidden_size)
        shapes = {"down": (d, size), "down_bias": (size,), "up": (size, d), "up_bias": (d,)}
        return {name: torch.zeros(shape) for name, shape in shapes.items()}


def padded(parts: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """One layer's bottleneck with as many units as the largest has: the further ones are zero, and stay so."""
    more = size - parts["down"].shape[1]
    if not more:
        return dict(parts)
    widths = {"down": (0, more), "down_bias": (0, more), "up": (0, 0, 0, more)}
    return {name: torch.nn.functional.pad(value, widths.get(name, (0, 0))) for name, value in parts.items()}


@dataclass(frozen=True)
class FoundHead:
    """A head with its weights, and what the method must say for it."""

    head: Head
    tensors: dict[str, Tensor]
    method: dict[str, Any]


def read_head(folder: Path, model: Any, name: str) -> FoundHead | None:
    """The head that lies beside an adapter; None where there is none, or the model's own that writes."""
    if not (folder / HEAD_CONFIG).is_file():
        return None
    record = read_config(folder / HEAD_CONFIG)
    tensors = read_tensors(folder, HEAD_TENSORS, HEAD_PICKLE)
    config = record.get("config")
    what = f"the head in {folder}"
    leave = "leave it out with head=False (--no-head)."
    if config is None:
        found = STATIC_HEADS.get(str(record.get("model_class")))
        if found is None and writes_as(model, tensors):
            return None
        if found is None:
            raise GraftError(f"{what} is that of {record.get('model_class')}, which cannot be imported: {leave}")
        kind, pooler, linears = found
        config = {"head_type": kind, "use_pooler": pooler, "activation_function": "tanh", "layers": len(linears)}
        config |= {"label2id": record.get("label2id"), "num_labels": record.get("num_labels")}
    else:
        last = 4 if config.get("layers") == 2 else 1
        linears = tuple(f"heads.{record.get('name') or name}.{place}" for place in ([1, 4] if last == 4 else [1]))
    kind = str(config.get("head_type"))
    if kind in WRITERS and writes_as(model, tensors):
        return None
    hidden = config.get("layers") == 2
    known = kind in HEADS and config.get("layers") in (1, 2) and (not hidden or config["activation_function"] == "tanh")
    if not known or f"{linears[-1]}.weight" not in tensors:
        shape = f"{config.get('layers')} layers, {config.get('activation_function')}"
        raise GraftError(f"{what} is of kind {kind!r} ({shape}), which taskgraft has not: {leave}")
    weight = tensors[f"{linears[-1]}.weight"]
    if config.get("num_labels") not in (None, weight.shape[0]):
        raise GraftError(
            f"{what} has weights for {weight.shape[0]} labels, and says that it has {config['num_labels']}: copy the "
            f"adapter again, or {leave}"
        )
    head = head_of(kind, weight.shape[0], config.get("label2id"))
    values = {"head.weight": weight.T, "head.bias": tensors.get(f"{linears[-1]}.bias", torch.zeros(len(weight)))}
    if hidden:
        values |= {"head.hidden": tensors[f"{linears[0]}.weight"].T, "head.hidden_bias": tensors[f"{linears[0]}.bias"]}
    wanted: dict[str, Any] = {"head_hidden": values["head.hidden"].shape[1] if hidden else None}
    if not head.per_token:
        wanted["pooling"] = "pooler" if config.get("use_pooler") else "cls"
    drop = config.get("dropout_prob")
    wanted["head_dropout"] = float(getattr(model.config, "hidden_dropout_prob", 0.0) if drop is None else drop)
    return FoundHead(head, {key: value.contiguous() for key, value in values.items()}, wanted)


def writes_as(model: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a saved head that writes is the one which the model has itself."""
    own = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return own is not None and any(
        value.shape == own.weight.shape and torch.allclose(value.to(own.weight), own.weight)
        for value in tensors.values()
    )


def head_of(kind: str, width: int, label2id: Mapping[str, int] | None) -> Head:
    if kind == "question_answering":
        return Head("spans")
    if kind == "classification" and width == 1:
        return Head("regression")
    labels = {int(number): str(label) for label, number in (label2id or {}).items()}
    if len(labels) < len(label2id or {}):
        raise GraftError(f"two labels of the head have one number ({dict(label2id or {})}): copy the adapter again.")
    names = tuple(labels.get(number, str(number)) for number in range(width))
    return Head(cast(Any, HEADS[kind]), names)
