"""A failed call's error as fields, and as `CollectiveError`."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mapped, mesh, native_missing, zero_late

import jaxcoll
from jaxcoll import _lax_rules

needs_engine = pytest.mark.skipif(native_missing() is not None, reason="errors of the engine")

OF_PROCESSES = (
    'INTERNAL: jaxcoll.CollectiveError: all_reduce over "data", "model" of f32[8,2], i32[] and 3 '
    "more (1,084 bytes, op=mean), called at /a/train.py:31 (step): waited 5.0 s for rank 2, 3 "
    "(process 1, pid 42, running), rank 6 (process 3, pid 44, stopped); arrived: rank 0, 1 "
    "(process 0), rank 4 (process 2); execution 17 of this call (the limit is 5.0 s)\n"
    '  rank 2, 3: last call, ended 1.0 s ago: all_gather over "data" of f32[4] (16 bytes, axis=0), '
    "called at /a/train.py:30 (step) (call 7 of device 0)\n"
    "  in Python for 5.1 s; Python stack, 0.0 s ago:\n"
    '    File "/a/train.py", line 12, in load\n'
    "  rank 6: no call yet\n"
    '  more: jaxcoll doctor "/tmp/dumps": while running replica 0 and partition 1'
)
MISMATCH = (
    "jaxcoll.CollectiveError: the processes called different collectives, or the same in another "
    'order: process 1 waits in ppermute over "x", "y" of f32[8], i32[] (1,036 bytes, perm=0>1 '
    "1>0), called at a.py:2 (f), execution 3 of this call; process 0 (and 2, 3) waits in "
    'all_reduce over "x" of f32[8] (32 bytes, op=sum), called at a.py:1 (f), execution 17 of '
    "this call\n"
    '  more: jaxcoll doctor "/tmp/dumps"'
)


def test_the_fields_of_a_job_of_several_processes():
    info = jaxcoll.error_info(OF_PROCESSES)
    assert info is not None
    assert (info.kind, info.op, info.axes) == ("missing", "all_reduce", ("data", "model"))
    assert info.operands == ("f32[8,2]", "i32[]", "3 more")
    assert info.bytes == 1084
    assert info.source == "/a/train.py:31 (step)"
    assert (info.execution, info.waited_s, info.limit_s) == (17, 5.0, 5.0)
    assert (info.group, info.arrived) == ((), (0, 1, 4))  # it says nothing of rank 5
    assert [(late.rank, late.process, late.pid, late.state) for late in info.missing] == [
        (2, 1, 42, "running"),
        (3, 1, 42, "running"),
        (6, 3, 44, "stopped"),
    ]
    assert "all_gather" in info.missing[1].last_call
    assert info.missing[2].last_call == "no call yet"
    assert info.dump == "/tmp/dumps"
    assert "in load" in info.text


def test_a_process_of_another_host_has_no_pid():
    info = jaxcoll.error_info(
        'jaxcoll.CollectiveError: all_reduce over "x" of f32[8] (32 bytes, op=sum), called at '
        "t.py:1 (f): waited 1.2 s for rank 1, 2 (process 1, failed); arrived: 0 (device 0)\n"
        "  rank 1: why\n  rank 2: why"
    )
    assert info is not None
    assert info.arrived == (0,)
    assert info.missing == tuple(
        jaxcoll.MissingRank(rank, process=1, pid=None, state="failed", last_call="why")
        for rank in (1, 2)
    )


@pytest.mark.parametrize(
    ("said", "group"),
    [
        ("rank 1 (process 4, pid 9, running); arrived: rank 0 (process 2); execution 3", (2, 4)),
        ("rank 1 (process 4, pid 9, running); arrived: rank 0 (process 2) of 3; execution 3", ()),
        ("rank 1 (device 4) of 2; arrived: rank 0 (device 2); run 7", (2, 4)),
        ("rank 1 (device 4) of 4; arrived: rank 0 (device 2); run 7", ()),
        (
            "rank 1 (process 4, pid 9, running, device 8193) of 2; arrived: rank 0 (process 4, "
            "device 8192); execution 1",
            (4, 4),
        ),
    ],
)
def test_the_group_is_told_where_all_its_ranks_are_named(said, group):
    call = 'all_reduce over "x" of f32[8] (32 bytes), called at a.py:2 (f)'
    info = jaxcoll.error_info(f"INTERNAL: jaxcoll.CollectiveError: {call}: waited 1.0 s for {said}")
    assert info is not None
    assert info.group == group
    assert (info.arrived, [late.rank for late in info.missing]) == ((0,), [1])


def test_the_fields_of_a_mismatch():
    info = jaxcoll.error_info(RuntimeError(MISMATCH))
    assert info is not None
    assert (info.kind, info.op, info.source, info.missing) == ("mismatch", None, None, ())
    assert (info.execution, info.dump) == (None, "/tmp/dumps")
    alone, others = info.calls
    assert alone == jaxcoll.MismatchedCall(
        *((1,), "ppermute", ("x", "y"), ("f32[8]", "i32[]"), 1036, "a.py:2 (f)", 3)
    )
    assert others == jaxcoll.MismatchedCall(
        *((0, 2, 3), "all_reduce", ("x",), ("f32[8]",), 32, "a.py:1 (f)", 17)
    )


def test_the_fields_of_a_mismatch_of_several_calls_each():
    """Also of alike ones, of one that is over, of XLA's, and of what is cut short."""
    call = 'all_gather over "x" of f32[8] (32 bytes, axis=0), called at go and in it/a.py:%d (f)'
    xla = (
        "all_reduce of XLA (sum): float32[256] (1024 bytes), devices 0-1, for jit(f)/dot at b.py:7"
    )
    info = jaxcoll.error_info(
        "jaxcoll.CollectiveError: the processes called different collectives, or the same in "
        f"another order: process 0 waits in {call % 1}, or {call % 2}, execution 4 of this call, "
        f"and has ended, before others came to it, {xla}, execution 5 of this call; process 1 "
        "waits in all_gather over ..."
    )
    assert info is not None
    assert [(each.where, each.op, each.source, each.execution) for each in info.calls] == [
        ((0,), "all_gather", "go and in it/a.py:1 (f) or go and in it/a.py:2 (f)", 4),
        ((0,), "all_reduce", "b.py:7", 5),
        ((1,), None, None, None),
    ]


