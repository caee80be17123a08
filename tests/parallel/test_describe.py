"""`describe` and `draw`: how meshes and arrays lie on devices."""

import pathlib
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plans import batch, of_linen
from training import mesh_of

from jaxcoll import ParallelPlan, describe, draw, reshard

TREE = {"w": jnp.zeros((4, 6)), "b": jnp.zeros(6), "n": jnp.int32(1)}


def test_a_mesh():
    assert describe(mesh_of(data=2, pipe=1, tensor=2)).splitlines() == [
        "mesh of 4 devices: data 2 x pipe 1 x tensor 2",
        "                tensor 0  tensor 1",
        "data 0, pipe 0  cpu:0     cpu:1",
        "data 1, pipe 0  cpu:2     cpu:3",
    ]


def test_arrays():
    mesh = mesh_of(data=2, tensor=2)
    specs = {"w": jax.P("data", "tensor"), "b": jax.P(("data", "tensor")[1]), "n": jax.P()}
    lines = describe(reshard(TREE, specs, mesh=mesh)).splitlines()
    assert [line.split() for line in lines] == [
        ["shape", "dtype", "spec", "on", "a", "device", "bytes", "there"],
        ["['b']", "(6,)", "float32", "P('tensor',)", "(3,)", "12"],
        ["['n']", "()", "int32", "P()", "()", "4"],
        ["['w']", "(4,", "6)", "float32", "P('data',", "'tensor')", "(2,", "3)", "24"],
        ["all", "40"],
    ]
    assert "one device" in describe(TREE)
    struct = jax.ShapeDtypeStruct((4, 6), np.float32, sharding=jax.NamedSharding(mesh, jax.P()))
    assert "(4, 6)" in describe([struct, 3])


def test_a_state_as_the_devices_hold_it():
    """Of three axes; its random key is longer than the usual one."""
    plan = ParallelPlan({"pipe": 2, "fsdp": 2, "tensor": 2}, fsdp={"min_weight_size": 16})
    model, key = of_linen("tensor", plan.mesh), jax.random.key(0, impl="rbg")
    with jax.enable_x64(True):
        state = plan.init(model, optax.sgd(0.1, momentum=0.9), key, batch())
    head, *rows, total = map(re.compile(r" {2,}").split, describe(state).splitlines())
    assert head == ["", "shape", "dtype", "spec", "on a device", "bytes there"]
    leaves, held = jax.tree_util.tree_leaves_with_path(state), dict.fromkeys(jax.devices(), 0)
    for row, (path, leaf) in zip(rows, leaves, strict=True):
        assert row[0].endswith(jax.tree_util.keystr(path[-1:]))
        assert row[1:4] == [str(leaf.shape), str(leaf.dtype), str(leaf.sharding.spec)]
        assert len(leaf.addressable_shards) == 8
        for shard in leaf.addressable_shards:
            assert row[4:] == [str(shard.data.shape), f"{shard.data.nbytes:,}"]
            held[shard.device] += shard.data.nbytes
    assert total[0] == "all"
    assert {*held.values()} == {int(total[1].replace(",", ""))}


def rectangles(path: pathlib.Path) -> list[tuple[float, ...]]:
    root = ET.parse(path).getroot()
    found = root.findall("{*}rect")[1:]
    return [tuple(float(r.attrib[k]) for k in ("x", "y", "width", "height")) for r in found]


def texts(path: pathlib.Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).getroot().findall("{*}text")]


def test_pictures(tmp_path: pathlib.Path):
    mesh = mesh_of(data=2, tensor=2)
    draw(mesh, tmp_path / "mesh.svg")
    assert len(rectangles(tmp_path / "mesh.svg")) == 4
    assert {"tensor 1", "data 1", "cpu:3"} <= {*texts(tmp_path / "mesh.svg")}
    specs = {"w": jax.P("data", "tensor"), "b": jax.P("tensor"), "n": jax.P()}
    draw(reshard(TREE, specs, mesh=mesh), tmp_path / "tree.svg")
    said = texts(tmp_path / "tree.svg")
    assert said[1:3] == ["0, 2", "1, 3"]  # b
    assert "0, 1, 2, 3" in said
    assert said[-4:] == ["0", "1", "2", "3"]  # w
    parts = rectangles(tmp_path / "tree.svg")
    assert len({part[:2] for part in parts}) == len(parts) == 2 + 1 + 4
