"""Resolver for instance groups of Google Compute Engine, based on Google's client library."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from tfd_notebook._compat import google_universe
from tfd_notebook.errors import (
    AccessDenied,
    InvalidMessage,
    Malformed,
    NoAnswer,
    NoTasks,
    ResolveError,
    UsageError,
)
from tfd_notebook.model.spec import Endpoint, check_count
from tfd_notebook.net import limited_http, optional_packages, proxies, validation
from tfd_notebook.resolvers import http_errors
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import (
    MAX_PAGES,
    PAGE_HOSTS,
    RESOLVE_SECONDS,
    AddressesByJob,
    natural,
)

#: Timeout for one request to the API, in seconds.
_REQUEST_SECONDS = 20.0
#: Limit of one reply, in bytes.
_MAX_REPLY_BYTES = 10_000_000
_RENEW = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=<key file>"
_ALLOW = "the account needs roles/compute.viewer in that project"
#: The variable with the domain of the API, and its default.
_UNIVERSE, _DEFAULT_UNIVERSE = "GOOGLE_CLOUD_UNIVERSE_DOMAIN", "googleapis.com"
#: Parts of the replies. Other fields are not read.
_ANY = validation.record_with({})
_INSTANCE_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?|[1-9][0-9]{0,19}")
_NAMES = validation.listing(validation.record_with({"instance": validation.text}), PAGE_HOSTS)
_NAME = validation.matching(_INSTANCE_NAME, "the name of an instance")
_INSTANCE = validation.record_with({"networkInterfaces": validation.listing(_ANY)})
#: Sends a request of Google's client, and returns the reply, which is an object.
Execute = Callable[[Any], dict[str, Any]]
#: The Cloud TPU API has no narrower scope.
_USER = "the resolver for Google Cloud"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class GCEResolver(Resolver):
    """The running instances of an instance group, in the order of their names.

    Parameters
    ----------
    project, zone, instance_group : str
    port : int
        Port of the tasks. Default 8470.
    job : str
        The TensorFlow job of the instances. Default ``"worker"``.
    task_type, task_id : optional
        The task of this process. Default: not a task of the cluster.
    rpc_layer : str
        Default ``"grpc"``.
    credentials : google.auth.credentials.Credentials, optional
        Default: the application's default credentials.
    service : googleapiclient.discovery.Resource, optional
        API client that is used instead of a new one with these credentials.

    See Also
    --------
    tf.distribute.cluster_resolver.GCEClusterResolver
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int = 8470,
        job: str = "worker",
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
        credentials: Any = None,
        service: Any = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        for name, value in (
            ("project", project),
            ("zone", zone),
            ("instance_group", instance_group),
        ):
            if not isinstance(value, str) or not value:
                raise UsageError(f"invalid {name}={value!r}: expected a name")
        self._where = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = check_count("port", port, 65535, 1)
        self._job = job
        self._credentials = credentials
        self._service = service

    @property
    def place(self) -> str:
        where = "/".join(self._where.values())
        return f"Compute Engine's instance group {where}/{self._group}"

    def _find(self) -> AddressesByJob:
        with google_api("compute", "v1", self.place, self._credentials, self._service) as api:
            service, execute = api
            names = sorted(self._instance_names(service, execute), key=natural)
            if not names:
                raise NoTasks(f"{self.place} has no running instance", fix="start or resize it")
            return {self._job: [self._address_of(service, execute, name) for name in names]}

    def _instance_names(self, service: Any, execute: Execute) -> Iterator[str]:
        groups = service.instanceGroups()
        request = request_of(
            groups.listInstances,
            self.place,
            **self._where,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
        )
        for page in itertools.count(1):
            if request is None:
                return
            if page > MAX_PAGES:
                raise InvalidMessage(f"more than {MAX_PAGES} pages")
            answer = execute(request)
            for item in _NAMES(answer.get("items", []), "items"):
                yield _NAME(item["instance"].rpartition("/")[2], "instance")
            validation.text(answer.get("nextPageToken", ""), "nextPageToken")
            request = groups.listInstances_next(request, answer)

    def _address_of(self, service: Any, execute: Execute, name: str) -> str:
        request = request_of(service.instances().get, self.place, **self._where, instance=name)
        answer = execute(request)
        for network in _INSTANCE(answer, "instance")["networkInterfaces"]:
            address = network.get("networkIP") or network.get("ipv6Address")
            return str(Endpoint(validation.ip_address(address, "address"), self._port))
        raise InvalidMessage(f"the instance {name} has no network interface")


