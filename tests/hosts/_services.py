"""Servers of one kind, each at a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tests.hosts._hosts import Hosts, Service

if TYPE_CHECKING:
    from typing_extensions import Self


class Server(Service, Protocol):
    """A service that can be ended."""

    def stop(self) -> None: ...


AnyServer = TypeVar("AnyServer", bound=Server)


class Servers(Generic[AnyServer]):
    """Servers by the names of their hosts.

    A context manager: they run until its end, and are started again where a test ended them.
    """

    def __init__(self, hosts: Hosts, servers: Mapping[str, AnyServer]) -> None:
        self._hosts = hosts
        self._all = dict(servers)

    def __iter__(self) -> Iterator[AnyServer]:
        return iter(self._all.values())

    def __getitem__(self, name: str) -> AnyServer:
        return self._all[name]

    def __enter__(self) -> Self:
        for server in self:
            server.launch()
        self._hosts.services.extend(self)
        try:
            for server in self:
                server.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self:
            self._hosts.services.remove(server)
            server.stop()
