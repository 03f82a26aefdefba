"""Readers of the texts that the language rules apply to, by type of file."""

from __future__ import annotations

import ast
import bisect
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Text(NamedTuple):
    """A piece of text with the place it comes from."""

    path: str
    kind: str  # "docstring", "comment", "string", "prose", "heading"
    text: str
    lines: tuple[int, ...]  # line number of each line of the text
    owner: str = ""  # of docstrings: "module", "class", "function", "property", "test"
    source: tuple[str, ...] = ()  # of strings: the lines of the file

    def line_at(self, offset: int, phrase: str = "") -> int:
        """Return the line number in the file of a phrase at an offset in the text."""
        if self.source:
            # The lines of a literal are not those of its text.
            pairs = zip(self.lines, self.source, strict=True)
            return next((number for number, line in pairs if phrase in line), self.lines[0])
        return self.lines[min(self.text.count("\n", 0, offset), len(self.lines) - 1)]


_CODE = re.compile(r"``.+?``|`[^`\n]+`", re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """Replace code by a placeholder of the same lines."""
    return "CODE" + "\n" * match[0].count("\n")


def _comments(source: str, name: str) -> Iterator[Text]:
    """Yield the comments of Python source; comments in adjacent lines are one text."""
    block: list[tuple[int, str]] = []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#:! ").rstrip()
        if re.match(r"(?:noqa|type:|pragma|ruff:|mypy:|fmt:|%)", text):
            continue
        text = re.sub(r"\s*#\s*(?:noqa|type:|pragma).*", "", text)
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and block[-1][0] == token.start[0] - 1):
            yield _block(block, name)
            block = []
        block.append((token.start[0], text))
        if not alone:
            yield _block(block, name)
            block = []
    if block:
        yield _block(block, name)


def _block(block: list[tuple[int, str]], name: str) -> Text:
    text = "\n".join(line for _, line in block)
    numbers = tuple(number for number, _ in block)
    return Text(name, "comment", _CODE.sub(_blank, text), numbers)


def python_texts(source: str, name: str) -> Iterator[Text]:
    """Yield docstrings, comments and, in the package, the messages of Python source."""
    tree = ast.parse(source)
    yield from _comments(source, name)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if not (
                body
                and isinstance(body[0], ast.Expr)
                and isinstance(body[0].value, ast.Constant)
                and isinstance(body[0].value.value, str)
            ):
                continue
            constant = body[0].value
            docstrings.add(id(constant))
            yield _docstring(constant, _owner(node), name)
    if name.startswith("tfd_notebook/"):
        yield from _strings(tree, source, docstrings, name)


def _owner(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
    if "property" in decorators or ".setter" in decorators:
        return "property"
    if node.name.startswith("test_") or "fixture" in decorators:
        return "test"
    return "function"


def _docstring(constant: ast.Constant, owner: str, name: str) -> Text:
    lines = constant.value.expandtabs().split("\n")
    kept = []
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        stripped = line.strip()
        if stripped.startswith((">>>", "...", "$ ", "%")) or re.fullmatch(r"-{3,}", stripped):
            stripped = ""
        elif index and following.strip() and _ends_item(line, following):
            stripped += " ¶"
        kept.append(stripped)
    text = _CODE.sub(_blank, "\n".join(kept))
    count = len(lines)
    start = constant.lineno if count == 1 else (constant.end_lineno or constant.lineno) - count + 1
    return Text(name, "docstring", text, tuple(range(start, start + count)), owner)


def _ends_item(line: str, following: str) -> bool:
    """Return True if a line of a docstring ends a parameter's name and type, or a list item."""
    if re.match(r"\s*[\w*]+(?:, [\w*]+)* : \S", line):
        return True
    if re.match(r"\s*[│├└]", following):
        return True
    indent = len(following) - len(following.lstrip())
    mine = len(line) - len(line.lstrip())
    if re.match(r"(?:[-*]|\d+\.)\s", following.lstrip()) or indent < mine:
        return True
    return indent > mine and not re.match(r"(?:[-*]|\d+\.)\s", line.lstrip())


def _strings(tree: ast.AST, source: str, skip: set[int], name: str) -> Iterator[Text]:
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(value) for value in node.values)
    for node in ast.walk(tree):
        if id(node) in skip or id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                value.value if isinstance(value, ast.Constant) else "CODE" for value in node.values
            )
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) < 3 or " " not in text.strip():
            continue
        text = _CODE.sub(_blank, text)
        numbers = tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = source.split("\n")[numbers[0] - 1 : numbers[-1]]
        yield Text(name, "string", text, numbers, source=tuple(lines))