def test_alike_calls_in_programs_of_one_name():
    """Which of them it was is not known; what they share is."""
    call = 'all_gather over "x" of f32[8] (32 bytes), called at a.py:%d (f)'
    calls = f"jaxcoll.CollectiveError: {call % 1}, or {call % 2}"
    waited = (
        ": waited 1.0 s (the limit is 1.0 s) for rank 1 (device 1) of 2; arrived: rank 0 (device 0)"
    )
    info = jaxcoll.error_info(calls + waited)
    assert info is not None
    assert (info.kind, info.op, info.operands, info.bytes) == (
        "missing",
        "all_gather",
        ("f32[8]",),
        32,
    )
    assert info.source == "a.py:1 (f) or a.py:2 (f)"
    assert info.group == (0, 1)
    info = jaxcoll.error_info((calls + waited).replace("all_gather", "ppermute", 1))
    assert info is not None
    assert info.op is None


def test_devices_of_one_process_that_called_different_collectives():
    call = (
        'all_reduce over "x" of f32[8] (32 bytes), called at a.py:%d (f), execution %d of this call'
    )
    text = (
        "jaxcoll.CollectiveError: the devices of process 3 called different collectives, or the "
        f"same in another order: device 0 waits in {call % (1, 1)}, and in {call % (2, 5)}; "
        f"device 1 waits in {call % (3, 2)}; run 17"
    )
    info = jaxcoll.error_info(text)
    assert info is not None
    assert (info.kind, info.op, info.missing) == ("mismatch", None, ())
    assert [(each.where, each.source, each.execution) for each in info.calls] == [
        ((0,), "a.py:1 (f)", 1),
        ((0,), "a.py:2 (f)", 5),
        ((1,), "a.py:3 (f)", 2),
    ]


