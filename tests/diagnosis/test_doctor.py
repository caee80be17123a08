"""What the doctor finds in dumps made by hand, each of a job with one thing wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxcoll import cli
from jaxcoll.diagnosis import doctor
from jaxcoll.diagnosis.black_box import CALL
from jaxcoll.diagnosis.dumps import FORMAT

RANKS = 4
MS = 1_000_000
SITES = {"1": "all_reduce of f32[8] at a.py:1", "2": "all_gather of f32[8] at a.py:2"}
GROUP = 77


class Job:
    """Four processes of a device each, which make two calls a step, 10 ms apart."""

    def __init__(self) -> None:
        self.now = [100 * MS] * RANKS
        self.unseen_s = 0.0  # since the stacks were taken
        self.rows: list[list[tuple]] = [[] for _ in range(RANKS)]
        self.counts: dict[tuple[int, int], int] = {}
        self.run = 1
        self.dumps: list[Any] = [
            {
                "format": FORMAT,
                "job": "this one",
                "host": "here",
                "clock": {"now_ns": 0, "wall_ns": 10**18 + 5 * rank * 10**9},
                "pid": 100 + rank,
                "process": rank,
                "num_processes": RANKS,
                "phase": "in Python",
                "phase_since_ns": 0,
                "state": "running",
                "reason": "",
                "stack": f'File "a.py", line {rank}, in f',
                "stack_at_ns": 0,
                "sites": {site: [{"text": text, "ranks": RANKS}] for site, text in SITES.items()},
            }
            for rank in range(RANKS)
        ]

    def call(self, site, ranks=range(RANKS), late=None, by_ms=0, group=GROUP, of=None, took_ms=1):
        """Some ranks make a call; it ends where all have come. One comes late."""
        execution = 0
        for rank in ranks:
            self.counts[rank, site] = execution = self.counts.get((rank, site), 0) + 1
        came = {rank: self.now[rank] + (by_ms * MS if rank == late else 0) for rank in ranks}
        met = max(came.values())
        ends = len(ranks) == (of or RANKS)
        for position, rank in enumerate(ranks):
            # Clocks of processes differ; what is known is that of the day.
            shift = -5 * rank * 10**9
            times = (came[rank], min(came.values()), *((met, met + took_ms * MS) if ends else ()))
            times += (met + took_ms * MS if ends else came[rank] + 900 * MS,)
            times = times if ends else (*times[:2], 0, 0, times[2])
            number = position if of else rank
            row = (0, len(self.rows[rank]) + 1, site, group, number, execution, self.run, 0)
            self.rows[rank].append((*row, *(t + shift if t else 0 for t in times)))
            self.now[rank] = (met + took_ms * MS if ends else came[rank]) + 10 * MS

    def steps(self, count, **late):
        for _ in range(count):
            self.call(1, **late)
            self.call(2)

    def write(self, folder: Path) -> list[str]:
        for rank, dump in enumerate(self.dumps):
            if dump:
                dump["clock"]["now_ns"] = 10**9 - 5 * rank * 10**9
                dump["clock"]["wall_ns"] = 10**18
                dump["stack_at_ns"] = dump["clock"]["now_ns"] - int(self.unseen_s * 10**9)
                dump["phase_since_ns"] = dump["stack_at_ns"] - 10**9
                dump["calls"] = {"columns": list(CALL.names), "rows": self.rows[rank]}
                (folder / f"process_{rank}.json").write_text(json.dumps(dump))
        return [str(folder)]


@pytest.fixture
def job() -> Job:
    job = Job()
    job.steps(20)
    return job


def test_nothing_is_wrong(job, tmp_path):
    text, status = doctor.report(job.write(tmp_path))
    assert status == 0
    assert "4 processes, 4 dumps, 160 calls of 4 devices, on here" in text
    assert "nothing is wrong" in text


def test_a_rank_is_behind(job, tmp_path):
    job.call(1, (0, 1, 3))
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.BEHIND
    assert "rank 2 (process 2, device 0) is behind" in text
    assert "all_reduce of f32[8] at a.py:1, execution 21,\nin which rank 0, 1, 3 waited" in text
    assert "all_gather of f32[8] at a.py:2, execution 20" in text
    assert "It was in Python for 1.0 s, at" in text
    assert 'File "a.py", line 2, in f' in text


def test_an_allow_pause_that_was_too_short(job, tmp_path):
    job.call(1, (0, 1, 3))
    job.dumps[2]["paused_until_ns"] = 10**9 - 10 * 10**9 - 2 * 10**9
    text, _ = doctor.report(job.write(tmp_path))
    assert "It was in Python for 1.0 s, its allow_pause over for 2.0 s, at" in text
    job.dumps[2]["paused_until_ns"] += 4 * 10**9
    text, _ = doctor.report(job.write(tmp_path))
    assert "It was in Python for 1.0 s, at" in text


def test_a_process_that_runs_no_code_of_the_users(job, tmp_path):
    job.call(1, (0, 1, 3))
    job.dumps[2]["stack"] = ""
    text, _ = doctor.report(job.write(tmp_path))
    assert text.endswith("\nIt was in Python for 1.0 s; no Python code of the user's ran.")


def test_alike_calls_are_all_named(job, tmp_path):
    """Of one id, which does not tell them apart; each as its own process knows them."""
    job.call(1, (0, 1, 3))
    texts = [f"all_reduce of f32[8] at a.py:{line}" for line in (1, 7, 9)]
    job.dumps[0]["sites"]["1"] = [{"text": text, "ranks": RANKS} for text in texts]
    text, _ = doctor.report(job.write(tmp_path))
    assert f"{', or '.join(texts)}, execution 21,\nin which rank 0, 1, 3 waited" in text
    job.dumps[1]["sites"]["1"] = job.dumps[0]["sites"]["1"]
    job.dumps[0]["sites"]["1"] = [{"text": texts[0], "ranks": RANKS}]
    text, _ = doctor.report(job.write(tmp_path))
    assert f"\n  {texts[0]}, execution 21,\n" in text


def test_a_stopped_one_too(job, tmp_path):
    job.call(1, (0, 1, 2))
    job.dumps[3]["state"] = "stopped"
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.BEHIND
    assert "rank 3 (process 3, device 0) is behind" in text
    assert "It is stopped." in text


def test_ranks_wait_in_different_calls(job, tmp_path):
    job.call(1, (0, 1, 3))
    job.call(2, (2,))
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.MISMATCH
    assert "rank 0, 1, 3:\n    all_reduce of f32[8] at a.py:1, execution 21" in text
    assert "rank 2:\n    all_gather of f32[8] at a.py:2, execution 21" in text
    assert "is behind" not in text


def test_a_process_is_gone(job, tmp_path):
    job.call(1, (0, 2, 3))
    job.dumps[1]["state"] = "gone"
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.GONE
    assert "process 1 is gone.\nrank 1 (process 1, device 0) did not come to\n  all_reduce" in text
    assert "is behind" not in text


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        ("", "has come to the end of its program: did it make fewer steps than the others?"),
        ("KeyError: 'x', at a.py:7 (load)", "has ended with KeyError: 'x', at a.py:7 (load)."),
    ],
)
def test_a_process_has_ended(stack, said, job, tmp_path):
    job.call(1, (0, 2, 3))
    job.dumps[1] |= {"state": "gone", "phase": "ended", "stack": stack}
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.GONE
    assert f"process 1 {said}\nrank 1 (process 1, device 0) did not come to\n" in text
    assert "is gone" not in text
    assert "It was" not in text


def test_what_a_process_did_that_is_gone(job, tmp_path):
    job.call(1, (0, 2, 3))
    job.dumps[1]["state"] = "gone"
    job.unseen_s = 0.4
    text, _ = doctor.report(job.write(tmp_path))
    assert "\nIt was in Python for 1.0 s when it was seen last, 0.4 s before, at\n  File" in text
    job.dumps[1]["stack"] = ""
    text, _ = doctor.report(job.write(tmp_path))
    assert "seen last, 0.4 s before; no Python code of the user's ran." in text


def test_what_a_process_did_before_its_last_call_ended(job, tmp_path):
    """It has gone on since: it did not die of that."""
    job.call(1, (0, 2, 3))
    job.dumps[1] |= {"state": "gone", "phase": "compiling"}
    job.unseen_s = 0.8  # its last call ended 0.46 s before
    text, _ = doctor.report(job.write(tmp_path))
    assert "\nIts Python stack, 0.8 s before, when that call had not ended:\n  File" in text
    assert "compiling" not in text
    job.dumps[1]["stack"] = ""
    text, _ = doctor.report(job.write(tmp_path))
    assert "Python stack" not in text


def test_different_calls_that_only_the_error_tells_of(job, tmp_path):
    """Who makes a broadcast's first call does not wait for the others."""
    doings = [
        f'process {rank} has ended, before others came to it, broadcast over "x" of f32[4] '
        f"(16 bytes, root={rank}), called at a.py:3 (f), execution 1 of this call"
        for rank in (0, 1)
    ]
    head = "the processes called different collectives, or the same in another order"
    job.dumps[2]["reason"] = f"{head}: {'; '.join(doings)}\n  more: jaxcoll doctor ..."
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.MISMATCH
    assert text.endswith(f"\n\n{head}:\n  {doings[0]}\n  {doings[1]}")
    doings = [f"device {each} waits in call {each}" for each in (0, 1)]
    head = "the devices of process 1 called different collectives, or the same in another order"
    job.dumps[2]["reason"] = f"{head}: {'; '.join(doings)}; run -17"
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.MISMATCH
    assert text.endswith(f"\n\n{head}:\n  {doings[0]}\n  {doings[1]}")


