"""The bodies of requests and of answers, as they are checked and as the OpenAPI description shows them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

# Of a list with a hundred thousand mistakes in it, the first is told.
Words = Annotated[list[str], Field(fail_fast=True)]
Text = Annotated[str | Words, Field(description="A text; for a token task, also its words.")]
Timeout = Annotated[float, Field(gt=0, le=300, description="Seconds to wait for an answer.", allow_inf_nan=False)]


class Body(BaseModel):
    """What is sent, kept to the letter."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AskOne(Body):
    """A text for a task."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"text": "WIN a prize now"}, {"text": "A man sleeps.", "pair": "Somebody is awake."}]
        }
    )

    text: Text
    pair: str | None = Field(None, description="The second text of a task that reads pairs; for spans, the context.")
    timeout: Timeout | None = None


class AskMany(Body):
    """Texts for a task."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["WIN a prize now", "see you at noon"]}]})

    texts: list[Text] = Field(min_length=1, fail_fast=True)
    pairs: Words | None = Field(None, description="As many as there are texts.")
    timeout: Timeout | None = None


def one_or_many(body: Any) -> str:
    return "many" if isinstance(body, dict) and "texts" in body else "one"


Ask = Annotated[Annotated[AskOne, Tag("one")] | Annotated[AskMany, Tag("many")], Discriminator(one_or_many)]


class QuestionBody(Body):
    """A text for one of the tasks."""

    task: str = Field(description="The task's name; JOINT/TASK of tasks that were trained together.")
    text: Text
    pair: str | None = None


class AskMixed(Body):
    """Texts for any tasks."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"questions": [{"task": "spam", "text": "WIN a prize now"}, {"task": "tone", "text": "thanks, lovely"}]}
            ]
        }
    )

    questions: list[QuestionBody] = Field(min_length=1, fail_fast=True)
    timeout: Timeout | None = None


class Rollback(Body):
    """Which version of a task is wanted; without one, that before the current."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"version": 2}]})

    version: int | None = Field(None, ge=1)


class ErrorBody(BaseModel):
    """What was wrong, in a sentence that names the fix."""

    type: str
    message: str
    id: str | None = Field(None, description="What the server's log calls a failure; only with status 500.")


class ErrorAnswer(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"error": {"type": "unknown_task", "message": "there is no task 'spma'."}}]}
    )

    error: ErrorBody


class OneAnswer(BaseModel):
    """What a task says of a text; which fields are there depends on the kind of task."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "task": "spam",
                    "version": 1,
                    "kind": "classification",
                    "label": "yes",
                    "probability": 0.97,
                    "probabilities": {"no": 0.03, "yes": 0.97},
                }
            ]
        }
    )

    task: str
    version: int | None
    kind: str
    label: str | None = None
    probability: float | None = None
    probabilities: dict[str, float] | None = None
    labels: list[str] | None = None
    value: float | None = None
    tags: list[str] | None = None
    answer: str | None = None
    start: int | None = None
    end: int | None = None


class NoAnswer(BaseModel):
    """Why a question has none."""

    task: str
    error: ErrorBody


class ManyAnswers(BaseModel):
    answers: list[OneAnswer]


class MixedAnswers(BaseModel):
    answers: list[OneAnswer | NoAnswer] = Field(description="In the order of the questions.")


class TaskLine(BaseModel):
    """What is known of a task."""

    name: str
    version: int | None
    kind: str
    labels: list[str]
    reads_pairs: bool
    method: str
    parameters: int
    bytes: int
    score: float | None
    metrics: dict[str, Any]
    created: str
    resident: bool = Field(description="Whether it is on the device at this moment.")


class BrokenTask(BaseModel):
    """A task whose files cannot be read."""

    name: str
    error: ErrorBody


class TaskList(BaseModel):
    tasks: list[TaskLine | BrokenTask]
    total: int = Field(description="How many there are, on all pages.")
    next: str | None = Field(description="What to give as `after` for the next page.")


class TaskPage(TaskLine):
    """All that is known of a task."""

    card: str | None
    versions: list[int]
    backbone: str


class Changed(BaseModel):
    """The version that a task is at now."""

    task: str
    version: int


class Health(BaseModel):
    status: str


class Latency(BaseModel):
    p50: float | None
    p95: float | None
    p99: float | None


class Stats(BaseModel):
    """What the server is doing; rate and latency are of the last ten seconds."""

    tasks: int
    resident: int
    resident_bytes: int
    budget_bytes: int
    waiting: int
    answered: int
    errors: int
    rate: float
    latency_ms: Latency
    uptime_s: float
