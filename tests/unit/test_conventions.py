"""Rules for all files of the repository."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

import tfd_notebook
from tfd_notebook import errors
from tfd_notebook.cluster.config import ClusterOptions
from tfd_notebook.launchers import RemoteLauncher, base
from tfd_notebook.model import command_table
from tfd_notebook.model.spec import Policy, Service
from tfd_notebook.ui import jupyter_server

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfd_notebook"
TEXT = {".cfg", ".ipynb", ".md", ".py", ".toml", ".txt", ".yml", ""}


def own_launchers() -> dict[str, Any]:
    """Return the launchers that the project declares as entry points, by name."""
    launchers = {}
    for name, target in project()["project"]["entry-points"][base.ENTRY_POINTS].items():
        module, _, attribute = target.partition(":")
        launchers[name] = getattr(importlib.import_module(module), attribute)
    return launchers


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(pattern: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of each module of the package whose text has `pattern`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(pattern, text := path.read_text()):
            yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def files() -> Iterator[Path]:
    """Return all text files of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        path = ROOT / name
        if path.suffix in TEXT and path.is_file():
            yield path


def test_public_names_are_sorted_and_exist() -> None:
    names = tfd_notebook.__all__
    assert names == sorted(set(names))
    for name in names:
        assert getattr(tfd_notebook, name) is not None
    assert set(names) <= set(dir(tfd_notebook))
    with pytest.raises(AttributeError, match="nonsense"):
        tfd_notebook.nonsense  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.asname for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert imported | {"__version__"} == set(tfd_notebook.__all__)


def test_one_version() -> None:
    version = project()["project"]["version"]
    assert tfd_notebook.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_documented_error_tree_matches_the_classes() -> None:
    drawn = dict(re.findall(r"(\w+)\s+(TFD\d{3})\s", errors.__doc__ or ""))
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert drawn == {kind.__name__: kind.code for kind in kinds}
    assert len(set(drawn.values())) == len(drawn)
    assert list(errors.__all__) == sorted(errors.__all__)
    assert set(_subclasses(errors.TfdError)) | {errors.TfdError} == set(kinds)


def _subclasses(kind: type[errors.TfdError]) -> Iterator[type[errors.TfdError]]:
    for child in kind.__subclasses__():
        # Errors that are also TensorFlow's are created when raised, under the same name.
        if getattr(errors, child.__name__, None) is child:
            yield child
            yield from _subclasses(child)


def test_docs_name_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    missing = [n for n in errors.__all__ if f"`{n}`" not in page]
    assert not missing
    assert {getattr(errors, n).code for n in errors.__all__} == set(re.findall(r"TFD\d{3}", page))


def test_signatures_show_every_argument() -> None:
    cluster = inspect.signature(tfd_notebook.Cluster).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(ClusterOptions)}
    defaults |= {"if_exists": "reuse", "start": True}
    assert {name: parameter.default for name, parameter in cluster.items()} == defaults
    others = {"host", "allow", "port", "output", "detach", "foreground"}  # not of the class
    others |= {field.name for kind in (Policy, Service) for field in dataclasses.fields(kind)}
    for surface in ("%tfd_cluster", "tfd"):
        arguments = command_table.commands(surface)["start"].arguments(surface)
        assert {argument.name for argument in arguments} <= {*defaults, *others}
    assert all(p.kind is p.KEYWORD_ONLY for p in cluster.values())
    stream = inspect.signature(tfd_notebook.Cluster.stream).parameters
    assert set(stream) == {"self", "dataset", "name", "buffer", "sinks", "discard", "semantics"}
    for kind in (*own_launchers().values(), RemoteLauncher):
        shown = inspect.signature(kind).parameters
        assert all(p.kind is not p.VAR_KEYWORD for p in shown.values()), kind
        assert {"host", "allow"} <= set(shown), kind
        if issubclass(kind, RemoteLauncher):
            assert {"grace", "place", "secure"} <= set(shown), kind


@pytest.mark.parametrize("name", ["fake", "jupyter", "kubernetes", "slurm", "spark", "ssh"])
def test_unknown_launcher_option_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'hots'"):
        base.launcher(name, {"hots": "one"})


