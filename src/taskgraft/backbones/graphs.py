"""CUDA graphs: a model's calls recorded once for each shape and played back, so that launching costs nothing.

Which task a row goes through, and the weights, are inputs of a recording and never constants: tasks may come and go,
and be trained, without a new one. Only when a bank's memory moves (it grew, or others are trained) are all dropped.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.api import grafts_of, trainable
from taskgraft.errors import GraftError
from taskgraft.nn.rows import Draft, Route, bind

MOST = 256  # recordings that are kept; the least recently used goes
MOST_TOKENS = 65_536  # of a batch that is recorded: launching a larger one is hidden behind its computing
ONE_AT_A_TIME = threading.Lock()  # of recordings, whichever threads make them: they share a stream


class Graphed:
    """Calls a grafted model by recordings, in inference and, with gradients, in training.

    `graphed(rows, inputs)` is `with tg.rows(model, rows): model(**inputs)`. A shape is recorded when it comes for the
    second time. An output is overwritten by the next call, and its backward pass, which adds to the parameters'
    gradients, must come before that. One thread may call it. On a CPU, for very large batches, with a batch norm, or
    for a model that cannot be recorded (a warning says why), calls are made as usual.
    """

    def __init__(self, model: Any, most: int = MOST) -> None:
        self.model, self.most = model, most
        self.grafts = grafts_of(model)
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._layout: Hashable = None
        self._pool: Any = None
        self.parameters: dict[str, Tensor] = {}  # that learn
        self._gradients: dict[str, Tensor] = {}  # where backward passes add up, by parameter
        self._received: dict[Hashable, Tensor] = {}  # where a backward pass begins, by name and shape of an output
        self.refused: str | None = None  # why this model cannot be recorded
        self.latest: object = None  # the call whose backward pass may come

    def __call__(self, rows: Sequence[str | None] | str | None, inputs: dict[str, Tensor], **options: Any) -> Any:
        if "labels" in inputs:
            raise GraftError("a graphed call takes no labels: take its output's loss with tg.loss.")
        draft = self.grafts.draft_of(rows, recorded=True)
        key = self._key(draft, inputs, options) if self._can_record(draft, inputs) else None
        if key is None or (key not in self.recordings and key not in self._seen):
            self._seen.add(key)
            return Call(self.model, lambda: self.grafts.route_of(rows), options)(inputs)
        recording = self.recordings.get(key)
        if recording is None:
            if len(self.recordings) >= self.most:
                self._seen.discard(self.recordings.popitem(last=False)[0])
            try:
                with ONE_AT_A_TIME, torch.cuda.device(self.grafts.device):
                    recording = self.recordings[key] = Recording(self, draft, inputs, options)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    self.forget()
                self.refused = str(error).splitlines()[0]
                warnings.warn(f"no CUDA graphs for {type(self.model).__name__}: {self.refused}", stacklevel=2)
                return Call(self.model, lambda: self.grafts.route_of(rows), options)(inputs)
        self.recordings.move_to_end(key)
        return recording.play(inputs, draft)

    def _can_record(self, draft: Draft, inputs: dict[str, Tensor]) -> bool:
        small = inputs["input_ids"].numel() <= MOST_TOKENS if "input_ids" in inputs else False
        possible = self.grafts.device.type == "cuda" and self.refused is None
        return possible and small and not self.grafts.has_batch_norm(draft.kinds)

    def _follow(self) -> None:
        """Drop what was recorded if the weights have moved since, and take hold of the gradients."""
        first, attention = next(self.model.parameters()), self.model.config._attn_implementation
        layout = (self.grafts.layout, self.grafts.generation, first.data_ptr(), first.dtype, attention)
        if layout != self._layout:
            self.forget()
            self.parameters = trainable(self.model)
            self._layout = layout

    def forget(self) -> None:
        """Drop all recordings and give their memory back."""
        self.recordings.clear()
        self._seen.clear()
        self._gradients, self._received = {}, {}
        self._pool = self.latest = None

    def _key(self, draft: Draft, inputs: dict[str, Tensor], options: dict[str, Any]) -> Hashable:
        self._follow()
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return (
            tuple((name, value.shape, value.dtype) for name, value in inputs.items()),
            tuple(sorted(options.items())),
            draft.outline,
            draft.kernel,
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, self.model.training),
        )

    def pool(self) -> Any:
        """The memory that recordings share: only one of them is between its forward and its backward pass."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def received(self, name: str, output: Tensor) -> Tensor:
        """Memory for the gradient of an output. Recordings share it, since only one of them is on its way back."""
        key = name, output.shape, output.dtype
        if key not in self._received:
            self._received[key] = torch.zeros_like(output)
        return self._received[key]

    @torch.no_grad()
    def gradients(self, reached: Iterable[str]) -> dict[str, Tensor]:
        """The `grad` of parameters that a backward pass reaches, always the same memory; zeros where it has none."""
        missing = []
        for name in reached:
            parameter = self.parameters[name]
            own = self._gradients.get(name)
            if own is None:
                own = self._gradients[name] = torch.zeros_like(parameter)
            if parameter.grad is None:
                missing.append(own)
            elif parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
        if missing:
            torch._foreach_zero_(missing)
        return self._gradients


