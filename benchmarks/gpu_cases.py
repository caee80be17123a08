"""What `gpu.py` measures: collectives and collective matmuls, ours beside lax, NCCL and a limit.

A case makes its operands on the devices, by a formula of the rank, so that any rank can tell what
the result has to be. Values are small integers: sums are exact in every order.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from raw_nccl import Ranks

import jaxcoll

AXIS = "x"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (*(KIB * 4**i for i in range(10)), GIB)
# Of a Transformer's gradients: 113 MB in bfloat16.
LEAVES = ((4096, 1024), (1024, 4096), (1024, 1024), (4096,), (1024,)) * 6
# m, k and n of a rank's block: the design's, and two that fill a GPU.
PRODUCTS = (
    (128, 512, 512),
    (512, 1024, 256),
    (512, 1024, 1024),
    (1024, 1024, 256),
    (256, 4096, 128),
    (2048, 8192, 8192),
    (8192, 8192, 8192),
)
# Small calls are timed many in a row, so that the start of a program does not count.
_MANY, _FEW = 32, 4
_SMALL = 4 * MIB
# cuBLASLt may cut a long inner dimension in pieces, and add these in bfloat16.
_ROUNDED_AGAIN = 2.0**-6

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        call: what is called.
        of: its size, as a reader wants it.
        bytes: of a rank's operand.
        memory: bytes that a rank needs at least.
        operands: a rank's operands, by its number; inside the map.
        ways: functions of these, "ours" among them; inside the map.
        expected: what ours has to return, by the rank; inside the map.
        chains: whether a result is the operand of the next call.
        raw: what NCCL does alone, so many times.
        raw_bytes: the larger of a rank's two buffers there.
        moved: bytes that a rank sends in the call, at least.
        tolerance: of what a result may be off, as a part of the largest.
    """

    call: str
    of: str
    bytes: int
    memory: int
    operands: Function
    ways: dict[str, Function]
    expected: Function
    chains: bool
    raw: Callable[[Ranks, int], None]
    raw_bytes: int
    moved: float
    tolerance: float = 0.0

    @property
    def in_a_row(self) -> int:
        """How many calls a program makes."""
        return _MANY if self.bytes < _SMALL and self.chains else _FEW


def cases(p: int, largest: int, products: tuple[tuple[int, int, int], ...]) -> Iterator[Case]:
    """Yields the cases for so many ranks: those first that are over soon."""
    yield from (_all_reduce(p, size) for size in SIZES if size <= largest and size < 256 * MIB)
    yield _tree(p, largest)
    for shape in products:
        yield _gather(p, *shape)
        yield _scatter(p, *shape)
    yield from (_all_reduce(p, size) for size in SIZES if 256 * MIB <= size <= largest)


