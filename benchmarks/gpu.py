"""GPUs: our calls beside `jax.lax` where that runs, else beside NCCL alone and what bounds them.

    python benchmarks/gpu.py [--minutes 4] [--shared 2,4] [--largest 1073741824]
    python benchmarks/gpu.py --only MPS --calls matmul    # a part; its page is printed, not kept

On one GPU several processes share it, a rank each, in turns and (under CUDA's MPS) at once; with
more, one process has all of them, too; and one rank alone. What was measured when the time is up is
kept, and what was not is listed.
`--platform cpu` does the same on simulated devices: to try it without a GPU, not to learn anything.
"""

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu_jobs
import gpu_report
from environment import environment
from gpu_jobs import Together
from shared import command, rows_of, save

ROW_S = 0.6
START_S = 20.0
PROBE_S = 60.0


class Layout(NamedTuple):
    """Processes and devices of each; whether these processes share one GPU, and under MPS."""

    processes: int
    devices: int
    is_shared: bool
    has_mps: bool = False

    def text(self) -> str:
        if self.processes * self.devices == 1:
            return "One rank alone"
        if self.is_shared:
            how = "at once, under MPS" if self.has_mps else "in turns"
            return f"{self.processes} processes that share a GPU, {how}"
        return f"One process with {self.devices} devices"


def layouts(
    count: int, shared: list[int], sharing_problem: str | None, mps_problem: str
) -> list[Layout]:
    """Returns the layouts for so many GPUs."""
    found = [Layout(1, 1, is_shared=False)]
    if sharing_problem is None:
        for has_mps in (False, True)[: 1 if mps_problem else 2]:
            found += [Layout(processes, 1, is_shared=True, has_mps=has_mps) for processes in shared]
    if count > 1:
        found.append(Layout(1, count, is_shared=False))
    return found


# ---- A rank --------------------------------------------------------------------------------------


def raw_ranks(together: Together, largest: int) -> Any:
    """Returns the ranks of this process in a communicator of their own."""
    import jax
    from raw_nccl import Ranks, of_jax

    local = jax.local_devices()
    ordinals = [device.local_hardware_id for device in local]
    first = together.index * len(local)

    def share(own: bytes) -> bytes:
        return bytes.fromhex(together.first(own.hex()))

    return Ranks(of_jax(), ordinals, first, jax.device_count(), share, largest)


def probe(largest: int) -> None:
    """Says of NCCL alone, and then of lax, that it works here."""
    import jax
    import numpy as np
    from jax import lax

    raw_ranks(Together(), largest).all_reduce([256], "float32", 1)
    print("nccl works", flush=True)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    ones = np.ones(mesh.size, np.float32)
    x = jax.make_array_from_callback(ones.shape, sharding, ones.__getitem__)
    f = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    assert float(np.asarray(jax.jit(f)(x).addressable_data(0))[0]) == mesh.size
    print("lax works", flush=True)


def measure(
    together: Together,
    mesh: Any,
    ranks: Any,
    *,
    with_lax: bool,
    seconds: float,
    rounds: int,
    largest: int,
    products: tuple[tuple[int, int, int], ...],
    calls: str = "",
) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, all processes the same ones.

    Args:
        together: the processes.
        mesh: all their devices.
        ranks: of NCCL alone, or None.
        with_lax: whether lax runs here.
        seconds: after which no further case begins.
        rounds: at most, of each case.
        largest: bytes of a sum, at most.
        products: m, k and n of matmuls.
        calls: of those alone that have this in their names.
    """
    import gpu_cases
    import gpu_step
    from gpu_turns import in_turns, summary

    until, room = time.monotonic() + seconds, _room()
    if calls in "train step":
        step = gpu_step.Step(mesh, with_lax)
        row = {"call": "train step", "of": f"{step.parameters:,} parameters", "in a row": 1}
        times = in_turns(step.ways, together, ROW_S, rounds)
        yield row | _measured(summary(times, 1), len(times["ours"]), together, step.wrong)
        del step
    for case in gpu_cases.cases(mesh.size, largest, products):
        if calls not in case.call:
            continue
        row = {"call": case.call, "of": case.of, "bytes": case.bytes, "in a row": case.in_a_row}
        reason = "time" if time.monotonic() > until else "memory" if case.memory > room else ""
        if reason := together.first(reason):
            yield row | {"left out": reason}
            continue
        programs = gpu_cases.Programs(case, mesh, with_lax)
        ways: dict[str, Callable[[], object]] = {**programs.ways}
        if ranks is not None and case.raw_bytes <= ranks.most:
            ways["nccl"] = lambda case=case: case.raw(ranks, case.in_a_row)
            if case.chains:
                ways["copy"] = lambda case=case: ranks.copy(case.bytes, case.in_a_row)
        times = in_turns(ways, together, ROW_S, rounds)
        found = summary(times, case.in_a_row)
        row["bus GB/s"] = case.moved / found["us"]["ours"] / 1e3
        row["order"] = programs.order()
        yield row | _measured(found, len(times["ours"]), together, programs.wrong)


def _measured(
    found: dict[str, Any], rounds: int, together: Together, wrong: Callable[[], int]
) -> dict[str, Any]:
    return {**found, "rounds": rounds, "wrong": sum(together.all(wrong()))}


def _room() -> float:
    """Returns how many bytes JAX has for arrays on a device; without end where it does not say."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit", float("inf"))


