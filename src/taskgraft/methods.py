"""What is trained for a task: one frozen dataclass per method, with a JSON form that outlives the code.

`Adapter` is Houlsby et al. (ICML 2019), with the variants the authors tried and the adapter that the
HyperFormer paper puts into T5; `HyperFormer` is that paper's own (ACL 2021). The others are the baselines both
papers compare with.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from taskgraft.errors import GraftError

FORMAT = 1
DEFAULT_SIZE = 64

Activation = Literal["gelu_new", "gelu", "relu", "silu", "tanh", "sigmoid", "softplus", "leaky_relu", "elu", "identity"]
Pooling = Literal["pooler", "cls", "mean", "last"]
Norms = Literal["all", "layers", "shared", "none"]
SiteName = Literal["attention", "cross_attention", "feedforward"]


MOST_DEPTH = 64  # of a bottleneck
LARGEST = 1_000_000  # that a setting may be


def _require(ok: bool, sentence: str) -> None:
    if not ok:
        raise GraftError(sentence)


def _check_whole(method: Method, fields: Sequence[str], least: int = 1, optional: bool = False) -> None:
    for field in fields:
        value = getattr(method, field)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        ok = whole or (optional and value is None)
        _require(ok, f"{field}={value!r} must be a whole number of at least {least}.")


def _check_plain(method: Method) -> None:
    """Numbers are numbers and switches switches, also where a method comes from a file."""
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.type == "bool":
            _require(isinstance(value, bool), f"{field.name}={value!r} must be True or False.")
        elif field.type == "float":
            known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
            _require(known, f"{field.name}={value!r} must be a number, of at most {LARGEST:,}.")


def _check_sites(sites: Sequence[str]) -> None:
    _require(bool(sites), "sites=() leaves nothing to adapt: name at least one of attention, feedforward.")
    for site in sites:
        _check_choice("sites", site, SiteName)
    _require(len(set(sites)) == len(sites), f"sites={sites} names a site twice.")


def _bottleneck_size(size: int | None, reduction: int | None, d: int) -> int:
    if reduction is None:
        return size or DEFAULT_SIZE
    _require(reduction <= d, f"reduction={reduction} of a width of {d} leaves no units: use less.")
    return d // reduction


def _check_choice(field: str, value: object, choices: object, optional: bool = False) -> None:
    names = get_args(choices)
    _require(
        value in names or (optional and value is None), f"{field}={value!r} is unknown: use one of {', '.join(names)}."
    )


@dataclass(frozen=True, kw_only=True)
class Method:
    """What every method has in common: how the head reads the backbone, and what is regularised.

    `pooling=None` means the backbone's own habit: the mean for encoders, the last token for decoders.
    `backbone_dropout` keeps the frozen part's dropout on while training.
    """

    pooling: Pooling | None = None
    head_dropout: float = 0.1
    backbone_dropout: bool = True

    name: ClassVar[str]

    def __post_init__(self) -> None:
        _check_plain(self)
        _check_choice("pooling", self.pooling, Pooling, optional=True)
        _require(0 <= self.head_dropout < 1, f"head_dropout={self.head_dropout} must be at least 0 and below 1.")

    @property
    def trained_norms(self) -> Norms:
        """Which of the backbone's norms get trained weights."""
        return "none"

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone's own weights change, so that only one task can live on it."""
        return False

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "method": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Adapter(Method):
    """A bottleneck `y = x + up(act(down(x)))` at each site, the norms, and a head, per task.

    Give `size` (m) or `reduction` (m = d // reduction); neither means size 64. The options:
    `norm_before` normalises x before `down`; `norm_inside` ("layer", "batch") the m hidden units before the
    activation; `norm_after` ("own", "shared" by the tasks) the branch before the residual. `depth` k has k - 1
    further m -> m linears; 0 has no bottleneck, `y = x + norm_after(x)`. `parallel` reads the sub-layer's input,
    `y = sublayer(x_in) + scaling * branch(x_in)`; `multiplicative` is `y = x * (1 + branch)`. `dropout` acts on the
    hidden units while training. `head_hidden` gives the head a hidden layer of that many tanh units.

    The wirings of the AdapterHub, where the backbone goes on with `norm(x + residual)`: `reads="norm"` has the branch
    read that (Pfeiffer et al., 2021), `reads="residual"` the residual alone; `keeps` ("sum", "norm") adds it to
    `x + residual` or to its norm instead of x; `norm_sum` has `norm_after` normalise that sum instead of the branch;
    `joined=False` ends the sub-layer with the adapter, without the backbone's residual and norm.
    """

    name: ClassVar[str] = "adapter"

    size: int | None = None
    reduction: int | None = None
    sites: tuple[SiteName, ...] = ("attention", "feedforward")
    layers: tuple[int, ...] | None = None
    activation: Activation = "gelu_new"
    init_std: float = 1e-3
    norms: Norms | None = None
    norm_before: bool = False
    norm_inside: Literal["layer", "batch"] | None = None
    norm_after: Literal["own", "shared"] | None = None
    depth: int = 1
    parallel: bool = False
    scaling: float = 1.0
    multiplicative: bool = False
    dropout: float = 0.0
    reads: Literal["residual", "norm"] | None = None
    keeps: Literal["sum", "norm"] | None = None
    norm_sum: bool = False
    joined: bool = True
    head_hidden: int | None = None
    head_dropout: float = 0.0
    backbone_dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sites", tuple(self.sites))
        if self.layers is not None:
            whole = all(isinstance(layer, int) for layer in self.layers)
            _require(whole, f"layers={self.layers!r} must be whole numbers: the first layer is 0.")
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
            _require(bool(self.layers), "layers=() leaves no layer to adapt: leave it out to adapt all of them.")
        _require(self.size is None or self.reduction is None, "give size or reduction, not both.")
        _check_whole(self, ("size", "reduction", "head_hidden"), optional=True)
        _check_whole(self, ("depth",), least=0)
        _require(self.depth <= MOST_DEPTH, f"depth={self.depth} is more than the {MOST_DEPTH} linears that are known.")
        _check_sites(self.sites)
        _check_choice("activation", self.activation, Activation)
        _check_choice("norms", self.norms, Norms, optional=True)
        _check_choice("norm_inside", self.norm_inside, Literal["layer", "batch"], optional=True)
        _check_choice("norm_after", self.norm_after, Literal["own", "shared"], optional=True)
        _check_choice("reads", self.reads, Literal["residual", "norm"], optional=True)
        _check_choice("keeps", self.keeps, Literal["sum", "norm"], optional=True)
        _require(
            not (self.parallel and self.reads), f"parallel and reads={self.reads!r} both say what is read: use one."
        )
        _require(
            not self.norm_sum or self.norm_after is not None, "norm_sum says what norm_after normalises: give both."
        )
        _require(self.init_std >= 0, f"init_std={self.init_std} must not be negative.")
        _require(0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1.")
        if self.depth == 0:
            _require(self.norm_after is not None, "depth=0 leaves no branch: give it norm_after, or depth=1.")
            _require(self.norm_inside is None, "depth=0 has no hidden units: leave norm_inside out.")

    @classmethod
    def paper(cls, size: int = 64, **changes: Any) -> Adapter:
        """The recipe of Houlsby et al.: std 1e-2, every norm, a head on the frozen pooler, dropout on."""
        recipe: dict[str, Any] = {"init_std": 1e-2, "pooling": "pooler", "norms": "all"}
        recipe |= {"head_dropout": 0.1, "backbone_dropout": True}
        return cls(size=size, **{**recipe, **changes})

    @classmethod
    def adapterhub(cls, config: str = "seq_bn", size: int | None = None, **changes: Any) -> Adapter:
        """A configuration of the AdapterHub, by its name there: "seq_bn", "double_seq_bn" or "par_bn".

        Norms stay frozen and the head reads the first token, so `tg.export_adapterhub` can write the task whole.
        """
        presets: dict[str, dict[str, Any]] = {
            "seq_bn": {"sites": ("feedforward",), "activation": "relu", "reads": "norm", "reduction": 16},
            "double_seq_bn": {"activation": "silu", "reduction": 16},
            "par_bn": {"sites": ("feedforward",), "activation": "relu", "reads": "residual", "scaling": 4.0}
            | {"reduction": 2},
        }
        _require(config in presets, f"configuration {config!r} is unknown: use one of {', '.join(presets)}.")
        recipe = {**presets[config], "norms": "none", "pooling": "cls", "backbone_dropout": True}
        if size is not None:
            recipe = {**recipe, "size": size, "reduction": None}
        return cls(**{**recipe, **changes})

    @property
    def trained_norms(self) -> Norms:
        if self.norms is not None:
            return self.norms
        return "shared" if self.norm_after == "shared" else "all"

    def bottleneck_size(self, d: int) -> int:
        """The m of this adapter in a backbone of width d."""
        return _bottleneck_size(self.size, self.reduction, d)


@dataclass(frozen=True, kw_only=True)
class HyperFormer(Method):
    """Adapters `A(x) = LN(up(act(down(x)))) + x` whose weights, LN's included, are generated from a task's embedding.

    Tasks share the hypernetwork, so they are trained together. `shared=False` is HyperFormer: a linear hypernetwork at
    each place over the projected task embedding. `shared=True` is HyperFormer++: one for each stack, over the
    projection of [task, layer, position]. `shared="layers"` is the released code's in-between: one for each stack and
    position, over [task, layer]. The ablations: `blocks=False` leaves `LN(x) + x`; `conditional_norm=False` has no LN;
    `projector=False` generates from the embeddings as they are; `norms="none"` keeps the backbone's norms frozen.
    """

    name: ClassVar[str] = "hyperformer"

    shared: bool | Literal["layers"] = False
    size: int | None = None
    reduction: int | None = None
    sites: tuple[SiteName, ...] = ("attention", "feedforward")
    activation: Activation = "gelu_new"
    task_dim: int = 64
    hidden_dim: int = 128
    projected_dim: int = 64
    init_std: float = 1e-2
    blocks: bool = True
    conditional_norm: bool = True
    projector: bool = True
    norms: Norms = "shared"
    head_dropout: float = 0.0
    backbone_dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sites", tuple(self.sites))
        _require(
            isinstance(self.shared, bool) or self.shared == "layers",
            f"shared={self.shared!r} is unknown: use False (HyperFormer), True (HyperFormer++) or 'layers'.",
        )
        _require(self.size is None or self.reduction is None, "give size or reduction, not both.")
        if self.size is None and self.reduction is None:
            object.__setattr__(self, "reduction", 32)
        _check_whole(self, ("size", "reduction"), optional=True)
        _check_whole(self, ("task_dim", "hidden_dim", "projected_dim"))
        _check_sites(self.sites)
        _check_choice("activation", self.activation, Activation)
        _check_choice("norms", self.norms, Norms)
        _require(self.init_std >= 0, f"init_std={self.init_std} must not be negative.")
        _require(
            self.blocks or self.conditional_norm,
            "blocks=False and conditional_norm=False leave nothing to generate: use tg.NormsOnly().",
        )

    @classmethod
    def paper(cls, shared: bool = True, **changes: Any) -> HyperFormer:
        """The recipe of the paper: reduction 32, and the frozen part's dropout on while training."""
        return cls(shared=shared, **{"reduction": 32, "backbone_dropout": True, **changes})

    @property
    def trained_norms(self) -> Norms:
        return self.norms

    def bottleneck_size(self, d: int) -> int:
        """The b of the generated adapters in a backbone of width d."""
        return _bottleneck_size(self.size, self.reduction, d)

    @property
    def adapter(self) -> Adapter:
        """The plain adapter of one task, as a hypernetwork writes it."""
        return Adapter(
            size=self.size,
            reduction=self.reduction,
            sites=self.sites,
            activation=self.activation,
            norms="all" if self.norms == "shared" else self.norms,
            norm_after="own" if self.conditional_norm else None,
            depth=1 if self.blocks else 0,
            pooling=self.pooling,
            head_dropout=self.head_dropout,
            backbone_dropout=self.backbone_dropout,
        )


@dataclass(frozen=True, kw_only=True)
class FullFineTuning(Method):
    """Every weight of the backbone, and a head: one whole copy per task."""

    name: ClassVar[str] = "full"

    @property
    def trains_backbone(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class TopLayers(Method):
    """Variable fine-tuning: the top k layers (of each stack), the norm above them, and a head."""

    name: ClassVar[str] = "top-layers"

    k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k >= 1
        _require(whole, f"k={self.k!r} must be a whole number of at least 1.")

    @property
    def trains_backbone(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class NormsOnly(Method):
    """The backbone's norms and a head."""

    name: ClassVar[str] = "norms"

    norms: Norms = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("norms", self.norms, Norms)
        _require(self.norms != "none", 'NormsOnly(norms="none") trains nothing but the head: use HeadOnly().')

    @property
    def trained_norms(self) -> Norms:
        return self.norms


@dataclass(frozen=True, kw_only=True)
class HeadOnly(Method):
    """A head on frozen features: linear, or with one hidden layer of `hidden` tanh units."""

    name: ClassVar[str] = "head"

    hidden: int | None = None
    backbone_dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.hidden, int) and not isinstance(self.hidden, bool) and self.hidden >= 1
        _require(self.hidden is None or whole, f"hidden={self.hidden!r} must be a whole number of at least 1.")


METHODS: dict[str, type[Method]] = {
    m.name: m for m in (Adapter, HyperFormer, FullFineTuning, TopLayers, NormsOnly, HeadOnly)
}


def method_from_json(record: dict[str, Any]) -> Method:
    """Read what `to_json` wrote, also by a later version: keys unknown here are named in a warning and left out."""
    fields = dict(record)
    written = fields.pop("format", FORMAT)
    name = fields.pop("method", None)
    if not isinstance(name, str) or name not in METHODS:
        raise GraftError(
            f"method {name!r} is unknown to this version of taskgraft: it knows {', '.join(METHODS)}; update taskgraft."
        )
    known = {f.name for f in dataclasses.fields(METHODS[name])}
    unknown = sorted(set(fields) - known)
    if unknown:
        warnings.warn(
            f"ignoring {', '.join(unknown)} of a method written in format {written}: this version reads {FORMAT}.",
            stacklevel=2,
        )
    kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k in known}
    try:
        return METHODS[name](**kept)
    except TypeError as error:
        raise GraftError(f"a field of method {name!r} has the wrong type: {error}.") from error


FORMS = (
    "adapter-64, paper-64, seq_bn-48, double_seq_bn, par_bn (the AdapterHub's), hyperformer, hyperformer++ (or "
    "hyperformer++-24, a size), dagger, full, top-2, norms, head, head-128 (a hidden layer), automl; full@3e-5 sets "
    "a rate"
)


def method_named(name: str) -> tuple[Method, float | None]:
    """A method and its learning rate (None: the default) from a short name: "adapter-64", "top-2", "full@3e-5"."""
    kinds = r"adapter|paper|seq_bn|double_seq_bn|par_bn|hyperformer\+\+|hyperformer|dagger|full|top|norms|head"
    match = re.fullmatch(rf"({kinds})(?:-(\d+))?(?:@(\d+(?:\.\d+)?(?:e-?\d+)?))?", name)
    if match is None:
        raise GraftError(f"method {name!r} is unknown: use {FORMS}.")
    kind, number, rate = match[1], None if match[2] is None else int(match[2]), match[3]
    if (number is None and kind == "top") or (number is not None and kind in ("full", "norms")):
        raise GraftError(f"method {name!r} has {'no number' if number is None else 'a number too many'}: use {FORMS}.")
    method: Method
    if kind == "adapter":
        method = Adapter(size=number)
    elif kind == "paper":
        method = Adapter.paper(number or DEFAULT_SIZE)
    elif kind.endswith("_bn"):
        method = Adapter.adapterhub(kind, number)
    elif kind.startswith("hyperformer"):
        method = HyperFormer(shared=kind.endswith("++"), size=number)
    elif kind == "dagger":
        method = Adapter(size=number, reduction=None if number else 32, norm_after="shared")
    elif kind == "top":
        method = TopLayers(k=number or 0)
    else:
        method = {"full": FullFineTuning(), "norms": NormsOnly(), "head": HeadOnly(hidden=number)}[kind]
    _require(rate is None or float(rate) > 0, f"method {name!r} has a learning rate of 0: use {FORMS}.")
    return method, None if rate is None else float(rate)
