"""Errors without the passwords of the addresses that they quote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.launchers import Jupyter

ADDRESSES = [
    "https://ada:PASSWORD@host:99999/x",
    "https://ada:PASSWORD@host:99999/x?token=TOKEN",
    "https://PASSWORD@host:99999/x",
    "https://ada:PASS@PASSWORD@host:99999/x",
    "https://ada:99999/PASSWORD@host/x",
    "https://ada:PASS?PASSWORD@host/x",
    "https://ada:PASS#PASSWORD@host:99999/x",
    "https://host:99999/x?token=TOKEN@TOKEN",
    "ada:PASSWORD@host:8888/x",
    "ftp://ada:PASSWORD@host/x",
    "https://ada:PASSWORD@:8888/x",
    "https://ada:PASSWORD@[host/x",
    "//ada:PASSWORD@host:8888/x",
    "https://ada:PASS,PASSWORD@host:99999/x",
]


def assert_is_clean(error: BaseException) -> None:
    assert not any(secret in f"{error} {error!r} {error.args}" for secret in ("PASS", "TOKEN"))
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("open_server", [Jupyter, tfd.RemoteKernel])
def test_error_does_not_quote_the_user_part_of_an_address(open_server: Any, address: str) -> None:
    with pytest.raises(errors.UsageError, match="invalid Jupyter server address") as caught:
        open_server(address)
    assert_is_clean(caught.value)


def test_invalid_address_is_quoted_without_its_user_part() -> None:
    with pytest.raises(errors.UsageError, match=r"address 'https://host:99999/x'"):
        Jupyter("https://ada:PASSWORD@host:99999/x?token=TOKEN")


@pytest.mark.parametrize("scheme", ["https", "http", "tcp", "spark", "gs"])
def test_no_error_has_the_user_part_of_an_address(scheme: str) -> None:
    address = f"{scheme}://ada:PASS@PASSWORD@host:1/x@y"
    error = errors.LaunchError(f"reading {address!r} failed", task=address, fix=f"check {address}")
    assert_is_clean(error)
    assert error.what == f"reading '{scheme}://host:1/x@y' failed"


@pytest.mark.parametrize(
    "address",
    [
        *("https:/ada:PASSWORD@host/x", "https://ada:PASS/PASSWORD@host/x"),
        *("ada:PASS/PASSWORD@host:1", "//ada:PASSWORD@host", "https%3A//ada:PASSWORD@host/x"),
        *("https%3A%2F%2Fada%3APASSWORD%40host%2Fx", "https://ada:PASS PASSWORD@host/x"),
        "https://ada:PASS/ PASS@PASSWORD@host",
    ],
)
@pytest.mark.parametrize(
    "use", [tfd.resolve, tfd.attach, lambda address: tfd.Cluster(launcher=address)]
)
def test_other_uses_of_an_address_do_not_quote_its_password(use: Any, address: str) -> None:
    with pytest.raises(errors.TfdError) as caught:
        use(address)
    assert "PASS" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    "argument",
    [
        "https://host/lab?token=TOKEN",
        "https://host/lab?reset=1&token=TOKEN#TOKEN=TOKEN",
        "https://host/lab#access_token=TOKEN",
        "host:8888/?token=TOKEN",
        "jupyter:https://host/?token=TOKEN",
        "jupyter?Token=TOKEN",
        "token=TOKEN",
        "jupyter --token=TOKEN",
        "jupyter, token='TOKEN'",
        "https%3A%2F%2Fhost%2Flab%3Ftoken%3DTOKEN",
        "https://host.blob.core.windows.net/c?sv=1&sig=TOKEN%3D",
        "https://host.s3.amazonaws.com/c?X-Amz-Signature=TOKEN&X-Amz-Security-Token=TOKEN",
        "https://host/?key=TOKEN&password=TOKEN",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        tfd.resolve,
        tfd.attach,
        tfd.Service,
        lambda argument: tfd.Cluster(launcher=argument),
        lambda argument: tfd.Cluster(name=argument),
        lambda argument: tfd.Cluster(data_workers=argument),
    ],
)
def test_argument_is_quoted_without_its_tokens(use: Any, argument: str) -> None:
    with pytest.raises(errors.TfdError) as caught:
        use(argument)
    assert "=TOKEN" not in f"{caught.value} {caught.value!r}".replace("%3D", "=").replace("'", "")


@pytest.mark.parametrize(
    "env", [{"A": ["SECRET"]}, ["A=SECRET"], {"A=SECRET": "x"}, {1: "SECRET"}, "A=SECRET"]
)
def test_invalid_env_is_not_quoted(env: Any) -> None:
    with pytest.raises(errors.UsageError, match="env") as caught:
        tfd.Cluster(env=env)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "unknown cluster 'https://h/?token=T'; use x",
            "unknown cluster 'https://h/?token=...'; use x",
        ),
        ("GET /?a=1&token=T&b=2 failed", "GET /?a=1&token=...&b=2 failed"),
        ("such as https://host:8888/?token=...", "such as https://host:8888/?token=..."),
        ("set token=, the variable X", "set token=, the variable X"),
        ("y = f(x, n_tokens=5)", "y = f(x, n_tokens=5)"),
        ("max_token=5, monkey=1, ?monkey=1", "max_token=5, monkey=1, ?monkey=1"),
        ("jax.jit(key=key)", "jax.jit(key=key)"),
    ],
)
def test_only_tokens_are_removed_from_errors(text: str, clean: str) -> None:
    error = errors.LaunchError(text, task=text, fix=text)
    assert (error.what, error.task, error.fix) == (clean, clean, clean)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://ada:PASSWORD@host failed; ask bob@x", "https://host failed; ask bob@x"),
        ("'//ada:PASSWORD@host/a@b'", "'//host/a@b'"),
        ("?next=https%3A%2F%2Fada%3APASSWORD%40host&to=bob@x", "?next=https%3A%2F%2Fhost&to=bob@x"),
        ("from https://h:1 to http://ada:PASS WORD@h:2/c d", "from https://h:1 to http://h:2/c d"),
    ],
)
def test_only_the_user_part_of_an_address_is_removed(text: str, clean: str) -> None:
    assert errors.without_user(text) == clean


# A pattern that reads a text again for each address in it takes many minutes, which ends the test.
@pytest.mark.parametrize("text", [
    *("@", ":", "//a", "%3A%2F%2Fa", "'a", ",a:b@@ ", ":/a:x"),
    *(":/a:x" * 1000 + "@ ", ":/a:x" * 100 + " ://@\n", ":/a:x" * 1000 + "' @\n"),
    *(",a:b" * 1000 + "'@ ", "%3a%2f%2f" + "a" * 3000 + "%40 ", "://a:x "),
])  # fmt: skip
def test_long_text_is_read_once(text: str) -> None:
    text = f"@{text * (5_000_000 // len(text))}@"
    assert len(errors.without_user(text)) <= len(text)


@pytest.mark.parametrize(
    "text",
    [
        *("https://host:8080/a@b", "see ada@host", "worker:0@host", "at x: a@b"),
        *("tcp://[::1]:80/@", "//host:8080/a@b", "a/b@c", "x: y@z", "x[n//2:m@k]", "//@scope/a"),
        *("https://host:8080 failed; ask bob@x", "'https://host:1', bob@x", "// see: bob@x"),
        *("reading https://host/a: ask bob@x", "https://host: ask bob@x", "{'a': 'b@c'}"),
        *("'https://host:word' is invalid: ask bob@x", "https://a:b\nbob@x"),
        *("?next=https%3A%2F%2Fhost%2Fa%40b", "https%3A%2F%2Fhost&to=bob@x", "%3A//h:80/a@b"),
        *("https://host:word or https://host/bob@x", "y = a@b.T; z: c@d"),
    ],
)
def test_text_without_a_password_remains(text: str) -> None:
    assert errors.without_user(text) == text


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance(colors="nocolor")
    yield shell
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


NESTED = """
import tfd_notebook as tfd
def start():
    return tfd.Cluster(launcher="locl")
try:
    {}["key"]
except KeyError:
    start()
"""


def test_notebook_shows_the_frames_of_the_user(shell: InteractiveShell, capsys: Any) -> None:
    shell.run_cell(NESTED)
    shown = capsys.readouterr().out
    assert shown.index("start()") < shown.index('tfd.Cluster(launcher="locl")')
    assert "did you mean 'local'?" in shown
    assert "tfd_notebook/cluster" not in shown
    assert "KeyError: 'key'" not in shown  # the error is complete without it
    shell.run_line_magic("xmode", "Verbose")
    shell.run_line_magic("tb", "")
    shown = capsys.readouterr().out
    assert "tfd_notebook/cluster" in shown
    assert "KeyError: 'key'" in shown
