"""Resolver for instance groups of Google Compute Engine, based on Google's client library."""

from __future__ import annotations

import contextlib
import itertools
import urllib.parse
from collections.abc import Iterator
from typing import Any

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
from tfd_notebook.net import limited_http, optional_packages
from tfd_notebook.resolvers import http_errors
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import MAX_PAGES, AddressesByJob, natural

#: Timeout for one request to the API, in seconds.
_REQUEST_SECONDS = 20.0
#: Limit of one reply, in bytes.
_MAX_REPLY_BYTES = 10_000_000
_RENEW = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=<key file>"
_ALLOW = "the account needs roles/compute.viewer in that project"
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
        with google_api("compute", "v1", self.place, self._credentials, self._service) as service:
            names = sorted(self._instance_names(service), key=natural)
            if not names:
                raise NoTasks(f"{self.place} has no running instance", fix="start or resize it")
            return {self._job: [self._address_of(service, name) for name in names]}

    def _instance_names(self, service: Any) -> Iterator[str]:
        groups = service.instanceGroups()
        request = groups.listInstances(
            **self._where, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        for page in itertools.count(1):
            if request is None:
                return
            if page > MAX_PAGES:
                raise ValueError(f"more than {MAX_PAGES} pages")
            answer = request.execute()
            for item in answer.get("items", ()):
                yield item["instance"].rpartition("/")[2]
            request = groups.listInstances_next(request, answer)

    def _address_of(self, service: Any, name: str) -> str:
        instance = service.instances().get(**self._where, instance=name).execute()
        network = instance["networkInterfaces"][0]
        return str(Endpoint(network.get("networkIP") or network["ipv6Address"], self._port))


def _short(error: Exception) -> str:
    return f"{error!r:.300}"


def _limited(httplib2: Any) -> Any:
    """Return the type of a client with limits of each reply."""
    connections = {
        scheme: limited_http.limited(connection, _MAX_REPLY_BYTES)
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


@contextlib.contextmanager
def google_api(
    name: str, version: str, place: str, credentials: Any = None, service: Any = None
) -> Iterator[Any]:
    """Yield the client of a Google API; convert its exceptions to `ResolveError`.

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
    http = optional_packages.load("httplib2", _USER, "gce")
    authorized = optional_packages.load("google_auth_httplib2", _USER, "gce")
    try:
        if service is not None:
            yield service
            return
        if credentials is None:
            credentials, _ = auth.default(scopes=[_SCOPE])
        sender = authorized.AuthorizedHttp(credentials, _limited(http)(timeout=_REQUEST_SECONDS))
        with client.build(name, version, http=sender, static_discovery=True) as resource:
            yield resource
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
    except (OSError, http.HttpLib2Error) as error:
        raise NoAnswer(f"{place} does not answer: {error}", fix="check the network") from error
    except (
        InvalidMessage,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RecursionError,
        client_errors.Error,
    ) as error:
        raise Malformed(
            f"{place}: invalid answer of the API: {_short(error)}",
            fix="try again; a proxy may change or truncate answers",
        ) from error
