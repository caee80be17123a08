"""The pictures of schedules are those that the page's code draws."""

import pathlib
from typing import Any

import pytest

import jaxcoll

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("path", sorted(IMAGES.glob("pipeline_*.svg")), ids=lambda p: p.stem)
def test_schedules_are_drawn_as_they_are(path: pathlib.Path, tmp_path: pathlib.Path):
    kind: Any = path.stem.removeprefix("pipeline_")
    jaxcoll.PipelineSchedule(kind, 4).draw(8, tmp_path / path.name)
    assert (tmp_path / path.name).read_text() == path.read_text()
