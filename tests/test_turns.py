"""Turns on a model: many share it or one has it alone, and whoever wants it alone does not wait for ever."""

from __future__ import annotations

import threading
import time

import pytest

from taskgraft.serving.turns import Turns

SOON = 5.0


def test_many_share_and_one_is_alone() -> None:
    turns, inside, most, lock = Turns(), {"shared": 0, "alone": 0}, {"shared": 0, "alone": 0}, threading.Lock()
    wrong: list[dict[str, int]] = []

    def work(number: int) -> None:
        for step in range(30):
            kind = "alone" if (number + step) % 4 == 0 else "shared"
            with turns.alone() if kind == "alone" else turns.shared():
                with lock:
                    inside[kind] += 1
                    most[kind] = max(most[kind], inside[kind])
                    if inside["alone"] > 1 or (inside["alone"] and inside["shared"]):
                        wrong.append(dict(inside))
                time.sleep(0.0005)
                with lock:
                    inside[kind] -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not wrong and inside == {"shared": 0, "alone": 0} and most["shared"] > 1


def test_whoever_wants_it_alone_goes_before_those_who_come_later() -> None:
    turns, order = Turns(), list[str]()
    wanted = threading.Event()

    def alone() -> None:
        wanted.set()
        with turns.alone():
            order.append("alone")

    def later() -> None:
        with turns.shared():
            order.append("later")

    with turns.shared():
        first = threading.Thread(target=alone)
        first.start()
        assert wanted.wait(SOON)
        while not turns._wanting:
            time.sleep(0.001)
        second = threading.Thread(target=later)
        second.start()
        time.sleep(0.02)
        assert order == []
    for thread in (first, second):
        thread.join(SOON)
    assert order == ["alone", "later"]


def test_one_that_is_alone_may_let_others_in() -> None:
    turns, order = Turns(), list[str]()

    def beside() -> None:
        with turns.shared():
            order.append("beside")

    def alone() -> None:
        with turns.alone():
            order.append("alone")

    with turns.alone() as share:
        first = threading.Thread(target=beside)
        first.start()
        time.sleep(0.02)
        assert order == []
        share()
        first.join(SOON)
        assert order == ["beside"]
        second = threading.Thread(target=alone)
        second.start()
        time.sleep(0.02)
        assert order == ["beside"]  # what was put there is in use
    second.join(SOON)
    assert order == ["beside", "alone"]


def test_an_error_after_others_were_let_in_gives_the_turn_back() -> None:
    turns = Turns()

    def fail() -> None:
        with turns.alone() as share:
            share()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with turns.alone():
        pass


def test_an_error_inside_gives_the_turn_back() -> None:
    turns = Turns()
    for kind in (turns.alone, turns.shared):
        with pytest.raises(ZeroDivisionError), kind():
            raise ZeroDivisionError
    with turns.alone():
        pass