@contextmanager
def recorded(model: Any) -> Iterator[None]:
    """Let training and prediction on a model go by recordings for the length of a `with` block, in one thread."""
    grafts = grafts_of(model)
    if grafts.graphed is not None:
        yield
        return
    graphed = grafts.graphed = Graphed(model)
    try:
        yield
    finally:
        grafts.graphed = None
        graphed.forget()  # now: recordings and what they belong to hold one another until a collection of garbage


def forget_recordings(model: Any) -> bool:
    """Give the memory of recordings back and make no more in this `recorded` block; whether there were any."""
    graphed = grafts_of(model).graphed
    if graphed is None or not graphed.recordings:
        return False
    graphed.forget()
    graphed.refused = "out of memory"
    return True


def call(model: Any, rows: Sequence[str | None] | str | None, inputs: dict[str, Tensor], **options: Any) -> Any:
    """The model's output for these rows, by a recording inside a `recorded` block."""
    grafts = grafts_of(model)
    if grafts.graphed is not None:
        return grafts.graphed(rows, inputs, **options)
    with bind(grafts.bound, grafts.route_of(rows)):
        return model(**inputs, **options)


class Call:
    """The model's own forward on rows that are laid out when it is called, so that a recording holds that too."""

    def __init__(self, model: Any, route: Callable[[], Route], options: dict[str, Any]) -> None:
        self.model, self.route, self.options = model, route, options

    def __call__(self, inputs: dict[str, Tensor]) -> Any:
        # A cast that autocast remembers from before would be a constant of the recording.
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        autocast = torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False)
        with bind(self.model.taskgraft.bound, self.route()), autocast:
            return self.model(**inputs, **self.options)


