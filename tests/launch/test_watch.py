from typing import get_args

from lightning_replica.core.points import Point, Stretch
from lightning_replica.launch import watch


def test_there_are_words_for_every_place() -> None:
    """Seen to fail: a rank hung at a new point, and the supervisor died of it."""
    assert {*get_args(Point), *get_args(Stretch), "start"} == set(watch._WHERE)
