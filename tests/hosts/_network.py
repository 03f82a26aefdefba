"""A network on one machine: namespaces at a switch, and faults between them.

The switch is a bridge in a separate namespace. Loss and partitions are rules of the packet filter
in this namespace. Resets are rules of a host's packet filter. The machine's own packet filter is
not used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import signal
import subprocess
import uuid

_SEGMENTS = "gso_max_segs"
_HOOK = "{{ type filter hook {} priority 0; }}"


class Peer:
    """A member of the network."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"


class Network:
    """Namespaces at a switch, which is connected to this process's namespace, ``home``.

    Parameters
    ----------
    *names : str
        Names of the hosts, up to 15 characters each.

    Attributes
    ----------
    home : Peer
        The member of the test's process.
    addresses : dict of str to str
        All addresses by name, including ``home``.
    """

    def __init__(self, *names: str) -> None:
        _sweep()
        self._suffix = f"{os.getpid():06x}{uuid.uuid4().hex[:4]}"
        self._names = names
        self._switch = self.namespace("switch")
        self._cable = f"tfd-{self._suffix}"
        self._filtered = False
        self._resetting: set[str] = set()
        self._down: set[str] = set()
        net = _free_network()
        self.addresses = dict(zip(("home", *names), map(str, net.hosts()), strict=False))
        self.home = Peer("home", self.addresses["home"])
        try:
            self._wire()
        except BaseException:
            Network.close(self)
            raise

    def namespace(self, name: str) -> str:
        """Return the name of a host's namespace for ``ip netns``."""
        return f"tfd-{self._suffix}-{name}"

    def _wire(self) -> None:
        ip([f"netns add {self.namespace(name)}" for name in ("switch", *self._names)])
        ip([f"link add {self._cable} type veth peer name home netns {self._switch}"])
        switch = ["link add switch type bridge", *_up("switch")]
        for name in self._names:
            far = f"peer name eth0 netns {self.namespace(name)}"
            switch.append(f"link add {name} type veth {far}")
        for name in ("home", *self._names):
            switch += [f"link set {name} master switch", *_up(name)]
        ip(switch, self._switch)
        ip(_up(self._cable, self.addresses["home"]))
        for name in self._names:
            end = _up("eth0", self.addresses[name])
            ip(["link set lo up", *end], self.namespace(name))

    def close(self) -> None:
        """Remove everything."""
        # The interfaces of a deleted namespace disappear with a delay.
        if os.path.exists(f"/sys/class/net/{self._cable}"):
            ip([f"link del {self._cable}"])
        for name in (*self._names, "switch"):
            if os.path.exists(f"/run/netns/{self.namespace(name)}"):
                ip([f"netns del {self.namespace(name)}"])

    def full_speed(self) -> None:
        """Transfer packets of up to 64 KiB from now on, at full speed."""
        ip([f"link set {self._cable} {_SEGMENTS} 65535"])
        ip([f"link set {name} {_SEGMENTS} 65535" for name in ("home", *self._names)], self._switch)
        for name in self._names:
            ip([f"link set eth0 {_SEGMENTS} 65535"], self.namespace(name))

    # Faults in both directions, until `heal`

    def partition(self, a: Peer, b: Peer) -> None:
        """Drop all packets between two hosts silently."""
        self._drop(a, b)

    def lose(self, a: Peer, b: Peer, percent: int) -> None:
        """Drop packets between the two at random."""
        self._drop(a, b, f"numgen random mod 100 < {percent}")

    def slow(self, a: Peer, kbit: int) -> None:
        """Limit the rate from and to `a` to `kbit` per second, and drop all other packets.

        The initial burst is the data of one second and 16 KB.
        """
        for way in ("saddr", "daddr"):
            limit = f"limit rate over {max(1, kbit // 8)} kbytes/second burst 16 kbytes"
            self._filter(f"ip {way} {a.address} {limit} drop")

    def reset(self, a: Peer, b: Peer) -> None:
        """Answer TCP packets between the two with a reset, as some firewalls do.

        A connection is reset when the next packet is sent.
        """
        # Not in the switch, because some kernels cannot reject packets from a bridge.
        at, peer = (b, a) if a.name == "home" else (a, b)
        assert at.name != "home"
        namespace = self.namespace(at.name)
        if namespace not in self._resetting:
            self._resetting.add(namespace)
            _nft(namespace, "add table inet faults")
            for hook in ("input", "output"):
                _nft(namespace, f"add chain inet faults {hook}", _HOOK.format(hook))
        for hook, way in (("input", "saddr"), ("output", "daddr")):
            # The resets pass through the same hook.
            match = f"ip {way} {peer.address} tcp flags & rst == 0"
            _nft(namespace, f"add rule inet faults {hook} {match} reject with tcp reset")

    def down(self, a: Peer) -> None:
        """Disconnect `a` from the switch."""
        self._down.add(a.name)
        ip([f"link set {a.name} down"], self._switch)

    def up(self, a: Peer) -> None:
        """Reconnect `a` to the switch."""
        ip([f"link set {a.name} up"], self._switch)
        self._down.discard(a.name)

    def heal(self) -> None:
        """Remove every fault."""
        if self._filtered:
            _nft(self._switch, "delete table bridge faults")
            self._filtered = False
        for namespace in sorted(self._resetting):
            _nft(namespace, "delete table inet faults")
            self._resetting.remove(namespace)
        for name in sorted(self._down):
            self.up(Peer(name, self.addresses[name]))

    def _drop(self, a: Peer, b: Peer, when: str = "") -> None:
        for source, target in ((a, b), (b, a)):
            self._filter(f"ip saddr {source.address} ip daddr {target.address} {when} drop")

    def _filter(self, rule: str) -> None:
        if not self._filtered:
            self._filtered = True
            _nft(self._switch, "add table bridge faults")
            _nft(self._switch, "add chain bridge faults pass", _HOOK.format("prerouting"))
        _nft(self._switch, f"add rule bridge faults pass {rule}")