@pytest.mark.parametrize(
    ("origins", "source"),
    [
        (", for jit(f)/dot_general at /a/b.py:7", "/a/b.py:7"),
        (", for jit(f)/psum at b.py:7, or jit(...psum at c.py:9", "b.py:7 or c.py:9"),
        ("", None),
    ],
)
def test_the_fields_of_a_collective_of_xla(origins, source):
    info = jaxcoll.error_info(
        "jaxcoll.CollectiveError: all_reduce of XLA (sum): float32[256] (1024 bytes), devices 0-1, "
        f"4{origins}: waited 5.0 s for rank 2 (process 2, pid 42, running); arrived: rank 0 "
        "(process 0), rank 1 (process 1); execution 17 of this call (the limit is 5.0 s)"
    )
    assert info is not None
    assert (info.kind, info.op, info.axes) == ("missing", "all_reduce", ())
    assert (info.operands, info.bytes, info.source) == (("float32[256]",), 1024, source)
    assert (info.arrived, [late.rank for late in info.missing]) == ((0, 1), [2])
    assert info.group == (0, 1, 2)


def test_other_errors_have_none():
    assert jaxcoll.error_info(ValueError("no rank of mine")) is None
    assert jaxcoll.error_info("") is None


def test_causes_are_looked_through():
    try:
        try:
            raise RuntimeError(OF_PROCESSES)
        except RuntimeError as error:
            raise KeyError("a step") from error
    except KeyError as error:
        info = jaxcoll.error_info(error)
    assert info is not None
    assert info.op == "all_reduce"


def late_rank(x):
    x = jaxcoll.broadcast(x, "x")
    return jaxcoll.all_reduce(x + zero_late("x", rank=2, seconds=1.5), "x")


@pytest.fixture
def half_a_second():
    before = jaxcoll.config.timeout_s
    jaxcoll.config.timeout_s = 0.5
    yield
    jaxcoll.config.timeout_s = before


@needs_engine
def test_an_error_of_one_process_says_what_the_missing_rank_does(half_a_second):
    x = np.ones((4, 3), np.float32)
    step = jax.jit(mapped(late_rank, mesh(4)))
    with (
        jaxcoll.using(backend="native"),
        pytest.raises(jaxcoll.CollectiveError) as raised,
        jaxcoll.watch(),
    ):
        jax.block_until_ready(step(x))
    info = jaxcoll.error_info(raised.value)
    assert info is not None
    assert (info.kind, info.op, info.axes) == ("missing", "all_reduce", ("x",))
    assert (info.operands, info.bytes) == (("f32[3]",), 12)
    assert info.source is not None
    assert re.search(r"test_errors\.py:\d+ \(late_rank\)", info.source)
    assert info.arrived == (0, 1, 3)
    (late,) = info.missing
    assert late.rank == 2
    # It has never been at the call, but at another one of the same run.
    assert re.match(
        r"last call, ended \d\.\d s ago: broadcast over .*test_errors\.py", late.last_call
    )
    assert info.limit_s == 0.5
    assert "in a callback" in info.text
    assert re.search(r'File ".*checks\.py", line \d+, in sleep', info.text)


RING = [(i, (i + 1) % 8) for i in reversed(range(8))]
NAMED = {  # what texts say of calls on f32[4,4]
    "op=mean": lambda x: jaxcoll.all_reduce(x, "x", op="mean"),
    "op=max": lambda x: jax.lax.pmax(x, "x"),
    "axis=1": lambda x: jaxcoll.all_gather(x, "x", axis=-1, tiled=True),
    "axis=0": lambda x: jax.lax.all_gather(x, "x"),
    "scatter_dimension=1, op=sum": lambda x: jaxcoll.reduce_scatter(
        x, "x", scatter_dimension=1, tiled=True
    ),
    "split_axis=0, concat_axis=1": lambda x: jaxcoll.all_to_all(x, "x", 0, 1, tiled=True),
    "perm=0>1 1>0": lambda x: jaxcoll.ppermute(x, "x", [(1, 0), (0, 1)]),
    "perm=none": lambda x: jaxcoll.ppermute(x, "x", []),
    "root=1": lambda x: jaxcoll.broadcast(x, "x", root=1),
    "gather_axis=-1": lambda x: jaxcoll.all_gather_matmul(x, jnp.ones((8, 4)), "x", gather_axis=-1),
    "scatter_axis=-2": lambda x: jaxcoll.matmul_reduce_scatter(x, jnp.ones((4, 4)), "x"),
}


