"""A run that has ended, in its folder: its graft's files, its answers, then run.json, which says they are whole."""

from __future__ import annotations

import json
import os

from taskgraft.errors import GraftError
from taskgraft.grafts.graft import encode, read_graft
from taskgraft.grafts.store import sync
from taskgraft.training.fit import Run
from taskgraft.training.state import RunFolder

RECORD, DRAFT = "run.json", "run.draft"
ANSWERS = "answers.json"  # to the test rows


def write_run(folder: RunFolder, key: str, run: Run) -> None:
    """Keep what came of a run in the place of its state. `key` says which run it is."""
    assert run.graft is not None
    place = folder.folder
    record = json.dumps({"run": key, **run.to_json()}, indent=1)
    content = {**encode(run.graft), ANSWERS: json.dumps(run.answers).encode(), DRAFT: record.encode()}
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / RECORD).unlink(missing_ok=True)  # another run's, whose graft is replaced now
        for name, value in content.items():
            (place / name).write_bytes(value)
            sync(place / name)
        os.replace(place / DRAFT, place / RECORD)
        sync(place)
    except OSError as error:
        raise GraftError(
            f"the graft of the run could not be written to {place} ({error}): make room there and run the same "
            "command again; it goes on from the last state that was written."
        ) from error
    folder.tidy(ended=True)


def read_run(folder: RunFolder, key: str) -> Run | None:
    """What came of this run; None if it has not ended here, or if the folder is another's."""
    path = folder.folder / RECORD
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_bytes())
        if record["run"] != key:
            return None
        answers = json.loads((folder.folder / ANSWERS).read_bytes())
        return Run.from_json(record, read_graft(record["task"], folder.folder), answers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GraftError(
            f"{path} does not say what came of a run ({error}): delete the folder {folder.folder} to begin again."
        ) from error
