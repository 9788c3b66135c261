"""The engine by itself, in a process that computes as the server's does: all questions at once, then one at a time.

Run by serve.py with what it shall do in a JSON file; prints what it found.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from taskgraft.cli.serve import only_the_engine_computes

RUNS = 3  # after one that is not counted


def measured(store: str, backbone: str | None, asked: list[list[str]], single_s: float) -> dict[str, Any]:
    threads = only_the_engine_computes()
    import taskgraft as tg

    questions = [(task, text) for task, text in asked]
    runs, single = [], []
    with tg.Engine(tg.load_backbone(backbone), store, threads=threads) as engine:
        engine.predict(questions)
        for _ in range(RUNS):
            start = time.perf_counter()
            engine.predict(questions)
            runs.append(len(asked) / (time.perf_counter() - start))
        until = time.perf_counter() + single_s
        for question in questions:
            start = time.perf_counter()
            engine.predict([question])
            single.append(1e3 * (time.perf_counter() - start))
            if start > until:
                break
    return {"throughput": median(runs), "runs": runs, "single_ms": median(single), "questions": len(asked)}


if __name__ == "__main__":
    print(json.dumps(measured(**json.loads(Path(sys.argv[1]).read_text()))))
