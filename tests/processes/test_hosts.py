"""Two hosts: network namespaces of this machine, joined by a pair of virtual interfaces."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT, job_environment, run_job

needs_native = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
PORT = 7777  # in a namespace of its own every port is free


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _reason() -> str | None:
    """Says why there can be no namespaces here, or None."""
    if native_missing():
        return "the engine across processes is native"
    if sys.platform != "linux" or not shutil.which("ip") or os.geteuid() != 0:
        return "network namespaces need Linux, ip and root"
    try:
        _ip("netns", "add", f"jaxcoll-{os.getpid()}-try")
        _ip("netns", "del", f"jaxcoll-{os.getpid()}-try")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    return None


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces and their addresses, in which this host's name is that address."""
    if reason := _reason():
        pytest.skip(reason)
    names = [f"jaxcoll-{os.getpid()}-{letter}" for letter in "ab"]
    links = [f"jc{os.getpid()}{letter}" for letter in "ab"]
    found = []
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            address = f"10.213.7.{i + 1}"
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            etc = Path("/etc/netns", name)  # what `ip netns exec` puts over /etc
            etc.mkdir(parents=True)
            stack.callback(shutil.rmtree, etc)
            (etc / "hosts").write_text(f"{address} {socket.gethostname()}\n127.0.0.1 localhost\n")
            found.append((name, address))
        yield found


@pytest.mark.parametrize("ops", ["some", pytest.param("all", marks=pytest.mark.full)])
def test_every_op_over_two_hosts(hosts: list[tuple[str, str]], ops: str):
    launchers = []
    for i, (name, _) in enumerate(hosts):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "jaxcoll", "run"]
        command += ["-n", "2", "--hosts", "2", "--host-id", str(i)]
        command += ["--coordinator", f"{hosts[0][1]}:{PORT}", str(JOBS / "values.py"), ops, "hosts"]
        launchers.append(
            subprocess.Popen(
                command,
                env=job_environment() | {"JAXCOLL_HOST_ID": name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
        )
    outputs = [launcher.communicate(timeout=150)[0] for launcher in launchers]
    for i, (launcher, output) in enumerate(zip(launchers, outputs, strict=True)):
        assert launcher.returncode == 0, "\n".join(outputs)
        for rank in (2 * i, 2 * i + 1):
            assert f"[{rank}] all values are right" in output


@needs_native
@pytest.mark.full
def test_only_shares_cross_between_hosts():
    """Of two ranks of a host each takes half of the sum; of a gather its own block."""
    for said in run_job("shares.py", processes=4).values():
        assert said[-4:] == [
            "all_reduce: all_reduce of 600 f32",
            "reduce_scatter: all_to_all of 600 f32",
            "all_gather: all_gather of 1200 f32",
            "broadcast: all_reduce of 600 ui32",
        ]


@needs_native
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_mesh_says_where_its_devices_are(hosts: int):
    """By the process, and where there are several hosts, by the host."""
    told = run_job("describing.py", *(["hosts"] if hosts > 1 else []), processes=2, devices=2)
    for said in told.values():
        assert said[0] == "mesh of 4 devices: p 2 x d 2"
        assert said[1].split() == ["d", "0", "d", "1"]
        for process in range(2):
            host = f" on host{process}" if hosts > 1 else ""
            device = rf"  cpu:\d+ process {process}{host}"
            assert re.fullmatch(rf"p {process}{device}\s*{device}", said[2 + process])
    if hosts > 1:
        met = [re.fullmatch(r"met at (\d+) ns", said[-1]) for said in told.values()]
        times = [int(each[1]) if each else 0 for each in met]
        assert min(times) > 0
        assert max(times) - min(times) < 1e9, times


@needs_native
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.full), 2])
def test_gradients_are_compressed_between_hosts_alone(hosts: int):
    lines = run_job("synchronizing.py", *(["hosts"] if hosts > 1 else []), processes=2, devices=2)
    for said in lines.values():
        if hosts > 1:
            assert said[-1] == "averaged; 0 lines: []"
        else:
            assert said[-1].startswith("averaged; 1 lines: ")
            assert "compression='int8' is off: all ranks are on one host" in said[-1]