def test_docs_name_every_extra_and_variable() -> None:
    platforms = (ROOT / "docs" / "platforms.md").read_text()
    for extra in project()["project"]["optional-dependencies"]:
        assert f"`{extra}`" in platforms, extra
    launching = (ROOT / "docs" / "launching.md").read_text()
    for name in ("JUPYTER_TOKEN", "KEEP_ALIVE", "PRELOAD", "RUNTIME_DIR", "START_METHOD"):
        assert f"| `TFD_{name}` |" in launching, name


def test_launchers_are_entry_points() -> None:
    declared = project()["project"]["entry-points"][base.ENTRY_POINTS]
    assert list(declared) == sorted(declared)
    for name, kind in own_launchers().items():
        assert issubclass(kind, base.Launcher)
        assert kind.name == name


def test_private_names_of_tensorflow_stay_in_compat() -> None:
    results = []
    for path, tree in modules(r"(tensorflow|tf)\.python|from tensorflow import .*python"):
        if path.startswith("tfd_notebook/_compat/"):
            continue
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and id(node) not in documentation:
                names = [str(node.value)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node).replace("tf.python", "tensorflow.python")]
            if any("tensorflow.python" in name for name in names):
                results.append(f"{path}:{node.lineno}")
    assert not results


#: Modules of pyspark whose documentation lists their names.
PYSPARK = (
    *("pyspark", "pyspark.cloudpickle", "pyspark.errors", "pyspark.ml", "pyspark.ml.param"),
    *("pyspark.sql", "pyspark.sql.types"),
)
#: Private attributes of pyspark's objects.
PYSPARK_ATTRIBUTES = {
    *("__fields__", "_active_spark_context", "_gateway", "_jconf", "_jdf", "_jrdd", "_jsc"),
    *("_jsparkSession", "_jvm"),
}


def private_names_of_pyspark(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each undocumented name of pyspark that `tree` uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("pyspark.") and alias.name not in PYSPARK:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyspark"):
            for alias in node.names:
                if node.module not in PYSPARK or alias.name.startswith("_"):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in PYSPARK_ATTRIBUTES:
            if ast.unparse(node.value) != "self":
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in PYSPARK_ATTRIBUTES:
            yield node.lineno, str(node.value)


def test_private_names_of_pyspark_stay_in_compat() -> None:
    matches = [
        f"{path}:{line}: {name}"
        for path, tree in modules("|".join(("pyspark", *PYSPARK_ATTRIBUTES)))
        if not path.startswith("tfd_notebook/_compat/")
        for line, name in private_names_of_pyspark(tree)
    ]
    assert not matches


@pytest.mark.parametrize(
    "code",
    [
        "from pyspark.find_spark_home import _find_spark_home",
        "from pyspark.sql.pandas.types import to_arrow_schema",
        "import pyspark.sql.pandas.types",
        "row.__fields__ = names",
        "getattr(row, '__fields__', None)",
        "context._jsc.sc()",
    ],
)
def test_private_names_of_pyspark_are_found(code: str) -> None:
    assert list(private_names_of_pyspark(ast.parse(code)))


#: Methods of a handler that run for a request or a message.
REQUEST_METHODS = {
    *("get", "post", "put", "patch", "delete", "head", "options", "open", "on_message"),
    *("prepare", "data_received"),
}


def open_handlers(tree: ast.AST) -> Iterator[str]:
    """Yield each method for requests that does not require an authenticated, authorized user."""
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef) and any("Handler" in ast.unparse(b) for b in cls.bases):
            for node in cls.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    used = {ast.unparse(decorator) for decorator in node.decorator_list}
                    if node.name in REQUEST_METHODS and not used >= {
                        "web.authenticated",
                        "authorized",
                    }:
                        yield f"{cls.name}.{node.name}"


def registered_handlers() -> set[type]:
    """Return the handlers that the server extension registers."""
    application = web.Application([], base_url="/")
    jupyter_server._load_jupyter_server_extension(SimpleNamespace(web_app=application))
    groups = (rule.target for rule in application.default_router.rules)
    return {rule.target for group in groups for rule in getattr(group, "rules", ())}


def open_methods(handler: type) -> Iterator[str]:
    """Yield what `open_handlers` yields, for a class: it finds the decorators by their code."""

    def handle(self: Any) -> None: ...

    required = [decorate(handle).__code__ for decorate in (web.authenticated, authorized)]
    for name in sorted(REQUEST_METHODS):
        method = getattr(handler, name, None)
        if method and method.__module__.partition(".")[0] not in ("jupyter_server", "tornado"):
            inner = getattr(method, "__wrapped__", None)
            if [getattr(layer, "__code__", None) for layer in (method, inner)] != required:
                yield f"{handler.__name__}.{name}"


