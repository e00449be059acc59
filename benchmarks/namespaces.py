"""Machines that are network namespaces of this one, joined by links whose bandwidth is really limited."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

HUB = f"chimera-{os.getpid()}-hub"
"""The namespace of the bridge, so that the network of the machine itself stays as it is."""


class NotPermitted(Exception):
    """This machine lets us make no namespaces or limit no links; the message says what failed."""


@dataclass(frozen=True)
class Limit:
    """What each machine sends and receives at most, with the bytes that pass at once, in frames of ``mtu`` bytes.

    Frames are jumbo frames: with small ones the processors that play all the machines are busy with packets.
    """

    rate: str = "200mbit"
    burst: str = "9200b"
    mtu: int = 9000


@dataclass(frozen=True)
class Machine:
    """A namespace, its address, and the name of its link."""

    name: str
    address: str
    link: str = "wire"

    def command(self, words: Sequence[str]) -> list[str]:
        """The command, run inside."""
        return ["ip", "netns", "exec", self.name, *words]


@contextmanager
def joined(count: int, limit: Limit) -> Iterator[tuple[Machine, ...]]:
    """So many machines on one bridge; whatever happens inside, they are gone afterwards.

    A link is limited in both directions: where its machine sends, and where the bridge sends to it.

    Raises
    ------
    NotPermitted
        If they cannot be made.
    """
    machines = tuple(Machine(f"chimera-{os.getpid()}-{k}", f"10.77.0.{k + 1}") for k in range(count))
    try:
        for missing in [each for each in ("ip", "tc") if shutil.which(each) is None]:
            raise NotPermitted(f"there is no command {missing} (package iproute2)")
        _make(machines, limit)
        yield machines
    finally:
        _remove(machines)


def _make(machines: Sequence[Machine], limit: Limit) -> None:
    _do(f"ip netns add {HUB}")
    _do(f"ip -n {HUB} link add bridge type bridge")
    _do(f"ip -n {HUB} link set bridge up")
    shape = f"root tbf rate {limit.rate} burst {limit.burst} latency 2s"
    for number, machine in enumerate(machines):
        port = f"port{number}"
        _do(f"ip netns add {machine.name}")
        _do(f"ip -n {HUB} link add {port} type veth peer name {machine.link} netns {machine.name}")
        _do(f"ip -n {HUB} link set dev {port} master bridge up")
        _do(f"ip -n {machine.name} addr add {machine.address}/24 dev {machine.link}")
        for link in ("lo", machine.link):
            _do(f"ip -n {machine.name} link set dev {link} up")
        _do(f"ip -n {machine.name} link set dev {machine.link} mtu {limit.mtu}")
        _do(f"ip -n {HUB} link set dev {port} mtu {limit.mtu}")
        _do(f"tc -n {machine.name} qdisc add dev {machine.link} {shape}")
        _do(f"tc -n {HUB} qdisc add dev {port} {shape}")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"{command}: {done.stderr.strip()}")


def _remove(machines: Sequence[Machine]) -> None:
    for name in (*(machine.name for machine in machines), HUB):
        with suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def environment(machine: Machine) -> dict[str, str]:
    """For what runs inside: gloo talks over the limited link."""
    return os.environ | {"GLOO_SOCKET_IFNAME": machine.link, "OMP_NUM_THREADS": "1"}