def size_text(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _values(shape: tuple[int, ...], dtype: Any, rank: Any) -> Any:
    """Returns small integers that differ from place to place and from rank to rank."""
    places = [lax.broadcasted_iota(np.int32, shape, dim) for dim in range(len(shape))]
    mixed = sum(place * factor for place, factor in zip(places, (3, 5), strict=False))
    return ((mixed + rank) % 5 - 2).astype(dtype)


def _sum_of_all(shape: tuple[int, ...], dtype: Any, p: int) -> Any:
    return sum(_values(shape, dtype, rank) for rank in range(p))


def _all_reduce(p: int, size: int) -> Case:
    shape = (size // 4,)
    return Case(
        call="all_reduce",
        of=size_text(size),
        bytes=size,
        memory=4 * size,
        operands=lambda rank: _values(shape, np.float32, rank),
        ways={
            "ours": lambda x: jaxcoll.all_reduce(x, AXIS, backend="native"),
            "lax": lambda x: lax.psum(x, AXIS),
        },
        expected=lambda rank: _sum_of_all(shape, np.float32, p),
        chains=True,
        raw=lambda ranks, times: ranks.all_reduce([size // 4], "float32", times),
        raw_bytes=size,
        moved=2 * (p - 1) / p * size,
    )


def _tree(p: int, largest: int) -> Case:
    """The mean of gradients; of sums of ranks that are no power of two, not exact."""
    cut = max(1, 128 * MIB // largest)  # a small run has small leaves
    shapes = [(max(1, shape[0] // cut), *shape[1:]) for shape in LEAVES]
    size = sum(2 * math.prod(shape) for shape in shapes)

    def mean(xs: Any) -> Any:
        return jaxcoll.all_reduce(xs, AXIS, "mean", backend="native")

    def expected(rank: Any) -> Any:
        del rank
        sums = [_sum_of_all(shape, np.float32, p) for shape in shapes]
        return [(total / p).astype(jnp.bfloat16) for total in sums]

    return Case(
        call="gradient tree, mean",
        of=f"{len(shapes)} leaves, {size_text(size)}",
        bytes=size,
        memory=6 * size,
        operands=lambda rank: [_values(shape, jnp.bfloat16, rank) for shape in shapes],
        ways={"ours": mean, "lax": lambda xs: lax.pmean(xs, AXIS)},
        expected=expected,
        chains=True,
        raw=lambda ranks, times: ranks.all_reduce(list(map(math.prod, shapes)), "bfloat16", times),
        raw_bytes=size,
        moved=2 * (p - 1) / p * size,
    )


def _product(x: Any, w: Any) -> Any:
    return jnp.matmul(x, w, preferred_element_type=np.float32)


def _gather(p: int, m: int, k: int, n: int) -> Case:
    def x(rank: Any) -> Any:
        return _values((m, k), jnp.bfloat16, rank)

    def w(rank: Any) -> Any:
        return _values((k, n), jnp.bfloat16, 7 * rank)

    def expected(rank: Any) -> Any:
        whole = jnp.concatenate([x(other) for other in range(p)])
        return _product(whole, w(rank)).astype(jnp.bfloat16)

    return Case(
        call="all_gather_matmul",
        of=f"{m}, {k}, {n}",
        bytes=2 * m * k,
        memory=2 * (2 * p * m * k + 2 * k * n + 4 * p * m * n),
        operands=lambda rank: (x(rank), w(rank)),
        ways={
            "ours": lambda xw: jaxcoll.all_gather_matmul(*xw, AXIS, backend="native"),
            "lax": lambda xw: lax.all_gather(xw[0], AXIS, tiled=True) @ xw[1],
            "alone": lambda xw: jnp.concatenate([xw[0]] * p) @ xw[1],
        },
        expected=expected,
        chains=False,
        raw=lambda ranks, times: ranks.all_gather(2 * m * k, times),
        raw_bytes=p * 2 * m * k,
        moved=(p - 1) * 2 * m * k,
        tolerance=_ROUNDED_AGAIN,
    )


def _scatter(p: int, m: int, k: int, n: int) -> Case:
    def x(rank: Any) -> Any:
        return _values((p * m, k), jnp.bfloat16, rank)

    def w(rank: Any) -> Any:
        return _values((k, n), jnp.bfloat16, 7 * rank)

    def expected(rank: Any) -> Any:
        blocks = [lax.dynamic_slice_in_dim(x(r), rank * m, m) for r in range(p)]
        total = sum(_product(block, w(r)) for r, block in enumerate(blocks))
        return jnp.asarray(total).astype(jnp.bfloat16)

    return Case(
        call="matmul_reduce_scatter",
        of=f"{m}, {k}, {n}",
        bytes=2 * p * m * k,
        memory=2 * (2 * p * m * k + 2 * k * n + 6 * p * m * n),
        operands=lambda rank: (x(rank), w(rank)),
        ways={
            "ours": lambda xw: jaxcoll.matmul_reduce_scatter(*xw, AXIS, backend="native"),
            "lax": lambda xw: lax.psum_scatter(xw[0] @ xw[1], AXIS, tiled=True),
            "alone": lambda xw: (xw[0] @ xw[1])[:m],
        },
        expected=expected,
        chains=False,
        raw=lambda ranks, times: ranks.reduce_scatter(m * n, "float32", times),
        raw_bytes=p * 4 * m * n,
        moved=(p - 1) * 4 * m * n,
        tolerance=_ROUNDED_AGAIN,
    )


# ---- Programs ------------------------------------------------------------------------------------


class Programs:
    """A case's operands and compiled programs, on all devices of a job.

    Operands and results are stacked by rank.
    """

    def __init__(self, case: Case, mesh: Any, with_lax: bool) -> None:
        self._case, self._mesh = case, mesh
        self._x = self._mapped(case.operands)(self._ranks())
        self.ways = {
            name: self._way(f) for name, f in case.ways.items() if with_lax or name != "lax"
        }

    def wrong(self) -> int:
        """Returns how many elements of ours are wrong on the ranks of this process."""

        def of_leaf(got: Any, want: Any) -> Any:
            got, want = got.astype(np.float32), want.astype(np.float32)
            bound = self._case.tolerance * jnp.max(jnp.abs(want))
            return jnp.sum(~(jnp.abs(got - want) <= bound), dtype=np.int32)  # NaN is wrong

        def count(rank: Any, operands: Any) -> Any:
            got, want = self._case.ways["ours"](operands), self._case.expected(rank)
            return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(of_leaf, got, want))), np.int32)

        counts = self._mapped(count)(self._ranks(), self._x)
        return sum(int(np.asarray(shard.data).sum()) for shard in counts.addressable_shards)

    def order(self) -> str:
        """Returns in what order ours adds, which tells small sums over peer memory from NCCL's.

        Of groups that have made a call that is how they do it; before, what they will try.
        """
        found = jaxcoll.explain(self._mapped(self._case.ways["ours"]), self._x)
        return ", ".join(sorted({row.order for row in found.rows if row.order}))

    def _ranks(self) -> Any:
        numbers = np.arange(self._mesh.size, dtype=np.int32)
        sharding = jax.NamedSharding(self._mesh, jax.P(AXIS))
        return jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__)

    def _mapped(self, f: Function, **options: Any) -> Function:
        def body(*stacked: Any) -> Any:
            results = f(*jax.tree.map(lambda a: a[0], stacked))
            return jax.tree.map(lambda a: a[None], results)

        spec = jax.P(AXIS)
        mapped = jax.shard_map(
            body, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(mapped, **options)

    def _way(self, f: Function) -> Callable[[], None]:
        case, program = self._case, self.program(f)
        if not case.chains:
            compiled = self._mapped(program)
            return lambda: jax.block_until_ready(compiled(self._x))
        # In place, as a training step's gradients are: each round takes what the last one left.
        compiled = self._mapped(program, donate_argnums=0)
        state = [jax.tree.map(jnp.copy, self._x)]

        def run() -> None:
            state[0] = jax.block_until_ready(compiled(state[0]))

        return run

    def program(self, f: Function) -> Function:
        """Returns what makes all calls of a row, each after the one before; inside the map."""

        def program(x: Any) -> Any:
            y = x
            for _ in range(self._case.in_a_row):
                y = f(x)
                x = y if self._case.chains else _after(y, x)
            return y

        return program


def _after(y: Any, x: Any) -> Any:
    """Returns `x`, an element of which seems to depend on `y`: XLA makes equal calls only once."""
    first, *others = jax.tree.leaves(x)
    corner = (slice(0, 1),) * first.ndim
    element = jnp.where(jnp.isinf(y[corner]), 0, first[corner]).astype(first.dtype)
    changed = lax.dynamic_update_slice(first, element, (0,) * first.ndim)
    return jax.tree.unflatten(jax.tree.structure(x), [changed, *others])