def error_of_a_missing_rank(f, ranks):
    """Returns that of a call in a branch that the last rank does not take."""
    step = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.cond(x.sum() > 0, lambda x: f(x).sum(), jnp.sum, x)[None],
            mesh=mesh(ranks),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
    )
    x = np.ones((ranks, 4, 4), np.float32)
    x[-1] = 0
    with (
        jaxcoll.using(backend="native"),
        jaxcoll.accelerate_lax(),
        pytest.raises(RuntimeError) as raised,
    ):
        jax.block_until_ready(step(x.reshape(-1, 4)))
    info = jaxcoll.error_info(raised.value)
    assert info is not None
    return info


@needs_engine
@pytest.mark.parametrize("parameters", NAMED)
def test_errors_name_the_parameters_of_the_call(parameters, monkeypatch):
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.2)
    info = error_of_a_missing_rank(NAMED[parameters], 2)
    operands = ", ".join(info.operands)
    assert f"of {operands} ({info.bytes} bytes, {parameters}), called at " in info.text
    assert (info.axes, info.arrived) == (("x",), (0,))
    assert info.source is not None
    assert "test_errors.py" in info.source


@needs_engine
def test_errors_name_the_first_pairs_of_a_permutation(monkeypatch):
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.2)
    info = error_of_a_missing_rank(lambda x: jaxcoll.ppermute(x, "x", RING), 8)
    assert "(64 bytes, perm=0>1 1>2 2>3 3>4 4>5 5>6 6>7 7>0), called" in info.text
    monkeypatch.setattr(_lax_rules, "_MOST_PAIRS", 2)
    info = error_of_a_missing_rank(lambda x: jaxcoll.ppermute(x, "x", RING), 8)
    assert "(64 bytes, perm=0>1 1>2 ...), called" in info.text


def load(rank, x):
    if x < 0:
        time.sleep(0.5)  # or the call itself raises, where it has not yet begun all devices' parts
        raise ValueError("no such file")
    return x


def after_loading(x):
    here = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jaxcoll.all_reduce(jax.pure_callback(load, here, jax.lax.axis_index("x"), x), "x")


@needs_engine
def test_who_waits_for_a_callback_that_has_raised_is_told(caplog):
    """Not when the limit is over, and also who reads no result of that device."""
    line = load.__code__.co_firstlineno + 3
    step = jax.jit(
        jax.shard_map(
            after_loading, mesh=mesh(4), in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False
        )
    )
    with jaxcoll.using(backend="native"):
        with pytest.raises(RuntimeError, match="waited") as raised:
            float(step(np.float32([1, 2, 3, -4]))[0])
        assert float(step(np.float32([1, 2, 3, 4]))[0]) == 10
    info = jaxcoll.error_info(raised.value)
    assert info is not None
    assert (info.kind, info.limit_s, [late.rank for late in info.missing]) == ("missing", None, [3])
    assert info.waited_s is not None
    assert info.waited_s < 30
    assert (
        f"; a callback of this process has raised ValueError: no such file, at {__file__}:{line} "
        "(load)"
    ) in info.text


@needs_engine
def test_without_a_limit_a_late_rank_is_waited_for(half_a_second):
    """Beyond the limit that was there before."""
    jaxcoll.config.timeout_s = None
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with jaxcoll.using(backend="native"):
        sums = jax.jit(mapped(late_rank, mesh(4)))(x)
        assert (np.asarray(sums) == 4 * x[0]).all()


def test_watch_leaves_other_errors_alone():
    with pytest.raises(ZeroDivisionError), jaxcoll.watch():
        _ = 1 / 0


@pytest.mark.parametrize("fn", [3, "step"])
def test_watch_wants_a_function(fn):
    with pytest.raises(TypeError, match=r"watch\(fn\): expected a function"):
        jaxcoll.watch(fn)


def test_a_watched_step_is_the_step():
    def step(x, *, by):
        """Doubles."""
        return x * by

    watched = jaxcoll.watch(jax.jit(step, static_argnames="by"))
    assert int(watched(4, by=2)) == 8
    assert watched.__doc__ == "Doubles."
    assert watched.__name__ == "step"


@pytest.mark.parametrize("seconds", [0, -1, "2", None, True])
def test_a_pause_takes_seconds(seconds):
    wanted = r"allow_pause\(seconds\): expected a positive number"
    with pytest.raises(ValueError, match=wanted), jaxcoll.allow_pause(seconds):
        raise AssertionError("it began")