def test_an_error_is_not_nothing(job, tmp_path):
    job.dumps[1]["reason"] = "no memory"
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.FAILED
    assert "error: no memory\n\nno call in the dumps shows more" in text
    assert "nothing is wrong" not in text


def test_a_report_of_a_hang_without_calls(job, tmp_path):
    """As of processes on `jax.lax`, one of which is stopped."""
    for rank, dump in enumerate(job.dumps):
        job.rows[rank].clear()
        dump["report"] = f"jaxcoll: step 4 of step has not ended within {6 + rank}.1 s"
    job.dumps[2] = None
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.FAILED
    assert "\nprocess 3: step 4 of step has not ended within 9.1 s\n" in text
    assert "process 2 has left no dump: is it stopped, or gone?" in text
    assert (
        'process 3:\nIt has ended no call.\nIt was in Python for 1.0 s, at\n  File "a.py", line 3'
        in text
    )


def test_a_report_hides_no_straggler(tmp_path):
    job = Job()
    job.steps(20, late=2, by_ms=30)
    job.dumps[0]["report"] = "jaxcoll: the watched block has not ended within 6.1 s"
    assert doctor.report(job.write(tmp_path))[1] == doctor.SLOW


def test_a_process_left_no_dump(job, tmp_path):
    job.call(1, (0, 2, 3))
    job.dumps[1] = None
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.GONE
    assert "no dump of process 1" in text
    assert "process 1 is gone, or can't write its dump, and others wait." in text


