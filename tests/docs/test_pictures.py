"""The pictures in the docs are those that the pages' code draws."""

import pathlib
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcoll

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("path", sorted(IMAGES.glob("pipeline_*.svg")), ids=lambda p: p.stem)
def test_schedules_are_drawn_as_they_are(path: pathlib.Path, tmp_path: pathlib.Path):
    kind: Any = path.stem.removeprefix("pipeline_")
    jaxcoll.PipelineSchedule(kind, 4).draw(8, tmp_path / path.name)
    assert (tmp_path / path.name).read_text() == path.read_text()


def test_a_mesh_and_what_lies_on_it_are_drawn_as_they_are(tmp_path: pathlib.Path):
    mesh = jaxcoll.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    layer = {"down": np.zeros((128, 32)), "norm": np.zeros(32), "up": np.zeros((32, 128))}
    specs = {"down": P("tensor", "fsdp"), "norm": P(), "up": P("fsdp", "tensor")}
    jaxcoll.draw(mesh, tmp_path / "mesh.svg")
    jaxcoll.draw(jaxcoll.reshard(layer, specs, mesh=mesh), tmp_path / "shardings.svg")
    for name in ("mesh.svg", "shardings.svg"):
        assert (tmp_path / name).read_text() == (IMAGES / name).read_text()
