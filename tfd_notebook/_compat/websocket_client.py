"""The route of a websocket, and its TLS: private functions of websocket-client."""

from __future__ import annotations

from typing import Any, NamedTuple

from websocket import _http


class Route(NamedTuple):
    """The server of a websocket, and the HTTP proxy before it, if any."""

    host: str
    port: int
    is_secure: bool
    proxy: tuple[str, int] | None
    #: User and password for the proxy.
    proxy_user: tuple[str, str] | None


def route(url: str, **options: Any) -> Route:
    """Return the route for the options of `websocket.WebSocket.connect` and the environment."""
    host, port, _, is_secure = _http.parse_url(url)
    chosen = _http.proxy_info(**options)
    proxy_host, proxy_port, user = _http.get_proxy_info(
        host, is_secure, chosen.proxy_host, chosen.proxy_port, chosen.auth, chosen.no_proxy
    )
    proxy = (proxy_host, int(proxy_port or 80)) if proxy_host else None
    return Route(host, port, is_secure, proxy, user)


def over_tls(connected: Any, options: Any, host: str) -> Any:
    """Return a connected socket over TLS, with the options of a websocket."""
    return _http._ssl_socket(connected, options.sslopt, host)
