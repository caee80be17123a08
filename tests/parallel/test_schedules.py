"""Pipeline schedules: every task once, in an order that can be, with the bubble of theory."""

import collections
import pathlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxcoll
from jaxcoll import PipelineSchedule
from jaxcoll.parallel.tick_table import tick_table

KINDS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 8, 13, 16)

cases = pytest.mark.parametrize(
    ("kind", "chunks", "p"), [(kind, chunks, p) for kind, chunks in KINDS for p in STAGES]
)


@cases
def test_every_task_once_and_after_what_it_needs(kind: str, chunks: int, p: int):
    schedule = PipelineSchedule(kind, p, chunks)
    last = p * chunks - 1
    for m in MICRO_BATCHES:
        tasks = schedule.tasks(m)
        assert list(tasks) == sorted(
            tasks, key=lambda task: (task.tick, task.direction == "backward", task.rank)
        )
        assert len({task[:3] for task in tasks}) == len(tasks)  # one at a time, on a rank
        at = {(t.direction, t.chunk * p + t.rank, t.micro_batch): t.tick for t in tasks}
        assert len(at) == len(tasks) == 2 * m * p * chunks
        for (direction, stage, micro), tick in at.items():
            if direction == "forward" and stage:
                assert at["forward", stage - 1, micro] < tick
            elif direction == "backward" and stage < last:
                assert at["backward", stage + 1, micro] < tick
            elif direction == "backward":
                assert at["forward", stage, micro] <= tick


@cases
def test_bubble(kind: str, chunks: int, p: int):
    for m in MICRO_BATCHES:
        if m >= p or chunks == 1:
            expected = (p - 1) / (chunks * m + p - 1)
            assert PipelineSchedule(kind, p, chunks).bubble(m) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("p", STAGES)
def test_what_is_held(p: int):
    for m in MICRO_BATCHES:
        assert PipelineSchedule("gpipe", p).peak_inflight(m) == m
        assert PipelineSchedule("1f1b", p).peak_inflight(m) == min(m, 2 * p - 1)
        for chunks in (2, 3):
            held = PipelineSchedule("interleaved", p, chunks).peak_inflight(m)
            assert held <= 2 * p * chunks - 1 + p  # however many micro-batches


