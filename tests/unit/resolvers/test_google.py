"""Resolvers for Compute Engine and TPUs, with Google's client and recorded answers."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import importlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from google.auth import compute_engine
from google.oauth2.credentials import Credentials
from googleapiclient.discovery import build
from googleapiclient.http import HttpMock, HttpMockSequence

from tests._slow_servers import trickle
from tfd_notebook import errors
from tfd_notebook.resolvers import GCEResolver, TPUResolver, gce, tpu

tf_resolvers = tf.distribute.cluster_resolver

pytestmark = pytest.mark.usefixtures("plain_environment")


@contextlib.contextmanager
def slow_server(start: bytes) -> Iterator[str]:
    """Yield the address of a server whose reply begins with `start` and does not end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            channel, _ = listener.accept()
            with channel, contextlib.suppress(ConnectionError):
                channel.recv(65_536)
                trickle(channel, start)

        ended = pool.submit(serve)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ended.result()


class TestGCE:
    where = ("my-project", "my-zone", "my-group")

    @staticmethod
    def service(*answers: tuple[int, Any]) -> tuple[Any, HttpMockSequence]:
        http = HttpMockSequence(
            [
                ({"status": str(status)}, body if isinstance(body, str) else json.dumps(body))
                for status, body in answers
            ]
        )
        return build("compute", "v1", http=http, static_discovery=True), http

    @staticmethod
    def group(*names: str, **more: Any) -> tuple[int, Any]:
        link = "https://compute.example/projects/my-project/zones/my-zone/instances/"
        return 200, {"items": [{"instance": link + name} for name in names], **more}

    @staticmethod
    def instance(address: str) -> tuple[int, Any]:
        return 200, {"networkInterfaces": [{"networkIP": address}]}

    def test_current_client_is_used(self) -> None:
        refused, _ = self.service(self.group("w-1"), self.instance("10.0.0.1"))
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            tf_resolvers.GCEClusterResolver(*self.where, 8470, service=refused).cluster_spec()
        service, http = self.service(self.group("w-1"), self.instance("10.0.0.1"))
        resolver = GCEResolver(*self.where, 8470, service=service)
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
        (uri, method, body, _), (second, *_) = http.request_sequence
        assert "/projects/my-project/zones/my-zone/instanceGroups/my-group/listInstances" in uri
        assert (method, json.loads(body)) == ("POST", {"instanceState": "RUNNING"})
        assert "/zones/my-zone/instances/w-1" in second

    def test_obsolete_library_is_not_needed(self) -> None:
        with pytest.raises(ImportError, match="googleapiclient must be installed"):
            tf_resolvers.GCEClusterResolver(*self.where, 8470, credentials=None)
        GCEResolver(*self.where)

    def test_names_that_the_api_refuses_are_errors(self) -> None:
        service, _ = self.service()
        with pytest.raises(errors.UsageError, match=r'project.*value "My Project"'):
            GCEResolver("My Project", *self.where[1:], service=service).tasks()
        service, _ = self.service(self.group("Instance 1"))
        with pytest.raises(errors.Malformed, match="Instance 1"):
            GCEResolver(*self.where, service=service).tasks()
        tpus = build("tpu", "v1", http=HttpMockSequence([]), static_discovery=True)
        with pytest.raises(errors.UsageError, match="a/b"):
            TPUResolver("a/b", zone="z", project="p", service=tpus).tasks()

    def test_pages_are_joined_and_sorted(self) -> None:
        service, http = self.service(
            self.group("w-10", "w-2", nextPageToken="more"),
            self.group("w-1"),
            *(self.instance(f"10.0.0.{number}") for number in (1, 2, 10)),
        )
        spec = GCEResolver(*self.where, port=1, job="ps", service=service).cluster_spec()
        assert spec.as_dict() == {"ps": ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.10:1"]}
        assert "pageToken=more" in http.request_sequence[1][0]
        assert [uri.split("/")[-1].split("?")[0] for uri, *_ in http.request_sequence[2:]] == [
            "w-1",
            "w-2",
            "w-10",
        ]

    def test_number_of_pages_of_instances_has_a_limit(self) -> None:
        pages = [self.group("w", nextPageToken="more")] * 20
        service, http = self.service(*pages, *pages)
        with pytest.raises(errors.Malformed, match="more than 20 pages"):
            GCEResolver(*self.where, service=service).cluster_spec()
        assert len(http.request_sequence) == 20

    def test_number_of_instances_of_a_page_has_a_limit(self) -> None:
        service, http = self.service(self.group(*map(str, range(501))), self.instance("10.0.0.1"))
        with pytest.raises(errors.Malformed, match="expected a list of at most 500 entries"):
            GCEResolver(*self.where, service=service).cluster_spec()
        assert len(http.request_sequence) == 1

    def test_requests_to_many_instances_have_one_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Clock:
            monotonic = itertools.count().__next__

        monkeypatch.setattr(gce, "time", Clock)
        monkeypatch.setattr(gce, "RESOLVE_SECONDS", 3)
        service, http = self.service(self.group(*"abcde"), *[self.instance("10.0.0.1")] * 5)
        with pytest.raises(errors.NoAnswer, match="no complete answer within 3 s"):
            GCEResolver(*self.where, service=service).cluster_spec()
        assert len(http.request_sequence) == 3

    def test_fault_of_a_program_is_not_an_invalid_answer(self) -> None:
        other = build("tpu", "v1", http=HttpMock(), static_discovery=True)
        with pytest.raises(AttributeError, match="instanceGroups"):
            GCEResolver(*self.where, service=other).cluster_spec()

    @pytest.mark.parametrize(
        "answers",
        [
            [[]],
            [{"items": 7}],
            [{"items": ["w"]}],
            [{"items": [{"instance": 7}]}],
            [{"nextPageToken": {}}],
            ["[" * 100_000],
            ["9" * 5000],
            [("group",), []],
            [("group",), {"networkInterfaces": 7}],
            [("group",), {"networkInterfaces": [7]}],
            [("group",), {"networkInterfaces": [{}]}],
            [("group",), {"networkInterfaces": [{"networkIP": {"a": 1}}]}],
        ],
    )
    def test_answers_of_another_form_are_refused(self, answers: list[Any]) -> None:
        service, _ = self.service(
            *(self.group("w") if answer == ("group",) else (200, answer) for answer in answers)
        )
        with pytest.raises(errors.Malformed, match="invalid answer of the API"):
            GCEResolver(*self.where, service=service).cluster_spec()

    def test_ipv6_addresses_are_supported(self) -> None:
        service, _ = self.service(
            self.group("w"), (200, {"networkInterfaces": [{"ipv6Address": "fd00::1"}]})
        )
        spec = GCEResolver(*self.where, service=service).cluster_spec()
        assert spec.as_dict() == {"worker": ["[fd00::1]:8470"]}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("answers", "kind", "message"),
        [
            ([(401, {})], errors.AccessDenied, "missing, invalid or expired .HTTP 401"),
            (
                [(403, {"error": {"message": "no permission X"}})],
                errors.AccessDenied,
                "no permission X",
            ),
            ([(404, {"error": {"message": "no group"}})], errors.NotThere, "no group"),
            ([(500, "oops")], errors.NoAnswer, "HTTP 500"),
            ([(200, '{"items": [{"ins')], errors.Malformed, "invalid answer"),
            ([(200, {"items": [{}]})], errors.Malformed, "invalid answer"),
            ([(200, {})], errors.NoTasks, "no running instance"),
            ([("group",), (200, {"networkInterfaces": []})], errors.Malformed, "invalid answer"),
            ([("group",), (404, {"error": {"message": "gone"}})], errors.NotThere, "gone"),
        ],
    )
    def test_invalid_answers_raise_errors(
        self, answers: list[Any], kind: type[errors.TfdError], message: str
    ) -> None:
        service, _ = self.service(*(self.group("w") if a == ("group",) else a for a in answers))
        with pytest.raises(kind, match=message) as caught:
            GCEResolver(*self.where, service=service).cluster_spec()
        assert "my-project/my-zone/my-group" in str(caught.value)
        assert "\nNext: " in str(caught.value)

    def test_missing_credentials_are_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        with pytest.raises(errors.AccessDenied, match="credentials are missing") as caught:
            GCEResolver(*self.where).cluster_spec()
        assert "gcloud auth application-default login" in str(caught.value)

    def test_expired_credentials_are_an_error(self, serving: Callable[..., str]) -> None:
        url = serving(
            400, {"error": "invalid_grant", "error_description": "Token has been expired"}
        )
        credentials = Credentials(
            "old", refresh_token="x", token_uri=url, client_id="x", client_secret="x"
        )
        credentials.expiry = datetime.datetime(2020, 1, 1)
        with pytest.raises(errors.AccessDenied, match="expired"):
            GCEResolver(*self.where, credentials=credentials).cluster_spec()

    def test_unreachable_token_server_is_an_error(self) -> None:
        credentials = Credentials(
            "old",
            refresh_token="x",
            token_uri="http://127.0.0.1:9/",
            client_id="x",
            client_secret="x",
        )
        credentials.expiry = datetime.datetime(2020, 1, 1)
        with pytest.raises(errors.NoAnswer, match="does not answer"):
            GCEResolver(*self.where, credentials=credentials).cluster_spec()

    def test_unreachable_api_is_an_error(self) -> None:
        class Silent(HttpMock):  # type: ignore[misc]
            def request(self, *_: Any, **__: Any) -> Any:
                raise TimeoutError("timed out")

        service = build("compute", "v1", http=Silent(), static_discovery=True)
        with pytest.raises(errors.NoAnswer, match="does not answer: timed out"):
            GCEResolver(*self.where, service=service).cluster_spec()

    def test_error_does_not_quote_the_password_of_a_proxy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("https_proxy", "http://ada:PASS/WORD@127.0.0.1:1")
        resolver = GCEResolver(*self.where, credentials=Credentials("token"))
        with pytest.raises(errors.NoAnswer, match="variable https_proxy is not a valid") as caught:
            resolver.cluster_spec()
        assert "PASS" not in str(caught.value)

    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(errors.UsageError, match="zone=None"):
            GCEResolver("p", None, "g")  # type: ignore[arg-type]
        with pytest.raises(errors.UsageError, match="port=70000"):
            GCEResolver(*self.where, port=70000)


