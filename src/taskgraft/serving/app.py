"""The HTTP server: an engine's tasks behind FastAPI, with its OpenAPI description.

A request passes the journal (id, log, metrics), the guard (host, origin, token, size) and then its route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, get_type_hints

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from taskgraft import __version__
from taskgraft.errors import GraftError
from taskgraft.serving import routes, shapes
from taskgraft.serving.bodies import Limits, read_json
from taskgraft.serving.engine import Engine
from taskgraft.serving.guard import LOOPBACK, Guard, Tokens, need_of
from taskgraft.serving.journal import Journal
from taskgraft.serving.listing import Listing, first_answer
from taskgraft.serving.metrics import Metrics
from taskgraft.serving.problems import Json, misshapen
from taskgraft.serving.routes import Served


class JsonRoute(APIRoute):
    """A route with a JSON body, which is parsed once and strictly; FastAPI describes it, and is not in its way."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        endpoint: Callable[..., Awaitable[Response]] = self.endpoint
        body = TypeAdapter(get_type_hints(endpoint, include_extras=True)["body"])

        async def handle(request: Request) -> Response:
            try:
                checked = body.validate_python(await read_json(request))
            except ValidationError as error:
                return misshapen(error).response()
            return await endpoint(request=request, body=checked, **request.path_params)

        return handle


ASKING, CHANGING, READING = (400, 408, 413, 415, 422, 429, 500, 503, 504), (400, 408, 413, 409, 500, 503), (400, 422)
BINARY = {"schema": {"type": "string", "format": "binary"}}
ZIP = {"openapi_extra": {"requestBody": {"required": True, "content": {"application/zip": BINARY}}}}
TEXT = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
TASK = "/v1/tasks/{task:path}"


def add_routes(app: FastAPI) -> None:
    """What is called before what is called more generally."""

    def route(
        method: str, path: str, endpoint: Callable[..., Any], tag: str, model: Any, *problems: int, **options: Any
    ) -> None:
        described: dict[int | str, Any] = {status: {"model": shapes.ErrorAnswer} for status in (401, 403, *problems)}
        options = {"response_class": Json, **options, "responses": {**described, **options.get("responses", {})}}
        kind = JsonRoute if method == "POST" else None
        app.router.add_api_route(
            path, endpoint, methods=[method], response_model=model, tags=[tag], route_class_override=kind, **options
        )

    answers = shapes.OneAnswer | shapes.ManyAnswers
    route("POST", f"{TASK}/predict", routes.predict, "questions", answers, 404, *ASKING)
    route("POST", "/v1/predict", routes.predict_mixed, "questions", shapes.MixedAnswers, *ASKING)
    route("POST", f"{TASK}/rollback", routes.roll_back, "tasks", shapes.Changed, 404, 415, 422, *CHANGING)
    for last in ("predict", "rollback"):
        app.router.add_api_route(
            f"{TASK}/{last}", routes.only_post, methods=["GET", "PUT", "DELETE"], include_in_schema=False
        )
    route("GET", "/v1/tasks", routes.list_tasks, "tasks", shapes.TaskList, *READING)
    route("GET", TASK, routes.show_task, "tasks", shapes.TaskPage, 404, 503, *READING)
    new = {201: {"model": shapes.Changed}}
    route("PUT", TASK, routes.put_task, "tasks", shapes.Changed, 404, 415, 422, *CHANGING, responses=new, **ZIP)
    gone = {"status_code": 204, "response_class": Response}
    route("DELETE", TASK, routes.remove_task, "tasks", None, 404, 422, *CHANGING, **gone)
    route("GET", "/v1/stats", routes.stats, "server", shapes.Stats)
    route("GET", "/healthz", routes.health, "server", shapes.Health)
    route("GET", "/readyz", routes.readiness, "server", shapes.Health, 503)
    route("GET", "/metrics", routes.metrics_text, "server", None, response_class=Response, responses=TEXT)
    route("GET", "/", routes.page, "page", None, include_in_schema=False)
    route("GET", "/page/{file}", routes.page, "page", None, include_in_schema=False)


def describe(app: FastAPI, tokens: Tokens, limits: Limits) -> None:
    """Let the description say what depends on how the server was started: its limits, and who needs a token."""
    schema = app.openapi()
    shapes_of = schema["components"]["schemas"]
    shapes_of["AskMany"]["properties"]["texts"]["maxItems"] = limits.texts
    shapes_of["AskMixed"]["properties"]["questions"]["maxItems"] = limits.texts
    for name in ("AskOne", "QuestionBody"):
        text = shapes_of[name]["properties"]["text"]
        text["description"] = f"{text['description']} At most {limits.characters:,} characters."
    schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            need = need_of(method.upper(), path)
            if (need == "admin" and tokens.admin) or (need != "nothing" and tokens.predict):
                operation["security"] = [{"token": []}]


def create_app(
    engine: Engine,
    *,
    tokens: Tokens | None = None,
    hosts: Collection[str] | None = LOOPBACK,
    limits: Limits | None = None,
) -> FastAPI:
    """An engine's tasks over HTTP. `hosts` are the names that the server may be asked by; None: any.

    The engine is its caller's to close, once the app has answered its last request.
    """
    tokens, limits = tokens or Tokens(), limits or Limits()
    of = Served(engine, Metrics(engine), Listing(engine), limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def warm() -> None:
            await run_in_threadpool(first_answer, engine)
            of.ready = True

        app.state.warming = asyncio.create_task(warm())
        yield
        of.closing = True

    app = FastAPI(
        title="taskgraft",
        version=__version__,
        description="One frozen Transformer, any number of tasks.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.served = of
    add_routes(app)
    describe(app, tokens, limits)
    app.add_middleware(Guard, tokens=tokens, hosts=hosts, limits=limits)
    app.add_middleware(Journal, metrics=of.metrics, routes=app.routes, state=of)

    async def answer_error(request: Request, error: Exception) -> Response:
        return of.problem(error).response()

    async def answer_misshapen(request: Request, error: Exception) -> Response:
        return misshapen(error).response()

    async def answer_method(request: Request, error: Exception) -> Response:
        path = getattr(request.scope.get("route"), "path_format", None)
        same = [one for one in app.routes if isinstance(one, APIRoute) and one.path_format == path]
        methods = {method for one in same if one.endpoint is not routes.only_post for method in one.methods or ()}
        return replace(of.problem(error), headers={"Allow": ", ".join(sorted(methods))}).response()

    app.add_exception_handler(405, answer_method)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(RequestValidationError, answer_misshapen)
    app.add_exception_handler(GraftError, answer_error)
    return app