def test_all_handlers_of_jupyter_server_require_authentication() -> None:
    handlers = registered_handlers()
    assert {handler.__name__ for handler in handlers} == {"ClustersHandler", "ClusterHandler"}
    assert [name for handler in handlers for name in open_methods(handler)] == []
    found = {
        f"{path}: {name}"
        for path, tree in modules(r"jupyter_server\.base|tornado")
        for name in open_handlers(tree)
    }
    assert found == set()


@pytest.mark.parametrize("decorators", ["", "@web.authenticated", "@authorized"])
def test_handler_without_authentication_is_found(decorators: str) -> None:
    code = f"class Clusters(APIHandler):\n    {decorators}\n    async def get(self): ..."
    assert list(open_handlers(ast.parse(code))) == ["Clusters.get"]


@pytest.mark.parametrize("name", ["get", "prepare"])
def test_registered_handler_without_authentication_is_found(name: str) -> None:
    alias = APIHandler

    async def handle(self: Any) -> None: ...

    open_class = type("Clusters", (alias,), {name: handle})
    assert list(open_methods(open_class)) == [f"Clusters.{name}"]
    closed = type("Clusters", (alias,), {"get": web.authenticated(authorized(handle))})
    assert list(open_methods(closed)) == []
    reversed_order = type("Clusters", (alias,), {"get": authorized(web.authenticated(handle))})
    assert list(open_methods(reversed_order)) == ["Clusters.get"]


def test_modules_have_limited_length() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > 700} == {}


def test_files_contain_no_machine_names() -> None:
    private = re.compile(
        r"/(?:work|root|home|opt)/[\w.]|\bpypi\.org|pythonhosted|npmjs\.|file://\S"
    )
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line) and path.name != Path(__file__).name
    ]
    assert not matches


def test_constraints_pin_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = re.compile(r"[a-z0-9][a-z0-9-]*==[\w.]+( ; .+)?")
    assert [line for line in lines if line and line[0] != "#" and not pin.fullmatch(line)] == []


@pytest.mark.parametrize(
    "kind",
    ["thread", pytest.param("process", marks=pytest.mark.slow), "port", "held port", "file"],
)
def test_leak_check_detects_each_kind(kind: str, leftovers: Callable[[], Any]) -> None:
    before = leftovers()
    before.check("the first test")
    undo = _leak(kind)
    try:
        with pytest.raises(
            pytest.fail.Exception, match=rf"the second test left behind:\s+{kind.split()[-1]}"
        ):
            before.check("the second test", settle=0)
    finally:
        undo()
    before.check("the first test")


def test_leak_check_gives_time_after_a_late_stop(
    leftovers: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, checks = threading.Event(), itertools.count()
    stopping = threading.Thread(target=release.wait, name="tfd-server-stop")
    before = leftovers()

    def left(shared: bool) -> list[str]:
        number = next(checks)
        if number == 1:
            release.set()
            stopping.join()
        return ["file"] if number < 3 else []

    monkeypatch.setattr(before, "_left", left)
    stopping.start()
    before.check("the test", settle=0)


def _leak(kind: str) -> Callable[[], object]:
    if kind == "thread":
        event = threading.Event()
        thread = threading.Thread(target=event.wait, daemon=True)
        thread.start()
        return lambda: (event.set(), thread.join())
    if kind == "process":
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        return lambda: (process.kill(), process.communicate())
    if kind == "file":
        directory = tempfile.mkdtemp()
        return lambda: os.rmdir(directory)
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    if kind == "port":
        held.listen()
    return held.close


def test_documents_teach_each_public_member_of_a_cluster() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.stem != "api"]
    taught = set(re.findall(r"\.([a-z_]+)\b", "".join(texts)))
    members = {name for name in dir(tfd_notebook.Cluster) if not name.startswith("_")}
    assert members - taught == set()
    for name in members:
        text = inspect.getdoc(getattr(tfd_notebook.Cluster, name))
        assert text
        assert "DataServiceProtocol" not in text
        assert not re.search(r"-----\n {4}", text)  # a description without its parameter