def inhabitants(namespace: str) -> set[int]:
    """Return the processes of a namespace, without zombies."""
    pids: set[int] = set()
    try:
        wanted = os.stat(f"/run/netns/{namespace}").st_ino
    except FileNotFoundError:
        return pids
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                pids.add(int(entry))
    return pids


def _sweep() -> None:
    """Remove the leftovers of a killed test run."""
    with contextlib.suppress(FileNotFoundError):
        for namespace in os.listdir("/run/netns"):
            owner = re.fullmatch(r"tfd-([0-9a-f]{6})[0-9a-f]{4}-\w+", namespace)
            if owner and not os.path.exists(f"/proc/{int(owner[1], 16)}"):
                for pid in inhabitants(namespace):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(
                    subprocess.CalledProcessError
                ):  # another process may sweep, too
                    ip([f"netns del {namespace}"])


def ip(commands: list[str], namespace: str | None = None) -> None:
    """Execute commands of ``ip`` in one process."""
    within = ["-n", namespace] if namespace else []
    _checked(["ip", *within, "-batch", "-"], "\n".join(commands))


def _nft(namespace: str, command: str, *words: str) -> None:
    _checked(["ip", "netns", "exec", namespace, "nft", *command.split(), *words])


def _up(link: str, address: str = "") -> list[str]:
    """Return the commands that set up an interface without IPv6, and optionally with IPv4."""
    return [
        f"link set {link} addrgenmode none",
        # Without segmentation offload, so that a lost packet is not 64 KiB.
        f"link set {link} {_SEGMENTS} 1",
        *([f"addr add {address}/24 dev {link}"] if address else []),
        f"link set {link} up",
    ]


def _free_network() -> ipaddress.IPv4Network:
    """Return a network of 256 addresses that this machine does not use."""
    listed = subprocess.run(
        ["ip", "-json", "-4", "route", "show", "table", "all"],
        check=True,
        capture_output=True,
        text=True,
    )
    taken = [
        network
        for route in json.loads(listed.stdout)
        if route["dst"] != "default"
        # Wider networks are default routes, as a VPN sets them.
        and (network := ipaddress.IPv4Network(route["dst"])).prefixlen > 8
    ]
    candidates = list(ipaddress.IPv4Network("10.253.0.0/16").subnets(new_prefix=24))
    return random.choice([n for n in candidates if not any(map(n.overlaps, taken))])


def _checked(command: list[str], given: str = "") -> None:
    completed = subprocess.run(command, input=given, capture_output=True, text=True, timeout=30)
    if completed.returncode:
        print(*command, given, completed.stdout, completed.stderr, sep="\n")
        completed.check_returncode()
