"""Several hosts on one machine: namespaces, each joined to a switch by a link of a chosen bandwidth (Linux)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PREFIX = "hvdcomp-"
_NETWORK = "10.99.0."
_INTERFACE = "eth0"
_BURST_BYTES = 256 * 1024
"""Sent at once: a token bucket of less than a few segmentation offloads (64 KiB) would not reach its rate."""
_LATENCY = "200ms"
"""How long a packet may queue before it is dropped."""
_SOCKET_BYTES = 2**18
"""Of an MPI connection. In the megabytes that a kernel would give it, MPI's own short messages wait behind data, and a
slow link carries two thirds of what it can, by turns."""
_TRANSFERS = "send"
"""Messages in pieces, not whole by MPI's put: behind a put, the other side's permission to send waits until all of it
has passed, so that two workers that exchange halves would send by turns whenever one is a little late."""
_CONGESTION_CONTROL = "reno"
"""In every kernel. BBR, the default of some machines, all but stops for 200 ms once in ten seconds, which no method
is to blame for."""


class NetworkError(RuntimeError):
    """Namespaces or links could not be made; the message says what was tried."""


def missing() -> str | None:
    """Why this machine cannot have several hosts, None if it can."""
    absent = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} not found (Debian packages iproute2 and util-linux)"
    name = f"{_PREFIX}{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed here ({tried.stderr.strip()})"
    _run("ip", "netns", "del", name)
    return None


class Hosts:
    """So many hosts, each with a name and one interface; made on entry, gone on exit.

    Nothing outside the namespaces is touched. Those of an earlier process that was killed are removed on entry.

    Args:
        count: hosts, 1 to 250.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._name = f"{_PREFIX}{os.getpid()}"
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)

    @property
    def addresses(self) -> list[str]:
        return [f"{_NETWORK}{host + 1}" for host in range(self.count)]

    def __enter__(self) -> Hosts:
        _remove_stale()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def shape(self, bits_per_s: float | None) -> None:
        """Give every host a link of this bandwidth in both directions; None lifts the limit."""
        for host in range(self.count):
            for namespace, interface in ((self._host(host), _INTERFACE), (self._switch, f"port{host}")):
                _run("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root", check=False)
                if bits_per_s is not None:
                    _run(
                        "tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf",
                        "rate", f"{int(bits_per_s)}bit", "burst", str(_BURST_BYTES), "latency", _LATENCY,
                    )  # fmt: skip

    def on_first(self, command: Sequence[str]) -> list[str]:
        """The command, run on the first host."""
        return [*_on_host(self._host(0)), *command]

    def launcher_options(self) -> list[str]:
        """What Open MPI's mpirun needs to reach the hosts, and to leave the shared memory alone that they do have."""
        agent = Path(self._folder.name) / "on_host.sh"
        passed = " ".join(f'{name}="${name}"' for name in ("PATH", "LD_LIBRARY_PATH", "OPAL_PREFIX"))
        hosts = "\n".join(
            f'  {address}) namespace="{self._host(host)}" ;;' for host, address in enumerate(self.addresses)
        )
        start = shlex.join(_on_host("NAMESPACE")).replace("NAMESPACE", '"$namespace"')
        agent.write_text(f'#!/bin/sh\ncase "$1" in\n{hosts}\nesac\nshift\nexec {start} env {passed} sh -c "$*"\n')
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        settings = {
            "plm_rsh_agent": str(agent),
            "btl": "self,tcp",
            "btl_tcp_flags": _TRANSFERS,
            "btl_tcp_if_include": _INTERFACE,
            "btl_tcp_sndbuf": str(_SOCKET_BYTES),
            "btl_tcp_rcvbuf": str(_SOCKET_BYTES),
            "oob_tcp_if_include": _INTERFACE,
        }
        return [word for pair in settings.items() for word in ("--mca", *pair)]

    # -- making and removing

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _host(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for host, address in enumerate(self.addresses):
            namespace, port = self._host(host), f"port{host}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            choice = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            _run("ip", "netns", "exec", namespace, "sh", "-c", choice)
            _run(
                "ip", "-n", namespace, "link", "add", "name", _INTERFACE, "type", "veth",
                "peer", "name", port, "netns", self._switch,
            )  # fmt: skip
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", _INTERFACE)
            _run("ip", "-n", namespace, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0")
            _run("ip", "-n", self._switch, "link", "set", port, "up")

    def _remove(self) -> None:
        for namespace in _namespaces():
            if namespace.startswith(f"{self._name}-"):
                _run("ip", "netns", "del", namespace, check=False)
        self._folder.cleanup()


def _on_host(namespace: str) -> list[str]:
    """What goes before a command that a host runs; by a host's name MPI tells which workers share memory."""
    named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', namespace]
    return ["ip", "netns", "exec", namespace, *named]


def _remove_stale() -> None:
    for namespace in _namespaces():
        owner = re.match(rf"{_PREFIX}(\d+)-", namespace)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _run("ip", "netns", "del", namespace, check=False)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
