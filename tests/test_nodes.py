"""Dense inside a node, compressed between nodes: which ranks share one, and real ranks on real and pretended nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Job, checks_of, job
from ranks.launch import FOLDER, environment_of, read, run

from hvdcomp.bench import network
from hvdcomp.hierarchy import ranks_of_nodes
from hvdcomp.horovod_api import DYNAMIC
from hvdcomp.training import launcher

WHY_NOT = network.missing()


def places(*nodes_and_places: tuple[int, int], hosts: str = "") -> list[dict[str, Any]]:
    names = hosts or "".join(str(node) for node, _ in nodes_and_places)
    return [
        {"node": node, "place": place, "host": host}
        for (node, place), host in zip(nodes_and_places, names, strict=True)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (places((0, 0), (0, 1), (1, 0), (1, 1)), [[0, 1], [2, 3]]),
        (places((0, 0), (1, 0), (0, 1), (1, 1)), [[0, 2], [1, 3]]),
        (places((1, 1), (1, 0), (0, 0), (0, 1), (2, 0), (2, 1)), [[2, 3], [0, 1], [4, 5]]),
        (places((0, 0)), "all 1 workers are on one node"),
        (places((0, 0), (0, 1)), "all 2 workers are on one node"),
        (places((0, 0), (1, 0)), "each of the 2 nodes has one worker"),
        (places((0, 0), (0, 1), (1, 0)), "different numbers of workers"),
        (places((0, 0), (1, 0), (0, 1), (1, 1), hosts="abba"), "cross_rank() does not number the nodes"),
    ],
)
def test_ranks_of_nodes(given: list[dict[str, Any]], expected: list[list[int]] | str) -> None:
    found = ranks_of_nodes(given)
    if isinstance(expected, str):
        assert expected in found
    else:
        assert found == expected


@pytest.mark.ranks
@pytest.mark.parametrize("check", checks_of("nodes"))
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_four_ranks_on_two_pretended_nodes(check: str, launcher: str) -> None:
    job("nodes", 4, launcher, **{DYNAMIC: "1"}).verify(check)


@pytest.mark.ranks
@pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}")
def test_four_ranks_on_two_hosts(tmp_path: Path) -> None:
    checks = ("check_equals_a_world_of_nodes", "check_a_nan_anywhere_skips_everywhere", "check_an_adaptive_schedule")
    variables = {DYNAMIC: "1", FOLDER: str(tmp_path)}
    with network.Hosts(2) as hosts:
        started = launcher.Job(
            [sys.executable, "-m", "ranks.worker", "nodes", *checks],
            4,
            hosts=",".join(f"{address}:2" for address in hosts.addresses),
            options=hosts.launcher_options(),
            within=hosts.on_first(()),
        )
        code, output, seconds = run(started.command_line(environment_of(variables)), variables, 150.0)
    ended = Job("two hosts", code, seconds, output, [read(tmp_path / f"{rank}.jsonl") for rank in range(4)])
    assert ended.verify(checks[0]) == [{"nodes": [[0, 1], [2, 3]]}] * 4
    for check in checks[1:]:
        ended.verify(check)