def halves(table: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields of each tick what there is to do, by direction, and its number in its section."""
    for section in table.sections:
        both = {"forward": section.forward, "backward": section.backward}
        both = {direction: half for direction, half in both.items() if half is not None}
        for tick in range(len(next(iter(both.values()))["is_on"])):
            yield both, tick


@cases
def test_slots_hold_what_is_read(kind: str, chunks: int, p: int):
    """The table, played through: what a task reads is what its neighbour has sent for it."""
    schedule = PipelineSchedule(kind, p, chunks)
    last = p * chunks - 1
    for m in MICRO_BATCHES:
        table = tick_table(schedule, m)
        assert table.num_inputs <= schedule.peak_inflight(m)
        slots: dict[Any, Any] = {}
        done: collections.Counter[str] = collections.Counter()
        for half_of_section, tick in halves(table):
            sent = []
            for direction, half in half_of_section.items():
                for rank in range(p):
                    row = {name: column[tick, rank] for name, column in half.items()}
                    if not row["is_on"]:
                        continue
                    stage, micro = row["chunk"] * p + rank, row["micro"]
                    if stage:
                        assert slots["forward", rank, row["source"]] == (stage, micro)
                    if direction == "backward" and stage < last:
                        assert slots["backward", rank, row["cotangent"]] == (stage, micro)
                    done[direction] += 1
                    to = stage + (1 if direction == "forward" else -1)
                    if 0 <= to <= last:
                        target = half["target"][tick, to % p]
                        sent.append(((direction, to % p, target), (to, micro)))
            slots.update(sent)
        assert done["backward"] == m * p * chunks
        assert done["forward"] == m * (p * chunks - 1)  # the last stage's is in its way back


def test_texts():
    assert PipelineSchedule("1f1b", 2).text(3) == (
        "rank 0  F0  F1  .   F2  B0  .   B1  B2\nrank 1  .   F0  B0  F1  B1  F2  B2  ."
    )
    assert PipelineSchedule("gpipe", 2).text(2) == (
        "rank 0  F0  F1  .   .   B0  B1\nrank 1  .   F0  F1  B0  B1  ."
    )
    assert "F1.1" in PipelineSchedule("interleaved", 2).text(2)


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_pictures(kind: str, chunks: int, tmp_path: pathlib.Path):
    schedule, path = PipelineSchedule(kind, 3, chunks), tmp_path / "schedule.svg"
    schedule.draw(5, path)
    root = ET.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    labels = [text.text for text in root.iter(f"{space}text")]
    boxes = [r for r in root.iter(f"{space}rect") if r.get("stroke")]
    assert len(boxes) == len(schedule.tasks(5))
    assert labels.count("rank 2") == 1
    assert re.search(rf"^{kind}, 5 micro-batches", labels[-1] or "")
    wide, tall = (float(root.get(side) or 0) for side in ("width", "height"))
    for box in boxes:
        x, y, w, h = (float(box.get(side) or 0) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= wide
        assert 0 <= y <= y + h <= tall


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("1f2b", 2),
            'kind: expected one of "gpipe", "1f1b", "interl.*1f2b.*Did you',
        ),
        (("gpipe", 0), "num_stages: expected at least 1, got 0"),
        (("gpipe", 2, 2), 'num_chunks: expected 1, with "gpipe", got 2'),
        (("interleaved", 2, 1), 'num_chunks: expected 2 or more, .* "interleaved", got 1'),
    ],
)
def test_errors(arguments: tuple, text: str):
    with pytest.raises(ValueError, match=text):
        PipelineSchedule(*arguments)
    with pytest.raises(ValueError, match="num_micro_batches: expected at least 1, got 0"):
        PipelineSchedule("gpipe", 2).tasks(0)


# ---- Layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("p", STAGES)
def test_layers_are_all_there_once(p: int, chunks: int):
    for num_layers in (p * chunks, p * chunks + 1, 10 * p - 1, 30 * p + 2):
        ranks = jaxcoll.partition_layers(num_layers, p, num_chunks=chunks)
        assert [len(of_rank) for of_rank in ranks] == [chunks] * p
        in_order = [chunk for chunks in zip(*ranks, strict=True) for chunk in chunks]
        assert [i for chunk in in_order for i in chunk] == list(range(num_layers))
        sizes = {len(chunk) for chunk in in_order}
        assert max(sizes) - min(sizes) <= 1


def test_ten_layers_on_three_and_thirty_on_four():
    lengths = [len(chunk) for (chunk,) in jaxcoll.partition_layers(10, 3)]
    assert lengths == [4, 3, 3]
    assert [len(chunk) for (chunk,) in jaxcoll.partition_layers(30, 4)] == [8, 8, 7, 7]


def test_too_few_layers():
    with pytest.raises(ValueError, match="3 layers can't be spread over 4 stages: each needs one"):
        jaxcoll.partition_layers(3, 4)
    with pytest.raises(ValueError, match="num_chunks: expected at least 1, got 0"):
        jaxcoll.partition_layers(3, 1, num_chunks=0)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2, 2, 1), (2, 1, 1)])
@pytest.mark.parametrize("p", [1, 2])
def test_stored_layers_and_the_models(p: int, sizes: tuple[int, ...]):
    from jaxcoll.parallel.stages import Layers

    if len(sizes) % p:
        return
    layers = Layers(sizes, p)
    leaf = np.arange(2.0 * sum(sizes)).reshape(sum(sizes), 2) + 1
    stored = layers.arranged(leaf)
    assert stored.shape == (layers.stored, 2)
    np.testing.assert_array_equal(layers.restored(stored), leaf)
    parts = [layers.part(leaf, rank) for rank in range(p)]
    np.testing.assert_array_equal(np.concatenate(parts), stored)
    np.testing.assert_array_equal(sum(layers.placed(part, i) for i, part in enumerate(parts)), leaf)