class TestTPU:
    def test_invalid_addresses_are_refused(self) -> None:
        lenient = tf_resolvers.TPUClusterResolver("grpc://not an address:99999")
        assert lenient.cluster_spec().as_dict() == {"worker": ["not an address:99999"]}
        for wrong in ("grpc://not an address:1", "grpc://h:99999", "grpc://h:1,", "grpc://::1"):
            with pytest.raises(errors.Malformed, match="invalid address"):
                TPUResolver(wrong)
        with pytest.raises(errors.UsageError, match="expected a name or an address"):
            TPUResolver("http://10.0.0.1:8470")

    def test_addresses_come_from_the_argument_or_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(
            "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://10.0.0.1,grpc://10.0.0.2:8471"
        )
        resolver = TPUResolver()
        assert isinstance(resolver, tf_resolvers.TPUClusterResolver)
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8471"]}
        assert resolver.master() == resolver.get_master() == "grpc://10.0.0.1:8470"
        assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
        assert TPUResolver("grpc://[fd00::1]").master() == "grpc://[fd00::1]:8470"
        with_chief = TPUResolver("grpc://h:1", coordinator_name="chief", coordinator_address="c:1")
        assert with_chief.cluster_spec().as_dict() == {"worker": ["h:1"], "chief": ["c:1"]}

    def test_local_tpu_has_no_tasks(self) -> None:
        resolver = TPUResolver("local")
        assert resolver.cluster_spec().as_dict() == {}
        assert resolver.num_accelerators() == {"TPU": 0}

    def test_workers_are_probed_for_cores(self) -> None:
        with pytest.raises(errors.TasksMissing, match=r"worker:0 at missing\.invalid:8470"):
            TPUResolver("grpc://missing.invalid").num_accelerators()

    @staticmethod
    def node(**answer: Any) -> Any:
        http = HttpMockSequence([({"status": "200"}, json.dumps(answer))] * 2)
        return build("tpu", "v1", http=http, static_discovery=True)

    def test_name_is_resolved_by_the_api(self) -> None:
        ends = [{"ipAddress": f"10.0.0.{i}", "port": 8470} for i in (1, 2)]
        service = self.node(state="READY", networkEndpoints=ends)
        resolver = TPUResolver("mine", zone="z", project="p", service=service)
        assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
        service = self.node(state="CREATING")
        resolver = TPUResolver("mine", zone="z", project="p", service=service)
        with pytest.raises(errors.NoTasks, match="projects/p/locations/z/nodes/mine is CREATING"):
            resolver.cluster_spec()

    @pytest.mark.parametrize(
        "answer",
        [
            {"state": 7},
            {"state": "READY"},
            {"state": "READY", "networkEndpoints": 7},
            {"state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.1", "port": "x"}]},
            {"state": "READY", "networkEndpoints": [{"ipAddress": 7, "port": 1}]},
        ],
    )
    def test_answers_of_another_form_are_refused(self, answer: dict[str, Any]) -> None:
        service = self.node(**answer)
        with pytest.raises(errors.Malformed, match="invalid answer of the API"):
            TPUResolver("mine", zone="z", project="p", service=service).cluster_spec()

    def test_slow_reply_of_the_metadata_server_ends_at_the_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tpu, "_METADATA_SECONDS", 0.3)
        with slow_server(b"HTTP/1.1 200 OK\r\nX: ") as address:
            monkeypatch.setenv("GCE_METADATA_HOST", address)
            with pytest.raises(errors.NotThere, match=r"no complete reply within|timed out"):
                TPUResolver("mine")

    def test_project_and_zone_come_from_the_metadata_server(
        self, monkeypatch: pytest.MonkeyPatch, serving: Callable[..., str]
    ) -> None:
        url = serving(200, "projects/17/zones/my-zone")
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://").rstrip("/"))
        resolver = TPUResolver(
            "mine", project="p", service=self.node(state="READY", ipAddress="10.0.0.9", port="8470")
        )
        assert resolver.place == "the TPU projects/p/locations/my-zone/nodes/mine"
        assert resolver.master() == "grpc://10.0.0.9:8470"

    def test_long_reply_of_the_metadata_server_is_not_received(
        self, monkeypatch: pytest.MonkeyPatch, serving: Callable[..., str]
    ) -> None:
        url = serving(200, "a" * 10_001)
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://").rstrip("/"))
        with pytest.raises(errors.NotThere, match="longer than 10000 bytes"):
            TPUResolver("mine")

    def test_missing_or_invalid_settings_are_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(errors.NotThere, match="no TPU: "):
            TPUResolver()
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        with pytest.raises(errors.NotThere, match="reading project and zone of the TPU"):
            TPUResolver("mine")
        monkeypatch.setenv("TPU_CONFIG", "{")
        with pytest.raises(errors.Malformed, match="TPU_CONFIG: invalid JSON"):
            TPUResolver()
        monkeypatch.setenv("TPU_CONFIG", "[]")
        with pytest.raises(errors.Malformed, match="expected an object"):
            TPUResolver()
        with pytest.raises(errors.UsageError, match="expected both coordinator_name and"):
            TPUResolver("grpc://h:1", coordinator_name="chief")