#: Errors that Google's client raises when it reads an invalid reply.
_INVALID = (
    http.client.HTTPException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


def request_of(method: Callable[..., Any], place: str, **parameters: Any) -> Any:
    """Return a request of Google's client. Raise UsageError for a name that the API refuses."""
    try:
        return method(**parameters)
    except TypeError as error:
        raise UsageError(f"{place}: {error}", fix="use the names that gcloud shows") from error


def _short(error: Exception) -> str:
    return f"{error!r:.300}"


def _limited(httplib2: Any, end: float) -> Any:
    """Return the type of a client with limits of each reply, and a time at which all end."""
    connections = {
        scheme: limited_http.limited(connection, _MAX_REPLY_BYTES, end)
        for scheme, connection in httplib2.SCHEME_TO_CONNECTION.items()
    }

    class Http(httplib2.Http):
        def request(
            self, uri: str, method: str = "GET", body: Any = None, headers: Any = None, **more: Any
        ) -> Any:
            more["connection_type"] = connections[urllib.parse.urlsplit(uri).scheme]
            headers = {**(headers or {}), "accept-encoding": "identity"}
            return super().request(uri, method, body, headers, **more)

    return Http


def _credentials(auth: Any, authorized: Any, http: Any, place: str, end: float, given: Any) -> Any:
    """Return the given credentials, or those of the application, for the API's universe.

    All requests to Google's metadata server, and to identity providers, use `http`.
    """

    def request(*arguments: Any, timeout: float | None = None, **options: Any) -> Any:
        http.timeout = timeout or _REQUEST_SECONDS  # google-auth-httplib2 has no such argument
        try:
            return authorized.Request(http)(*arguments, **options)
        except OSError as error:
            if time.monotonic() >= end:
                raise
            # The library repeats the request, or uses other credentials.
            raise auth.exceptions.TransportError(error) from error

    try:
        if (found := given) is None:
            found, _ = auth.default(scopes=[_SCOPE], request=request)
        found = google_universe.with_universe(found, request)
    except (OSError, auth.exceptions.GoogleAuthError):  # some are also a ValueError
        raise
    except _INVALID as error:
        raise InvalidMessage(_short(error)) from error
    expected = os.environ.get(_UNIVERSE, _DEFAULT_UNIVERSE).strip()
    universe = getattr(found, "universe_domain", expected)
    if universe != expected:
        raise AccessDenied(
            f"{place}: the credentials are for {universe!r:.100}, and the API is at {expected!r}",
            fix=f"use other credentials, or set {_UNIVERSE} to their domain",
        )
    return found


@contextlib.contextmanager
def google_api(
    name: str, version: str, place: str, credentials: Any = None, service: Any = None
) -> Iterator[tuple[Any, Execute]]:
    """Yield the client of a Google API, and the function that sends its requests.

    Convert their exceptions to `ResolveError`. All requests have one deadline.

    Parameters
    ----------
    name, version : str
        Name and version of the API.
    place : str
        The requested resource, as the first words of errors.
    credentials, service : optional
        See `GCEResolver`.
    """
    client = optional_packages.load("googleapiclient.discovery", _USER, "gce")
    client_errors = optional_packages.load("googleapiclient.errors", _USER, "gce")
    auth = optional_packages.load("google.auth", _USER, "gce")
    httplib2 = optional_packages.load("httplib2", _USER, "gce")
    authorized = optional_packages.load("google_auth_httplib2", _USER, "gce")
    end = time.monotonic() + RESOLVE_SECONDS

    def execute(request: Any) -> dict[str, Any]:
        if time.monotonic() > end:
            raise TimeoutError(f"no complete answer within {RESOLVE_SECONDS:g} s")
        try:
            answer = request.execute()
        except (OSError, auth.exceptions.GoogleAuthError):  # some are also a ValueError
            raise
        except _INVALID as error:  # of the client, which reads the reply
            raise InvalidMessage(_short(error)) from error
        fields: dict[str, Any] = _ANY(answer, "answer")
        return fields

    try:
        if service is not None:
            yield service, execute
            return
        for url in (f"https://{name}.{_DEFAULT_UNIVERSE}", "http://metadata.google.internal"):
            if variable := proxies.invalid_variable(url):
                raise NoAnswer(
                    f"{place}: the variable {variable} is not a valid address", fix=proxies.FIX
                )
        limited = _limited(httplib2, end)
        with contextlib.closing(limited()) as http:
            found = _credentials(auth, authorized, http, place, end, credentials)
        sender = authorized.AuthorizedHttp(found, limited(timeout=_REQUEST_SECONDS))
        with client.build(name, version, http=sender, static_discovery=True) as resource:
            yield resource, execute
    except ResolveError:
        raise
    except auth.exceptions.TransportError as error:
        raise NoAnswer(
            f"{place}: the token server does not answer: {error}", fix="check the network"
        ) from error
    except auth.exceptions.GoogleAuthError as error:
        raise AccessDenied(
            f"{place}: the credentials are missing, invalid or expired: {error}", fix=_RENEW
        ) from error
    except client_errors.HttpError as error:
        raise http_errors.of_status(
            int(error.resp.status), error.reason or "", place, _RENEW, _ALLOW
        ) from error
    except (OSError, httplib2.HttpLib2Error) as error:
        raise NoAnswer(f"{place} does not answer: {error}", fix="check the network") from error
    except (InvalidMessage, client_errors.Error) as error:
        raise Malformed(
            f"{place}: invalid answer of the API or the metadata server: {_short(error)}",
            fix="try again; a proxy may change or truncate answers",
        ) from error