def markdown_texts(source: str, name: str, numbers: list[int] | None = None) -> Iterator[Text]:
    """Yield the paragraphs, list items, table cells and headings of Markdown."""
    lines = source.split("\n")
    if numbers is None:
        numbers = list(range(1, len(lines) + 1))
    fence = ""
    block: list[tuple[int, str]] = []

    def text() -> Iterator[Text]:
        if block:
            joined = "\n".join(line for _, line in block)
            yield Text(name, "prose", _plain(joined), tuple(number for number, _ in block))
            block.clear()

    for number, line in zip(numbers, lines, strict=False):
        mark = re.match(r"\s*(```+|~~~+|:::+)", line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
            continue
        if mark and not mark[1].startswith(":"):
            yield from text()
            fence = mark[1]
        elif line.startswith("#"):
            yield from text()
            yield Text(name, "heading", _plain(line.lstrip("# ")), (number,))
        elif line.lstrip().startswith("|"):
            yield from text()
            for cell in line.strip().strip("|").split("|"):
                kind = "cell" if len(cell.split()) > 4 else "heading"
                yield Text(name, kind, _plain(cell.strip()), (number,))
        elif re.fullmatch(r"\s*|\s*<.*|\([\w-]+\)=", line):  # the last one is a target of links
            yield from text()
        else:
            if re.match(r"\s*(?:[-*+]|\d+\.)\s", line):
                yield from text()
            block.append((number, re.sub(r"^\s*(?:[-*+>]|\d+\.)\s+", "", line).strip()))
    yield from text()


def _plain(text: str) -> str:
    text = _CODE.sub(_blank, text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"[*]{1,2}|<[^>]+>", "", text)


def notebook_texts(source: str, name: str) -> Iterator[Text]:
    """Yield the Markdown and the comments of code of a notebook."""
    for kind, text, numbers in _cells(source):
        if kind == "markdown":
            yield from markdown_texts(text, name, numbers)
        elif kind == "code":
            for comment in _comments(text, name):
                yield comment._replace(lines=tuple(numbers[n - 1] for n in comment.lines))


def notebook_code(source: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the Python source of each code cell, and the numbers of its lines in the file."""
    for kind, text, numbers in _cells(source):
        if kind == "code":
            yield text, numbers


#: A magic or a command of the shell in a code cell, which is not Python.
_MAGIC = re.compile(r"^(\s*(?:\w+ = )?)[%!].*", re.MULTILINE)


def _cells(source: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield type, text without magics, and numbers of the lines in the file, of each cell."""
    raw = source.split("\n")
    position = 0
    for cell in json.loads(source)["cells"]:
        numbers = []
        content = cell["source"]
        pieces = content.splitlines(keepends=True) if isinstance(content, str) else content
        for piece in pieces:
            encoded = json.dumps(piece, ensure_ascii=False)
            ascii_encoded = json.dumps(piece)
            for index in range(position, len(raw)):
                if raw[index].strip().rstrip(",") in (encoded, ascii_encoded):
                    position = index + 1
                    break
            numbers.append(position)
        kind, text = cell["cell_type"], "".join(pieces)
        yield kind, _MAGIC.sub(r"\1None", text) if kind == "code" else text, numbers


_TYPESCRIPT = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)""",
    re.DOTALL,
)


def typescript_texts(source: str, name: str) -> Iterator[Text]:
    """Yield the comments and the string literals of TypeScript."""
    block: list[tuple[int, str]] = []
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    for match in _TYPESCRIPT.finditer(source):
        line = bisect.bisect_right(starts, match.start())
        if match["string"] is not None:
            text = re.sub(r"\$\{[^}]*\}", "CODE", match["string"][1:-1])
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text.strip():
                yield Text(name, "string", text, tuple(range(line, line + text.count("\n") + 1)))
            continue
        comment = match["comment"]
        if comment.startswith("//"):
            alone = not source[starts[line - 1] : match.start()].strip()
            if block and not (alone and block[-1][0] == line - 1):
                yield _block(block, name)
                block = []
            block.append((line, comment.lstrip("/ ").rstrip()))
        else:
            lines = [part.strip().lstrip("/* ").rstrip("/* ") for part in comment.split("\n")]
            yield _block([(line + index, part) for index, part in enumerate(lines)], name)
    if block:
        yield _block(block, name)


def css_texts(source: str, name: str) -> Iterator[Text]:
    """Yield the comments of CSS."""
    for text in typescript_texts(source, name):
        if text.kind == "comment":
            yield text


def hash_texts(source: str, name: str) -> Iterator[Text]:
    """Yield the comments of a Makefile, a shell script or TOML."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(source.split("\n"), 1):
        match = re.match(r"(\s*)#+(?!!)\s?(.*)|.*?\s#\s+(.*)", line)
        if not match or match[2] is None:
            if block:
                yield _block(block, name)
                block = []
            if match:
                yield _block([(number, match[3])], name)
        else:
            block.append((number, match[2]))
    if block:
        yield _block(block, name)


def json_texts(source: str, name: str) -> Iterator[Text]:
    """Yield the titles and descriptions of a JSON schema or a package."""
    for number, line in enumerate(source.split("\n"), 1):
        match = re.match(
            r'\s*"[\w.:-]*(?:title|description|label|caption)": ("(?:\\.|[^"])*")', line
        )
        if match:
            yield Text(name, "string", _CODE.sub(_blank, json.loads(match[1])), (number,))


READERS: dict[str, Callable[[str, str], Iterator[Text]]] = {
    ".py": python_texts,
    ".md": markdown_texts,
    ".ipynb": notebook_texts,
    ".ts": typescript_texts,
    ".mjs": typescript_texts,
    ".mts": typescript_texts,
    ".css": css_texts,
    ".json": json_texts,
    ".toml": hash_texts,
    "Makefile": hash_texts,
    ".ci/run": hash_texts,
}


def _reader(name: str) -> Callable[[str, str], Iterator[Text]] | None:
    return READERS.get(name) or READERS.get(Path(name).suffix)


def files(paths: Iterable[str]) -> Iterator[str]:
    """Yield the files under the paths that the rules apply to, relative to the root."""
    for given in paths:
        path = ROOT / given
        if path.is_symlink():
            continue
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            built = re.search(
                r"(?:^|/)(?:node_modules|static|_build|__pycache__|\.ipynb_checkpoints)/"
                r"|^tfd_notebook/labextension/",
                name,
            )
            if _reader(name) and file.is_file() and not file.is_symlink() and not built:
                yield name


def texts(name: str) -> Iterator[Text]:
    """Yield the texts of a file that the rules apply to."""
    reader = _reader(name)
    assert reader is not None, f"{name}: no reader for this type of file"
    yield from reader((ROOT / name).read_text("utf-8"), name)