class TestMetadataServer:
    """The search for credentials, which requests the metadata server of the host."""

    @staticmethod
    def resolvers() -> tuple[Any, ...]:
        return GCEResolver("p", "z", "g"), TPUResolver("mine", zone="z", project="p")

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize(
        ("answer", "headers", "kind", "message"),
        [
            ("x" * 99, {"Content_Encoding": "gzip"}, errors.Malformed, "expected no compression"),
            ("x" * 10_000_001, {}, errors.Malformed, "longer than 10000000 bytes"),
            ("my-project", {}, errors.Malformed, "content-type"),
            ("u.example", {"Content_Type": "text/plain"}, errors.AccessDenied, "u.example"),
        ],
        ids=["compressed", "long", "without a type", "another universe"],
    )
    def test_invalid_reply_is_an_error(
        self,
        serving: Callable[..., str],
        metadata_at: Callable[[str], None],
        number: int,
        answer: str,
        headers: dict[str, str],
        kind: type[errors.TfdError],
        message: str,
    ) -> None:
        url = serving(200, answer, Metadata_Flavor="Google", **headers)
        metadata_at(url.removeprefix("http://").rstrip("/"))
        resolver = self.resolvers()[number]
        with pytest.raises(kind, match=message) as caught:
            resolver.cluster_spec()
        assert resolver.place in str(caught.value)
        assert "\nNext: " in str(caught.value)

    def test_universe_of_given_credentials_is_read_with_limits(
        self, serving: Callable[..., str], metadata_at: Callable[[str], None]
    ) -> None:
        url = serving(200, "x" * 99, Metadata_Flavor="Google", Content_Encoding="gzip")
        metadata_at(url.removeprefix("http://").rstrip("/"))
        given = compute_engine.Credentials()
        with pytest.raises(errors.Malformed, match="expected no compression"):
            GCEResolver("p", "z", "g", credentials=given).cluster_spec()

    def test_slow_reply_ends_at_the_deadline_of_all_requests(
        self, monkeypatch: pytest.MonkeyPatch, metadata_at: Callable[[str], None]
    ) -> None:
        monkeypatch.setattr(gce, "RESOLVE_SECONDS", 0.5)
        with slow_server(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n\r\n") as address:
            metadata_at(address)
            with pytest.raises(errors.NoAnswer, match=r"no complete reply within|timed out"):
                GCEResolver("p", "z", "g").cluster_spec()

    def test_refused_connection_means_missing_credentials(
        self, metadata_at: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        metadata_at("127.0.0.1:9")
        with pytest.raises(errors.AccessDenied, match="credentials are missing"):
            GCEResolver("p", "z", "g").cluster_spec()
        assert "per-request timeout" not in caplog.text


@pytest.fixture
def metadata_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that sets the address of the metadata server, without other credentials."""

    def set_address(address: str) -> None:
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.delenv("NO_GCE_CHECK", raising=False)
        importlib.reload(compute_engine._metadata)  # Google's library reads most of them once.

    yield set_address
    monkeypatch.undo()
    importlib.reload(compute_engine._metadata)


@pytest.fixture
def serving() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server with a fixed answer and returns its URL."""
    servers: list[tuple[http.server.HTTPServer, threading.Thread]] = []

    def serve(status: int, answer: Any, **headers: str) -> str:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        headers = headers or {"Content-Type": "application/json"}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Discard the log."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/"

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()
