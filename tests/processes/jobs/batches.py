"""Batches of several processes: what a share is, which ones are refused, and loaders of shares.

batches.py placing | refusing | leaving | numpy | grain | datasets
"""

import functools as ft
import importlib
import itertools as it
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from world import native_calls, say

import jaxcoll
from jaxcoll import DataParallel, DevicePlacement

RANK, PROCESSES, LOCAL = jax.process_index(), jax.process_count(), jax.local_device_count()
WORLD = jax.device_count()
MINE = slice(RANK * LOCAL, (RANK + 1) * LOCAL)  # one row for each device
GRID = np.array(jax.devices()).reshape(PROCESSES, LOCAL)
DATA = NamedSharding(Mesh(GRID.ravel(), ("data",)), P("data"))

shard_batch = DataParallel.shard_batch_static
placement = DevicePlacement()


# ---- What a share is -----------------------------------------------------------------------------


def assert_is(actual: jax.Array, whole: np.ndarray, what: str) -> None:
    """Asserts that a global array has these values in this process's parts."""
    assert actual.shape == whole.shape, (what, actual.shape)
    for shard in actual.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index], err_msg=what)


def held(whole: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """Returns what this process's devices hold of an array, in its order."""
    indices = sharding.addressable_devices_indices_map(whole.shape).values()
    kept = []
    for dimension, size in enumerate(whole.shape):
        parts = [range(size)[index[dimension]] for index in indices if index is not None]
        kept.append(sorted(set(it.chain.from_iterable(parts))))
    return whole[np.ix_(*kept)]


def placing() -> None:
    whole = np.arange(WORLD * 2 * 4 * WORLD).reshape(WORLD * 2, 4 * WORLD)
    half = len(whole) // PROCESSES
    mine = whole[RANK * half : (RANK + 1) * half]
    assert_is(shard_batch({"x": mine}, DATA)["x"], whole, "shares in the processes' order")
    assert_is(placement.distribute_batch(mine, DATA), whole, "distribute_batch")
    assert_is(shard_batch(whole, DATA, batch_is_global=True), whole, "the whole from all")
    again = shard_batch(shard_batch(mine, DATA), DATA)
    assert_is(again, whole, "an array that spans the processes")

    layouts = {
        "processes": Mesh(GRID, ("data", "tensor")),
        "devices": Mesh(GRID, ("tensor", "data")),
        "columns": Mesh(GRID.T, ("data", "tensor")),
        "backwards": Mesh(GRID[::-1], ("data", "tensor")),
    }
    if PROCESSES % 2 == 0:
        pairs = GRID.reshape(2, -1)
        layouts |= {"pairs": Mesh(pairs, ("data", "tensor"))}
    for (name, mesh), spec in it.product(
        layouts.items(),
        [P("data"), P(("data", "tensor")), P(None, "data"), P("tensor", "data"), P()],
    ):
        sharding = NamedSharding(mesh, spec)
        share = held(whole, sharding)
        assert_is(shard_batch(share, sharding), whole, f"{name}, {spec}")
    same = shard_batch(whole, NamedSharding(layouts["devices"], P("data")))
    assert_is(same, whole, "not split over the processes: each gives all rows")

    one_dimension(layouts["processes"], whole)
    some_processes(whole)
    replicas()
    prefetching(mine, whole)
    with native_calls(1 if jaxcoll.config.backend != "lax" else 0):
        jax.block_until_ready(shard_batch({"x": mine, "y": mine[:, 0]}, DATA))
    say("all batches are right")


def one_dimension(mesh: Mesh, whole: np.ndarray) -> None:
    """`shard_batch_dim`: shares along one dimension; scalars are the same on all."""
    columns = np.array_split(whole, PROCESSES, axis=1)[RANK]
    for axis in (1, -1):
        placed = placement.shard_batch_dim({"x": columns, "n": 3.0}, mesh, axis)
        assert_is(placed["x"], whole, "columns")
        assert placed["n"].sharding.is_fully_replicated
        assert float(placed["n"].addressable_data(0)) == 3


def some_processes(whole: np.ndarray) -> None:
    """Meshes of this process alone, and of others alone."""
    own = NamedSharding(Mesh(GRID[RANK], ("data",)), P("data"))
    if RANK == 0:  # nobody else is asked
        assert_is(shard_batch(whole, own), whole, "a process's own devices")
        single = jax.sharding.SingleDeviceSharding(GRID[0, -1])
        assert placement.distribute_batch(whole, single).devices() == {GRID[0, -1]}
    some = max(PROCESSES // 2, 1)
    sharding = NamedSharding(Mesh(GRID[:some].ravel(), ("data",)), P("data"))
    if RANK in range(some):
        share = held(whole, sharding)
        assert_is(shard_batch(share, sharding), whole, "the first processes")
        assert_is(shard_batch(whole, sharding, batch_is_global=True), whole, "the first processes")
        return
    refuse("no share", lambda: shard_batch(whole, sharding), "has none of the sharding's devices")
    there = shard_batch(whole, sharding, batch_is_global=True)
    assert there.shape == whole.shape
    assert there.addressable_shards == []


def replicas() -> None:
    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 1, "half": np.ones(3, jax.numpy.bfloat16)}
    placed = placement.replicate_across_devices(tree)
    for name, leaf in placed.items():
        assert leaf.sharding.device_set == set(jax.devices())
        assert_is(leaf, np.asarray(tree[name]), name)
    keys = jax.random.split(jax.random.key(3), 2 * WORLD)
    copies = placement.replicate_across_devices({"key": keys, "one": keys[0]})
    mine = keys.reshape(PROCESSES, -1)[RANK]
    for name, leaf in (copies | {"share": shard_batch(mine, DATA)}).items():
        assert leaf.dtype == keys.dtype
        whole = jax.random.key_data(keys[0] if name == "one" else keys)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(jax.random.key_data(shard.data), whole[shard.index])


def prefetching(mine: np.ndarray, whole: np.ndarray) -> None:
    shares = ({"x": mine + i} for i in range(5))
    seen = list(placement.prefetch_to_device(shares, DATA))
    assert len(seen) == 5
    for i, tree in enumerate(seen):
        assert_is(tree["x"], whole + i, "prefetched")
    local = placement.prefetch_to_device(({"x": mine} for _ in range(1 + RANK)), GRID[RANK, 0])
    assert len(list(local)) == 1 + RANK


# ---- What is refused -----------------------------------------------------------------------------


def refuse(case: str, call: Callable[[], Any], text: str = "") -> None:
    """Says with what a call is refused."""
    with pytest.raises(ValueError, match=text) as refused:
        call()
    say(f"{case}: {refused.value}")


def refusing() -> None:
    rows = 4 * LOCAL
    x, more = np.ones((rows, 2), np.float32), np.ones((rows + LOCAL * RANK, 2), np.float32)
    last = RANK == PROCESSES - 1
    whole = ft.partial(shard_batch, batch_is_global=True)
    across = Mesh(GRID, ("data", "tensor"))

    refuse("uneven", lambda: shard_batch({"x": x, "y": {"z": more}}, DATA))
    refuse("uneven whole", lambda: whole({"x": more}, DATA))
    refuse("missing", lambda: shard_batch({"x": x} | ({} if last else {"y": x}), DATA))
    refuse("more", lambda: shard_batch({"x": x} | ({"y": x} if last else {}), DATA))
    refuse("dtype", lambda: shard_batch({"x": x.astype(np.int32) if last else x}, DATA))
    refuse("not an array", lambda: shard_batch({"x": "text" if last else x}, DATA))
    refuse("whole", lambda: shard_batch({"x": x}, DATA, batch_is_global=last))
    refuse(
        "spec", lambda: shard_batch(x, NamedSharding(across, P("data", "tensor" * last or None)))
    )
    refuse("function", lambda: (placement.distribute_batch if last else shard_batch)(x, DATA))
    refuse("scalar", lambda: placement.shard_batch_dim({"x": x, "n": RANK}, across))
    refuse("axis", lambda: placement.shard_batch_dim({"x": x}, across, int(last)))
    refuse("values", lambda: placement.replicate_across_devices({"w": x, "v": x + last}))
    refuse("divisible whole", lambda: whole({"x": np.ones(WORLD + 1)}, DATA))
    refuse("rank", lambda: shard_batch({"x": 1.0}, DATA))
    if LOCAL > 1:
        refuse("divisible", lambda: shard_batch({"x": np.ones(LOCAL + 1)}, DATA))
        lame = NamedSharding(Mesh(GRID.ravel()[:-1], ("data",)), P("data"))
        refuse("lame", lambda: shard_batch({"x": np.ones(6)}, lame))

    def shares() -> Iterator[Any]:
        return ({"x": x} for _ in range(3 - last))

    seen = []
    refuse("iterator", lambda: seen.extend(placement.prefetch_to_device(shares(), DATA, 1)))
    assert len(seen) == 2
    assert shard_batch(x, DATA).shape == (rows * PROCESSES, 2)  # all have gone on alike
    say("all are refused")


def leaving() -> None:
    """The last process has a batch less than the others, and ends."""
    for batch in range(3 - (RANK == PROCESSES - 1)):
        if batch < 2:
            shard_batch(np.ones(LOCAL), DATA)
            continue
        with pytest.raises(jaxcoll.CollectiveError, match="could not compare") as raised:
            shard_batch(np.ones(LOCAL), DATA)
        say(f"left: {raised.value}")


# ---- Loaders -------------------------------------------------------------------------------------

ITEMS = 48
BATCH = 4 * LOCAL  # of one process


class Source:
    """A data set that notes what is read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(int(index))
        return {"id": np.int32(index), "x": np.full(3, index, np.float32)}


def stacked(items: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


def numpy_batches(source: Source) -> Iterator[Any]:
    order = np.random.default_rng(0).permutation(len(source))[RANK::PROCESSES]
    for start in range(0, len(order), BATCH):
        yield stacked([source[i] for i in order[start : start + BATCH]])


def grain_loader(source: Source) -> Iterator[Any]:
    grain: Any = importlib.import_module("grain")
    sampler = grain.samplers.IndexSampler(
        len(source),
        shard_options=grain.sharding.ShardByJaxProcess(drop_remainder=True),
        shuffle=True,
        num_epochs=1,
        seed=0,
    )
    operations = [grain.transforms.Batch(BATCH, drop_remainder=True)]
    yield from grain.DataLoader(data_source=source, sampler=sampler, operations=operations)


def grain_dataset(source: Source) -> Iterator[Any]:
    grain: Any = importlib.import_module("grain")
    shuffled = grain.MapDataset.source(source).shuffle(seed=0)
    yield from shuffled[RANK::PROCESSES].batch(BATCH, drop_remainder=True).to_iter_dataset()


def split_by_node(dataset: Any) -> Any:
    distributed: Any = importlib.import_module("datasets.distributed")
    return distributed.split_dataset_by_node(dataset, rank=RANK, world_size=PROCESSES)


def hugging_face(source: Source) -> Iterator[Any]:
    datasets: Any = importlib.import_module("datasets")
    columns = stacked([Source()[i] for i in range(len(source))])
    dataset = datasets.Dataset.from_dict(columns).shuffle(seed=0).with_format("numpy")
    part = split_by_node(dataset)
    for batch in part.iter(BATCH, drop_last_batch=True):
        source.read.extend(batch["id"].tolist())
        yield batch


def hugging_face_stream(source: Source) -> Iterator[Any]:
    datasets: Any = importlib.import_module("datasets")

    def rows(files: list[range]) -> Iterator[Any]:
        for file in files:
            for index in file:
                yield source[index]

    files = [range(i, i + 4) for i in range(0, len(source), 4)]
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": files})
    part = split_by_node(stream.with_format("numpy"))
    yield from part.iter(BATCH, drop_last_batch=True)


LOADERS = {
    "numpy": [numpy_batches],
    "grain": [grain_loader, grain_dataset],
    "datasets": [hugging_face, hugging_face_stream],
}


def loading(loaders: Sequence[Callable[[Source], Iterator[Any]]]) -> None:
    for loader in loaders:
        source, seen = Source(), []
        for share in loader(source):
            assert len(share["id"]) == BATCH
            batch = jaxcoll.reshard(shard_batch(share, DATA), P())
            ids = np.asarray(batch["id"].addressable_data(0))
            assert ids.shape == (PROCESSES * BATCH,)
            x = np.asarray(batch["x"].addressable_data(0))
            np.testing.assert_array_equal(x, np.repeat(ids[:, None], 3, axis=1))
            np.testing.assert_array_equal(ids[RANK * BATCH :][:BATCH], share["id"])
            seen.extend(ids.tolist())
        assert sorted(seen) == list(range(ITEMS)), (loader.__name__, sorted(seen))
        read = set(source.read)
        assert len(read) == ITEMS // PROCESSES, (loader.__name__, len(read))
        say(f"{loader.__name__}: each item once, {len(read)} of {ITEMS} read here")
    say("all items were seen")


def main(part: str) -> None:
    if part == "placing":
        placing()
    elif part == "refusing":
        refusing()
    elif part == "leaving":
        leaving()
    else:
        loading(LOADERS[part])


main(sys.argv[1])
