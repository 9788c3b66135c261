"""How fast many tasks are served over HTTP on a CPU, what it costs in memory, and that every answer is the right one.

  python benchmarks/serve.py --peer-python peer/bin/python
  python benchmarks/serve.py --only many --many 5000 --room 200

Sections: offline, closed, open, churn, alternatives; and many, when it is asked for. Each is merged into serve.json
when it is done, so that they can be run one after the other (--only closed,open). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from alternatives import GROUPED, MODELS, SWAPPED, Trial, available_bytes, memory
from churn import Churn
from load import Order
from questions import answered, make_store, pack, questions, texts, tiny_backbone
from serve_plots import draw, write_table
from timing import hardware, versions

import taskgraft as tg
from taskgraft.backbones.load import EMBEDDED_NAME, embedded_folder
from taskgraft.backbones.room import used

HERE = Path(__file__).resolve().parent
SECTIONS = ("offline", "closed", "open", "churn", "alternatives", "many")
NEEDS = {"open": "closed", "churn": "open"}  # a section, and the one whose figures it takes
START_S, LIMIT_S = 300, 7200
GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    tasks: int = 100
    size: int = 64  # units of an adapter
    questions: int = 1500
    clients: int = 64
    seconds: float = 60.0  # of a load
    warmup_s: float = 5.0
    single_s: float = 10.0  # of one client alone
    share: float = 0.6  # of the closed loop's throughput, in the open one
    counts: tuple[int, ...] = (1, 10, 100)  # tasks of the alternatives
    trial_s: float = 15.0
    many: int = 5000
    room: int = 200
    many_size: int = 8
    many_clients: int = 16


SMOKE = Plan(
    tasks=6, size=4, questions=30, clients=4, seconds=1.5, warmup_s=0.2, single_s=0.3, counts=(3,), trial_s=0.5,
    many=24, room=6, many_size=4, many_clients=3,
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    port: int
    pid: int
    token: str


@contextmanager
def serving(store: Path, backbone: Path | None, log: Path, memory: int | None = None) -> Iterator[Served]:
    """`taskgraft serve` on a store, as a process of its own, its log in a file; it must end well when it is told to."""
    command = [sys.executable, "-m", "taskgraft.cli", "serve", "--store", str(store), "--port", "0", "--json"]
    command += ["--backbone", str(backbone)] if backbone else []
    command += ["--memory", str(memory)] if memory else []
    token = secrets.token_hex(16)
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TASKGRAFT_ADMIN_TOKEN": token, "HF_HUB_OFFLINE": "1"}
    environment.pop("TASKGRAFT_TOKEN", None)
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_S)[0] else ""
        if not line:
            raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
        yield Served(int(json.loads(line)["url"].rpartition(":")[2]), process.pid, token)
        process.terminate()
        if process.wait(START_S) != 0:
            raise SystemExit(f"the server ended with code {process.returncode}: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()


class Bench:
    """The sections of one run, on a store that is made when it is first needed."""

    def __init__(self, plan: Plan, folder: Path, peer: str | None, smoke: bool, found: dict[str, Any]) -> None:
        self.plan, self.folder, self.peer, self.found = plan, folder, peer, found
        self.backbone_folder = tiny_backbone(folder / "backbone") if smoke else None
        self.backbone = tg.load_backbone(self.backbone_folder)
        self.start = time.monotonic()
        self.names: list[str] = []
        self.store = folder / "store"
        self.servers = ExitStack()
        self.server: Served | None = None
        self.engine: float | None = None  # its throughput when it was last measured

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def prepare(self) -> None:
        """The store, the texts, and the answers that are right."""
        if self.names:
            return
        self.say(f"a store of {self.plan.tasks} grafts, and the answers to {self.plan.questions} questions")
        self.names = make_store(self.store, self.backbone, self.plan.tasks, self.plan.size)
        self.texts = texts(self.plan.questions)
        self.asked = questions(self.names, self.texts)
        with tg.Engine(self.backbone, self.store) as engine:
            self.right = answered(engine, self.asked)
        self.questions = self.write("questions", self.right)

    def write(self, name: str, content: Any) -> str:
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(content))
        return str(file)

    def serving(self, store: Path, memory: int | None = None) -> AbstractContextManager[Served]:
        return serving(store, self.backbone_folder, self.folder / "server.log", memory)

    def running(self) -> Served:
        """The server that the loads share, started by the first of them."""
        self.prepare()
        if self.server is None:
            self.server = self.servers.enter_context(self.serving(self.store))
        return self.server

    def stop(self) -> None:
        """End that server, so that nothing runs beside what is measured next."""
        self.server = None
        self.servers.close()

    def loaded(self, order: Order) -> dict[str, Any]:
        """What a load finds, from a process of its own."""
        return worked([sys.executable, str(HERE / "load.py"), self.write("order", asdict(order))])

    def order(self, server: Served, **changes: Any) -> Order:
        plan = self.plan
        given = Order(server.port, server.pid, self.questions, plan.clients, plan.seconds, plan.warmup_s)
        return replace(given, **changes)

    # -- the sections

    def offline(self) -> dict[str, Any]:
        """The engine by itself: its throughput on all questions at once, and the time of one at a time."""
        self.prepare()
        backbone = str(self.backbone_folder) if self.backbone_folder else None
        given = {"store": str(self.store), "backbone": backbone, "asked": self.asked, "single_s": self.plan.single_s}
        found = worked([sys.executable, str(HERE / "offline.py"), self.write("offline", given)])
        self.engine = found["throughput"]
        return found

    def around(self) -> dict[str, float]:
        """The engine's throughput, the mean of now and of when it was last measured: a shared machine drifts."""
        before = self.engine or self.found["offline"]["throughput"]
        return {"engine": (before + self.offline()["throughput"]) / 2}

    def single(self, server: Served) -> dict[str, Any]:
        """One client alone."""
        return self.loaded(self.order(server, clients=1, seconds=self.plan.single_s))

    def at_random(self, server: Served, rate: float, churn: Churn | None = None) -> dict[str, Any]:
        """Requests at random times, and a single row's time before and after them."""
        single = self.single(server)
        found = self.loaded(self.order(server, churn=churn, rate=rate))
        single_ms = (single["p50_ms"] + self.single(server)["p50_ms"]) / 2
        return found | {"rate": rate, "single": single, "single_ms": single_ms}

    def closed(self) -> dict[str, Any]:
        server = self.running()
        return self.loaded(self.order(server)) | memory(server.pid) | self.around()

    def open(self) -> dict[str, Any]:
        return self.at_random(self.running(), self.plan.share * self.found["closed"]["throughput"])

    def churn(self) -> dict[str, Any]:
        """Both loops while tasks come and go; the open one at a share of what the closed one then takes."""
        server = self.running()
        packed = [
            (str(pack(self.store, one["task"], self.folder / f"{i}.zip")), one) for i, one in enumerate(self.right[:4])
        ]
        churn = Churn(server.token, packed)
        closed = self.loaded(self.order(server, churn=churn)) | self.around()
        return {"closed": closed, "open": self.at_random(server, self.plan.share * closed["throughput"], churn)}

    def alternatives(self) -> dict[str, Any]:
        """Ours over HTTP, and what one would do without a mixed batch, within one process and without HTTP."""
        self.stop()
        self.prepare()
        trials = []
        for count in self.plan.counts:
            names = self.names[:count]
            asked = questions(names, self.texts)
            file = self.write("numbered", [(names.index(task), text) for task, text in asked])
            for way in ("taskgraft", SWAPPED, GROUPED, MODELS):
                self.say(f"alternatives: {way}, {count} task{'s' * (count > 1)}")
                found = self.ours(count, asked) if way == "taskgraft" else self.alternative(way, count, file)
                trials.append({"way": way, "tasks": count, **found})
        return {"trials": trials}

    def ours(self, count: int, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """A server on a store of so many tasks, in a closed loop."""
        store = self.folder / f"store_{count}"
        for name in self.names[:count]:
            tg.Store(store).put(tg.Store(self.store).get(name))
        with tg.Engine(self.backbone, store) as engine:
            file = self.write(f"questions_{count}", answered(engine, asked))
        with self.serving(store) as server:
            found = self.loaded(self.order(server, questions=file, seconds=self.plan.trial_s))
            kept = ("throughput", "lost", "duplicated", "wrong", "errors", "examples")
            return {key: found[key] for key in kept} | memory(server.pid)

    def alternative(self, way: str, count: int, file: str) -> dict[str, Any]:
        folder = self.backbone_folder or embedded_folder()
        if way == MODELS:
            needed = count * (folder / "model.safetensors").stat().st_size + GIBIBYTE
            if needed > available_bytes():
                free = available_bytes() / GIBIBYTE
                return {"skipped": f"{needed / GIBIBYTE:.1f} GiB are needed, and {free:.1f} GiB are free."}
        elif self.peer is None:
            return {"skipped": "no packages for it: give --peer-python, an interpreter that has adapters 1.3.0."}
        trial = Trial(
            way,
            str(folder),
            count,
            self.plan.size,
            file,
            self.plan.clients,
            1024,
            self.plan.trial_s,
            self.plan.warmup_s,
        )
        python = sys.executable if way == MODELS or self.peer is None else self.peer
        try:
            return worked([python, str(HERE / "alternatives.py"), self.write("trial", asdict(trial))])
        except WorkError as error:
            return {"skipped": str(error)}

    def many(self) -> dict[str, Any]:
        """Far more grafts on disk than there is room for: each is asked once, in random order."""
        self.stop()
        plan, store = self.plan, self.folder / "many"
        self.say(f"a store of {plan.many:,} grafts, and an answer of each")
        names = make_store(store, self.backbone, plan.many, plan.many_size)
        asked = list(zip(random.Random(0).sample(names, len(names)), texts(plan.many), strict=True))
        with tg.Engine(self.backbone, store) as engine:
            engine.predict(asked[: plan.room])
            budget = used(engine.residents.grafts)
            file = self.write("questions_many", answered(engine, asked))
        with self.serving(store, budget) as server:
            ordered = Order(server.port, server.pid, file, plan.many_clients, metrics=True)
            found = self.loaded(ordered) | memory(server.pid)
        samples = found.pop("metrics")
        seen = {key: max(sample[key] for sample in samples) for key in samples[0]}
        return {**found, **seen, "samples": len(samples), "tasks": plan.many, "room": plan.room, "size": plan.many_size}


class WorkError(Exception):
    """A process that did not do its work; its message says why."""


def worked(command: Sequence[str]) -> dict[str, Any]:
    """What a process prints as its last line, as JSON."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    if command[0] == sys.executable:  # else it is a peer's, with packages of its own
        environment["PYTHONPATH"] = str(HERE.parent / "src")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkError(f"{Path(command[1]).name} could not be run: {error}.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WorkError(f"{Path(command[1]).name} ended with code {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# -- the command


def opened(target: Path, smoke: bool, setting: dict[str, Any]) -> dict[str, Any]:
    """The results so far, to which this run's are added; those of another setting are not mixed with them."""
    fresh = {
        "title": "Serving many tasks over HTTP on a CPU",
        "command": "python benchmarks/serve.py",
        "smoke": smoke,
        "setting": setting,
        "backbone": "a tiny BERT" if smoke else EMBEDDED_NAME,
        "hardware": hardware("cpu"),
        "versions": versions("torch", "transformers", "fastapi", "uvicorn"),
        "sections": {},
    }
    if not target.exists():
        return fresh
    found: dict[str, Any] = json.loads(target.read_text())
    if found["smoke"] != smoke or found["setting"] != setting:
        differ = [key for key in setting if found["setting"].get(key) != setting[key]]
        raise SystemExit(
            f"{target} holds another run ({', '.join(differ) or 'smoke'} differ): give another --out, or remove it."
        )
    return {**fresh, "sections": found["sections"]}


def chosen(only: str | None, many: int | None, done: Sequence[str]) -> list[str]:
    """The sections to run, in their order, once each finds what it needs."""
    default = [name for name in SECTIONS if name != "many" or many is not None]
    wanted = default if only is None else only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        raise SystemExit(f"--only {','.join(sorted(unknown))}: the sections are {', '.join(SECTIONS)}.")
    for name, need in NEEDS.items():
        if name in wanted and need not in (*wanted, *done):
            raise SystemExit(f"section {name} needs the figures of {need}: run that first, or name both.")
    return [name for name in SECTIONS if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has `adapters` 1.3.0")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=HERE / "results", help="default: benchmarks/results"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"sections, with commas between: {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, help="of each load (60)")
    parser.add_argument("--many", type=int, metavar="N", help="run section many, with so many grafts on disk (5000)")
    parser.add_argument("--room", type=int, metavar="N", help="of section many: grafts that there is memory for (200)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a second of each: does it run?")
    options = parser.parse_args()
    given = {name: value for name in ("seconds", "many", "room") if (value := getattr(options, name)) is not None}
    plan = replace(SMOKE if options.smoke else Plan(), **given)
    target: Path = options.out / "serve.json"
    setting = {key: value for key, value in asdict(plan).items() if key not in ("many", "room", "counts")}
    record = opened(target, options.smoke, setting)
    names = chosen(options.only, plan.many if options.smoke else options.many, list(record["sections"]))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(plan, Path(folder), options.peer_python, options.smoke, record["sections"])
        try:
            for name in names:
                bench.say(name)
                about = {"date": date.today().isoformat(), "load_before": round(os.getloadavg()[0], 2)}
                record["sections"][name] = getattr(bench, name)() | about
                target.write_text(json.dumps(record, indent=1) + "\n")
                write_table(record, target.with_suffix(".md"))
        except WorkError as error:
            raise SystemExit(f"section {name}: {error}") from error
        finally:
            bench.stop()
    draw(record, target.with_suffix(".png"))
    print(target.with_suffix(".md").read_text())
    bench.say(f"written: {target} and what is beside it")


if __name__ == "__main__":
    main()
