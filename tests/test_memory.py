"""Too many rows for a device's memory: fewer at a time, and the same answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import taskgraft as tg
from taskgraft.experiments.pool import MEMORY, hold_to_share
from taskgraft.training.memory import in_parts
from taskgraft.training.passes import free_bytes

import tiny


def test_what_does_not_fit_is_halved_until_it_does() -> None:
    asked = []

    def squares(rows: Any) -> dict[int, int]:
        asked.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {int(row): int(row) ** 2 for row in rows}

    assert in_parts(squares, np.arange(7)) == {row: row**2 for row in range(7)}
    assert asked == [7, 3, 1, 2, 4, 2, 2]


@pytest.mark.parametrize(
    ("error", "tries"),
    [(torch.OutOfMemoryError("CUDA out of memory."), [2, 1]), (RuntimeError("a broken kernel"), [2])],
)
def test_one_row_that_does_not_fit_and_other_errors_are_told(error: RuntimeError, tries: list[int]) -> None:
    asked = []

    def fail(rows: Any) -> dict[int, int]:
        asked.append(len(rows))
        raise error

    with pytest.raises(RuntimeError, match=str(error)):
        in_parts(fail, np.arange(2))
    assert asked == tries


@pytest.mark.parametrize("method", [tg.Adapter(size=4), tg.HeadOnly()])
def test_a_graft_is_evaluated_in_smaller_batches_where_memory_is_short(method: tg.Method) -> None:
    task = tiny.task(count=40)
    settings = tg.Settings(epochs=1, batch_size=2)
    plain = tg.fit(tiny.backbone(), task, method, settings=settings, progress=False)
    backbone, sizes = tiny.backbone(), list[int]()

    def short(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = backbone.model.register_forward_pre_hook(short, with_kwargs=True)
    try:
        found = tg.fit(backbone, task, method, settings=settings, progress=False)
        assert plain.graft is not None and found.graft is not None and found.score == pytest.approx(plain.score)
        assert tg.evaluate(backbone, found.graft, task) == pytest.approx(
            tg.evaluate(tiny.backbone(), plain.graft, task)
        )
    finally:
        hook.remove()
    assert max(sizes) > 2


def test_processes_that_share_a_gpu_have_equal_parts_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    fake = SimpleNamespace(
        is_available=lambda: True,
        set_per_process_memory_fraction=held.append,
        get_per_process_memory_fraction=lambda index: {None: held[-1]}[index],  # it takes no device without a number
        mem_get_info=lambda _: (900, 1_000),
        memory_reserved=lambda _: 40,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    hold_to_share(4)
    assert held == [MEMORY / 4]
    assert free_bytes(torch.device("cuda")) == int(MEMORY / 4 * 1_000) - 40
    held.append(1.0)
    assert free_bytes(torch.device("cuda")) == 900, "others use the rest"