class Recording:
    """One shape's forward pass and, if it learns, its backward pass."""

    def __init__(self, graphed: Graphed, draft: Draft, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
        self.graphed = graphed
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        self.index = draft.flat().to(graphed.grafts.device)  # which rows go where, all in one tensor
        call = Call(graphed.model, lambda: draft.route(self.index), options)
        state = torch.cuda.get_rng_state()
        try:
            with stand_ins(graphed.model, graphed.parameters) as parameters:
                self._record(call, parameters)
        except RuntimeError:
            leave_recording()
            raise
        finally:
            torch.cuda.set_rng_state(state)  # what dropout draws next does not depend on when a shape was recorded

    def _record(self, call: Call, parameters: dict[str, Tensor]) -> None:
        graphed = self.graphed
        self.reached = self._warm_up(call, parameters)
        self.forward, self.backward = torch.cuda.CUDAGraph(), None
        with recording(self.forward, graphed):
            output = call(self.inputs)
        self.kind = type(output)
        self.results = dict(output.items())
        if not all(isinstance(value, Tensor) for value in self.results.values()):
            raise GraftError(f"a graphed call gives tensors, and {list(self.results)} are more: call the model itself.")
        self.learns = [name for name, value in self.results.items() if value.requires_grad]
        self.received = [graphed.received(name, self.results[name]) for name in self.learns]
        if self.learns:
            self.backward = torch.cuda.CUDAGraph()
            gradients = graphed.gradients(self.reached)
            with recording(self.backward, graphed):
                results = [self.results[name] for name in self.learns]
                found = torch.autograd.grad(results, [parameters[name] for name in self.reached], self.received)
                torch._foreach_add_([gradients[name] for name in self.reached], list(found))
        self.results = {name: value.detach() for name, value in self.results.items()}
        self.start = next(iter(self.results.values())).new_zeros((), requires_grad=True) if self.learns else None

    def _warm_up(self, call: Call, parameters: dict[str, Tensor]) -> list[str]:
        """Once, on the stream of recordings: kernels are compiled and workspaces made, which cannot be recorded.

        The parameters that a backward pass reaches.
        """
        reached: list[str] = []
        stream = side_stream(self.graphed.grafts.device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                output = call(self.inputs)
                learns = [value for value in output.values() if isinstance(value, Tensor) and value.requires_grad]
                if learns:
                    received = [torch.zeros_like(value) for value in learns]
                    found = torch.autograd.grad(learns, list(parameters.values()), received, allow_unused=True)
                    reached = [name for name, value in zip(parameters, found, strict=True) if value is not None]
        finally:  # after an error, too, what it was given is read until then
            torch.cuda.current_stream().wait_stream(stream)
        return reached

    def play(self, inputs: dict[str, Tensor], draft: Draft) -> Any:
        for name, value in self.inputs.items():
            value.copy_(inputs[name], non_blocking=True)
        self.index.copy_(draft.flat(), non_blocking=True)
        self.forward.replay()
        results = self.results
        self.graphed.latest = token = object()
        if self.start is not None:
            values = Played.apply(self, token, self.start)  # type: ignore[no-untyped-call]
            results = {**results, **dict(zip(self.learns, values, strict=True))}
        return self.kind(**results)

    def play_backward(self, token: object, received: Sequence[Tensor | None]) -> None:
        if self.graphed.latest is not token:
            raise GraftError(
                "a graphed model was called again, or its recordings were dropped, before the backward pass of its "
                "last output: take the loss and call backward() after each call."
            )
        self.graphed.latest = None
        self.graphed.gradients(self.reached)
        for own, value in zip(self.received, received, strict=True):
            own.zero_() if value is None else own.copy_(value)
        assert self.backward is not None
        self.backward.replay()


class Played(torch.autograd.Function):
    """What ties a recording's output to its recorded backward pass."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, token: object, start: Tensor) -> tuple[Tensor, ...]:
        ctx.recording, ctx.token = recording, token
        return tuple(recording.results[name].view_as(recording.results[name]) for name in recording.learns)

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[None, None, None]:
        ctx.recording.play_backward(ctx.token, received)
        return None, None, None


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all warm-ups and recordings: a stream that multiplies matrices keeps a workspace for good."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def stand_ins(model: Any, parameters: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Parameters of the same memory in the place of a model's own, for the length of a `with` block.

    While anything holds the autograd graph of a call, even a loss that was not let go, a parameter's part in it is tied
    to the stream of that call; a recording on another stream would have to wait for it, which it cannot.
    """
    made = {id(value): torch.nn.Parameter(value.detach()) for value in parameters.values()}
    places = [
        (module._parameters, name, value)
        for module in model.modules()
        for name, value in module._parameters.items()
        if id(value) in made
    ]
    for table, name, value in places:
        table[name] = made[id(value)]
    try:
        yield {name: made[id(value)] for name, value in parameters.items()}
    finally:
        for table, name, value in places:
            table[name] = value


def leave_recording() -> None:
    """After a recording that failed: the random generator still thinks that it is part of one."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def recording(graph: torch.cuda.CUDAGraph, graphed: Graphed) -> Any:
    stream = side_stream(graphed.grafts.device)
    return torch.cuda.graph(graph, pool=graphed.pool(), stream=stream, capture_error_mode="thread_local")