def test_a_straggler(tmp_path):
    job = Job()
    job.steps(20, late=2, by_ms=30)
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.SLOW
    assert "process 2, device 0 is a straggler: to 20 of 40 calls it came last, 30.0 ms" in text
    assert text.endswith(
        "They waited longest, in all, in\n"
        "  all_reduce of f32[8] at a.py:1 (20 times, 600.0 ms in all)"
    )


def test_clocks_of_hosts_whose_days_differ(tmp_path):
    """What they have in common is the moment at which the processes met."""
    job = Job()
    job.steps(20, late=2, by_ms=30)
    folder = job.write(tmp_path)
    for rank in range(RANKS):
        file = tmp_path / f"process_{rank}.json"
        dump = json.loads(file.read_text())
        dump["clock"]["wall_ns"] += rank * 3600 * 10**9
        file.write_text(json.dumps(dump))
    assert "is a straggler: to 20 of 40 calls" not in doctor.report(folder)[0]
    for rank in range(RANKS):
        file = tmp_path / f"process_{rank}.json"
        dump = json.loads(file.read_text())
        dump["clock"]["met_ns"] = 10**8 - 5 * rank * 10**9
        file.write_text(json.dumps(dump))
    text, status = doctor.report(folder)
    assert status == doctor.SLOW
    assert "process 2, device 0 is a straggler: to 20 of 40 calls it came last, 30.0 ms" in text


def test_a_straggler_in_several_calls(tmp_path):
    """Those that the others waited in for longest, not most often."""
    job = Job()
    job.steps(15, late=2, by_ms=2)
    for _ in range(2):
        job.call(2, late=2, by_ms=200)
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.SLOW
    assert text.splitlines()[-2:] == [
        "  all_gather of f32[8] at a.py:2 (2 times, 400.0 ms in all)",
        "  all_reduce of f32[8] at a.py:1 (15 times, 30.0 ms in all)",
    ]