def run_rank(chosen: argparse.Namespace) -> None:
    """Measures as one process of a job."""
    gpu_jobs.join()
    import gpu_cases
    import jax

    if chosen.child == "probe":
        return probe(4096)
    together = Together()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    # Beside JAX's own memory there may be little.
    largest = int(min(chosen.largest, _room() / 8))
    ranks = raw_ranks(together, largest) if chosen.nccl else None
    is_tried = jax.default_backend() == "cpu"  # which has no time for more
    products = gpu_cases.PRODUCTS[:1] if is_tried else gpu_cases.PRODUCTS
    for row in measure(
        together, mesh, ranks, with_lax=chosen.lax, seconds=chosen.seconds, rounds=chosen.rounds,
        largest=chosen.largest, products=products, calls=chosen.calls,
    ):  # fmt: skip
        if together.index == 0:
            print(json.dumps(row), flush=True)
    return None


# ---- All of them ---------------------------------------------------------------------------------


def run_layout(
    layout: Layout, chosen: argparse.Namespace, share_s: float, mps: dict[str, str]
) -> dict[str, Any]:
    """Runs a layout's job, in about so many seconds; returns its rows, and what went wrong.

    `mps`: the variables of processes under MPS.
    """
    until = time.monotonic() + share_s
    sharing = layout.processes if layout.is_shared else 0
    one = {} if layout.devices > 1 else {"CUDA_VISIBLE_DEVICES": gpu_jobs.first_visible()}
    needed = gpu_jobs.environment(chosen.platform, devices=layout.devices, sharing=sharing, **one)
    needed |= mps if layout.has_mps else {}
    nccl, lax, why_not = chosen.platform == "cuda", True, ""
    if sharing and chosen.platform == "cuda":  # what NCCL may refuse, or never end
        said = gpu_jobs.run([__file__, "--child", "probe"], sharing, needed, PROBE_S)
        nccl, lax = (all(f"{what} works" in one.text for one in said) for what in ("nccl", "lax"))
        why_not = "" if nccl and lax else gpu_jobs.reason_of(said)
    seconds = max(START_S, until - time.monotonic() - START_S)
    arguments: list[object] = [__file__, "--child", "measure", "--seconds", seconds]
    arguments += ["--rounds", chosen.rounds, "--largest", chosen.largest, "--calls", chosen.calls]
    arguments += ["--nccl"] * nccl + ["--lax"] * lax
    said = gpu_jobs.run(arguments, layout.processes, needed, seconds + 3 * START_S)
    return {
        "layout": layout.text(),
        "ranks": layout.processes * layout.devices,
        "not beside": why_not,
        "rows": rows_of(said[0].text),
        "failed": gpu_jobs.reason_of(said),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="for all layouts")
    parser.add_argument("--shared", default="2,4", help="numbers of processes that share a GPU")
    parser.add_argument("--only", default="", help="layouts with this in their names")
    parser.add_argument("--calls", default="", help="calls with this in their names")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes of a sum")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    for name in ("child", "seconds"):
        parser.add_argument(
            f"--{name}", type=str if name == "child" else float, help=argparse.SUPPRESS
        )
    for name in ("nccl", "lax"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        run_rank(chosen)
        return
    is_tried = chosen.platform == "cpu"
    gpus = gpu_jobs.Gpus(2, "simulated on CPU") if is_tried else gpu_jobs.find()
    if not gpus.count:
        sys.exit(f"nothing is measured: {gpus.problem}")
    problem = None if is_tried else gpus.sharing_problem()
    shared = [int(number) for number in chosen.shared.split(",") if number]
    until, found = time.monotonic() + 60 * chosen.minutes, []
    with (
        contextlib.nullcontext(gpu_jobs.Mps({}, "MPS is for GPUs alone"))
        if is_tried
        else gpu_jobs.mps() as mps
    ):
        all_layouts = layouts(gpus.count, shared, problem, mps.problem)
        todo = [layout for layout in all_layouts if chosen.only in layout.text()]
        if not todo:
            names = "; ".join(layout.text() for layout in all_layouts)
            sys.exit(f"--only: no layout has {chosen.only!r} in its name; here are: {names}")
        while todo:
            share_s = max(0.0, until - time.monotonic()) / len(todo)
            found.append(run_layout(todo.pop(0), chosen, share_s, mps.needed))
            print(f"{found[-1]['layout']}: {len(found[-1]['rows'])} rows", flush=True)
    result = {
        "environment": environment(),
        "command": command(),
        "gpus": {"kind": gpus.kind, "count": gpus.count, "versions": gpus.versions or {}},
        "not shared": problem or "",
        "no mps": mps.problem,
        "layouts": found,
    }
    kind = re.sub(r"\W+", "-", gpus.kind.lower())
    if chosen.only or chosen.calls:
        print(gpu_report.page(result))
    else:
        save(f"gpu-{kind}", result, gpu_report.page(result), chosen.out)
    if any(of["failed"] for of in found) or gpu_report.num_wrong(found):
        sys.exit("some of it has failed, or is wrong")
    if not any(of["rows"] for of in found):
        sys.exit(f"--calls: no call has {chosen.calls!r} in its name")


if __name__ == "__main__":
    main()
