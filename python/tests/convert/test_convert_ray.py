"""Parts of a conversion as tasks of a Ray cluster, which has several nodes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

import loadstone

ray = pytest.importorskip("ray")

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "shard_size": 2_200_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a head node without task slots, and three nodes with one slot each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small | {"num_cpus": 0})
    try:
        for _ in range(3):
            made.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 MiB."""
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    state = {f"layers.{i}": torch.randn(512, 1024, generator=generator) for i in range(48)}
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "out"
    loadstone.convert(source, target, **OPTIONS)
    return contents(target)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def writers(work: Path) -> list[psutil.Process]:
    """Return the cluster's processes that are writing a shard."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            open_files = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(f"{work}/model-") and ".unfinished-" in path for path in open_files):
            found.append(process)
    return found


def strike(work: Path, kill: Callable[[psutil.Process], object], stop: threading.Event) -> bool:
    """Suspend a process that is writing a shard, so that it is killed before it finishes."""
    while not stop.wait(0.002):
        for process in writers(work):
            process.send_signal(signal.SIGSTOP)
            if process in writers(work):
                kill(process)
                return True
            process.send_signal(signal.SIGCONT)
    return False


def converted_under_attack(
    source: Path, target: Path, kill: Callable[[psutil.Process], object]
) -> loadstone.ConvertReport:
    work = target.parent / f".loadstone-{target.name}.part"
    hits: list[bool] = []
    stop = threading.Event()
    attacker = threading.Thread(target=lambda: hits.append(strike(work, kill, stop)))
    attacker.start()
    try:
        report = loadstone.convert(source, target, cluster="ray", **OPTIONS)
    finally:
        stop.set()
        attacker.join()
    assert hits == [True]
    return report


def test_parts_are_tasks(
    cluster: Any, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    report = loadstone.convert(
        source,
        tmp_path / "out",
        cluster="ray",
        progress=lambda done, total: seen.append((done, total)),
        **OPTIONS,
    )
    assert len(seen) == 3  # one call for each slot
    assert seen[-1][0] == seen[-1][1]
    assert contents(tmp_path / "out") == whole
    assert report.bytes_written == sum(map(len, whole.values()))


def test_a_task_whose_process_is_killed(
    cluster: Any, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    converted_under_attack(source, tmp_path / "out", lambda process: process.kill())
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_node_that_goes_away(
    cluster: Any, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    def remove(process: psutil.Process) -> None:
        raylets = {
            node.all_processes["raylet"][0].process.pid: node
            for node in cluster.list_all_nodes()
            if not node.head
        }
        node = next(raylets[parent.pid] for parent in process.parents() if parent.pid in raylets)
        process.kill()  # a suspended process would not notice that its node was removed
        cluster.remove_node(node, allow_graceful=False)

    before = len(cluster.list_all_nodes())
    converted_under_attack(source, tmp_path / "out", remove)
    assert len(cluster.list_all_nodes()) == before - 1
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_of_a_task_is_the_callers(cluster: Any, source: Path, tmp_path: Path) -> None:
    loadstone.convert(source, tmp_path / "out", part=(1, 2), dtype="bfloat16")
    with pytest.raises(loadstone.Error) as caught:
        loadstone.convert(source, tmp_path / "out", cluster="ray", **OPTIONS)
    assert caught.value.code == "convert.state"
    assert caught.value.path.endswith(".loadstone-out.part")


def test_without_ray_the_extra_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(loadstone.PlanError, match=r"loadstone\[ray\]"):
        loadstone.convert(source, tmp_path / "out", cluster="ray", **OPTIONS)
    assert list(tmp_path.iterdir()) == []