def test_stragglers_that_come_together(tmp_path):
    """Nobody is late beside a slow process's other devices, or another slow process."""
    job = Job()
    for _ in range(20):
        for rank in (2, 3):
            job.now[rank] += 30 * MS
        job.call(1)
        job.call(2)
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.SLOW
    for rank in (2, 3):
        assert (
            f"process {rank}, device 0 is a straggler: to 20 of 40 calls it came last, 30.0 ms"
            in text
        )
    for rank, dump in enumerate(job.dumps):  # of two processes with two devices each
        rows = job.rows[rank]
        if rank % 2:
            job.rows[rank - 1] += [(1, *row[1:8], *shifted(row[8:])) for row in rows]
            job.dumps[rank] = None
        else:
            dump |= {"process": rank // 2, "num_processes": 2}
    job.dumps, job.rows = [*job.dumps[::2], None, None], [*job.rows[::2], [], []]
    job.rows[1] = [(*row[:8], *shifted(row[8:])) for row in job.rows[1]]
    folder = tmp_path / "of two"
    folder.mkdir()
    text, status = doctor.report(job.write(folder))
    assert status == doctor.SLOW
    assert "process 1, device 0; process 1, device 1 are stragglers: to 20 of 40 calls" in text
    assert "they came last, 30.0 ms after the others" in text


def shifted(times: Sequence[int]) -> list[int]:
    """Puts the times of a rank on the clock of the rank before it."""
    return [t + 5 * 10**9 if t else 0 for t in times]


def test_one_that_is_early_makes_the_others_no_stragglers(tmp_path):
    job = Job()
    for _ in range(20):
        for rank in (1, 2, 3):
            job.now[rank] += 30 * MS
        job.call(1)
        job.call(2)
    assert doctor.report(job.write(tmp_path))[1] == 0


def test_now_and_then_late_is_no_straggler(tmp_path):
    job = Job()
    job.steps(3, late=2, by_ms=30)
    job.steps(20)
    assert doctor.report(job.write(tmp_path))[1] == 0


def test_a_slow_link(tmp_path):
    job = Job()
    for dump in job.dumps:
        dump["sites"]["3"] = [{"text": "ppermute", "ranks": 2}]
    for _ in range(12):
        job.call(3, (0, 1), group=1, of=2)
        job.call(3, (2, 3), group=2, of=2, took_ms=8)
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.SLOW
    assert "the link between process 2, device 0; process 3, device 0 is slow" in text


def test_what_failed_at_once_waits_for_nobody(job, tmp_path):
    """As the calls of a late rank do, after the job has failed."""
    rank, row = 2, [0] * len(CALL.names)
    row[1:5] = [999, 1, GROUP, rank]
    row[8], row[12] = 1, 2  # arrived, resumed
    job.rows[rank].append(tuple(row))
    assert doctor.report(job.write(tmp_path))[1] == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "another"}'])
def test_files_that_are_no_dumps(content, tmp_path, capsys):
    file = tmp_path / "process_0.json"
    file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(file)])
    assert ended.value.code == 2
    assert str(file) in capsys.readouterr().err


def test_a_folder_without_dumps(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(tmp_path)])
    assert ended.value.code == 2
    assert f"doctor: no dumps (process_*.json) in {tmp_path}." in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert f"doctor: {tmp_path}/none: no such folder or file" in capsys.readouterr().err


def still_in(job: Job, rank: int, number: int, *, waited_ms: int) -> None:
    """Has a rank's dump end in a call that, as the others', ended."""
    row = list(job.rows[rank][number])
    del job.rows[rank][number + 1 :]
    moment = (CALL.names or ()).index("arrived")
    row[moment:] = [10**9 - (5000 * rank + waited_ms) * MS, *row[moment + 1 : moment + 2], 0, 0, 0]
    job.rows[rank][number] = tuple(row)


@pytest.mark.parametrize(("number", "forgotten"), [(39, 0), (38, 0), (31, 0), (39, 39), (31, 39)])
def test_dumps_of_a_job_that_goes_on_are_not_of_one_moment(job, number, forgotten, tmp_path):
    """The others' show that the call ended, or a later one of its site, where that is forgotten."""
    still_in(job, 0, number, waited_ms=5000)
    for rows in job.rows[1:]:
        del rows[:forgotten]
    text, status = doctor.report(job.write(tmp_path))
    assert status == 0, text


def test_the_same_of_the_devices_of_a_process(job, tmp_path):
    """Whose executions count down, for each meeting of its own."""
    execution, device = (CALL.names or ()).index("execution"), 0
    dump = job.dumps[0]
    job.dumps[1:] = [None] * 3
    dump["num_processes"] = 1
    for rank in range(RANKS):
        shift = 5 * rank * 10**9 if rank else 0
        for i, row in enumerate(job.rows[rank]):
            moments = [t + shift if t else 0 for t in row[8:]]
            job.rows[rank][i] = (rank, *row[1:execution], -row[execution], *row[6:8], *moments)
    still_in(job, 0, 38, waited_ms=5000)
    rest = [row for rows in job.rows[1:] for row in rows]
    job.rows[0] += rest
    text, status = doctor.report(job.write(tmp_path))
    assert status == 0, text
    job.rows[0] = [row for row in job.rows[0] if row[device] != 2]
    job.rows[0].append((2, 1, 1, GROUP, 2, -(1 << 40) - 99, *rest[0][6:]))  # another meeting's
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.BEHIND, text
    assert "rank 2 (process 0, device 2) is behind" in text


def opened(job: Job, waited_ms: int) -> None:
    """Has rank 2 be waited for in a call that did not fail."""
    job.call(1, (0, 1, 3))
    for rank in (0, 1, 3):
        still_in(job, rank, len(job.rows[rank]) - 1, waited_ms=waited_ms)


@pytest.mark.parametrize(("waited_ms", "status"), [(900, 0), (1100, doctor.BEHIND)])
def test_who_is_waited_for_while_the_job_goes_on_is_behind_after_a_second(
    job, waited_ms, status, tmp_path
):
    opened(job, waited_ms)
    assert doctor.report(job.write(tmp_path))[1] == status


@pytest.mark.parametrize(("waited_ms", "status"), [(5000, doctor.SLOW), (7000, doctor.BEHIND)])
def test_a_straggler_of_seconds_is_behind_where_it_is_later_than_ever(waited_ms, status, tmp_path):
    job = Job()
    job.steps(10, late=2, by_ms=2000)
    opened(job, waited_ms)
    assert doctor.report(job.write(tmp_path))[1] == status


def test_the_command(job, tmp_path, capsys):
    job.call(1, (0, 1, 3))
    assert cli.main(["doctor", *job.write(tmp_path)]) == doctor.BEHIND
    assert "is behind" in capsys.readouterr().out


def test_a_chain_is_no_mismatch(job, tmp_path):
    """Rank 3 waits for rank 0 in one call, which waits for rank 1 in another."""
    job.call(2, (3,), group=3, of=2)  # of ranks 0 and 3, by position
    job.rows[3][-1] = (*job.rows[3][-1][:4], 1, *job.rows[3][-1][5:])
    for rank, number in ((0, 0), (3, 1)):  # it has met before
        row = list(job.rows[rank][-2 if rank == 3 else -1])
        row[1:6] = [500 + rank, 2, 3, number, 99]
        job.rows[rank].insert(0, tuple(row))
    job.call(1, (0, 2))
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.BEHIND, text
    assert "each for the others" not in text
    assert "rank 1, 3 (" in text or "rank 1 (" in text


def test_who_has_gone_on_since_a_call_failed_is_not_behind_in_it(job, tmp_path):
    """Rank 3 never came; rank 2 made a call with rank 0 since, and is behind in the next one."""
    job.call(1, (0, 1))
    job.run = 2
    job.now = [max(job.now) + 1000 * MS] * RANKS
    job.call(2, (0, 2), group=5, of=2)
    job.call(2, (0,), group=5, of=2)
    text, status = doctor.report(job.write(tmp_path))
    assert status == doctor.BEHIND
    first, second = text.split("\n\n")[1:]
    assert first.startswith(
        "rank 3 (process 3, device 0) is behind: it did not come to\n  all_reduce"
    )
    assert second.startswith(
        "rank 1 (process 2, device 0) is behind: it did not come to\n  all_gather"
    )


def test_an_older_jobs_dump_is_left_alone(job, tmp_path):
    job.write(tmp_path)
    old = json.loads((tmp_path / "process_3.json").read_text())
    old |= {"process": 7, "job": "an older one", "num_processes": 8}
    old["clock"] = {"now_ns": 1, "wall_ns": 10**17}
    (tmp_path / "process_7.json").write_text(json.dumps(old))
    text, status = doctor.report([tmp_path])
    assert status == 0
    assert "4 processes, 4 dumps" in text
