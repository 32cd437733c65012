"""Size and habit checks over source text: each takes one file and yields what breaks a rule of the house.

What ruff, ty and the import contracts can say is said there; here is the rest.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 12
MAX_POSITIONAL = 2

MAY_COMPILE = {"execution/programs/compiled.py"}
MAY_READ_ENVIRONMENT = {"config/load.py"}
MAY_CATCH_ALL = {
    "checkpoints/transfer.py",
    "engine/loop.py",
    "fleet/serve_router.py",
    "serving/errors.py",
    "cluster/step_transport.py",
    "execution/weights/staged.py",
    "text/tokenizer.py",
    "constraints/compiler.py",
}

PURE_JAX = {"parallel", "kernels", "experts", "model", "decoding"}
THIRD_PARTIES = {
    "requests": {"numpy"},
    "config": {"numpy", "yaml"},
    "observability": {"numpy"},
    "balancing": {"numpy"},
    "scheduling": {"numpy"},
    "replay": {"numpy", "pybase64", "zstandard"},
    "text": {"numpy", "transformers", "tokenizers", "jinja2", "pyarrow"},
    "engine": {"numpy"},
    "answers": {"numpy"},
    "parallel": {"numpy", "jax"},
    "kernels": {"numpy", "jax"},
    "experts": {"numpy", "jax"},
    "model": {"numpy", "jax"},
    "decoding": {"numpy", "jax"},
}
"""What plain Python and pure JAX packages may import besides the standard library; contracts alone hold the others."""

FILLER_CLASS = re.compile(r"Manager|Handler|Helper|Utils?$|^_?Base[A-Z]|Mixin$|Info$|Misc|V\d+$")
FILLER_NAME = re.compile(r"^_?(ctx|misc|common|\w+_v\d+)$")
FILLER_MODULE = re.compile(r"^_?(utils?|helpers?|common|misc|base|managers?|handlers?|mixins?|info)$")
PRIVATE_WORDS = (
    r"telling|companions?|patien(?:t|ce)|inbox|brought|seats?|besieg\w+|strangers?|somebody|anybody|going on"
    r"|takes? leave|house|rooms?|picks?|told|nobody"
)
NOT_PLAIN = re.compile(rf"(?<![`\w])(?:{PRIVATE_WORDS})\b(?![`_(])", re.IGNORECASE)
"""Metaphors that the field has words for, in docstrings and comments."""
UNNUMBERED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!.*(#\d+|ADR[- ]?\d+))")
SILENCED = re.compile(r"#\s*(?:noqa:.*\b(?:PLC0415|BLE001|T20\d|C901)\b|ruff:\s*noqa|type:\s*ignore(?!\[))")


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the package, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """First part of the path: a package, or a module that stands alone."""
        return self.path.split("/")[0].removesuffix(".py")


Check = Callable[[Source], Iterator[str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def read_sources(package: Path) -> list[Source]:
    """Read every Python file below `package`, in the order of their paths."""
    files = sorted(package.rglob("*.py"))
    return [Source(file.relative_to(package).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def short_file(source: Source) -> Iterator[str]:
    """A file fits a few screens."""
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{num_lines} lines, more than {MAX_FILE_LINES}"


def short_function(source: Source) -> Iterator[str]:
    """A function fits one screen."""
    for node in _functions(source):
        if _num_lines(node) > MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {_num_lines(node)} lines, more than {MAX_FUNCTION_LINES}"


def small_class(source: Source) -> Iterator[str]:
    """A class has one job: few public methods."""
    for node in _classes(source):
        methods = [child for child in node.body if isinstance(child, FunctionNode)]
        num_public = len({method.name for method in methods if not method.name.startswith("_")})
        if num_public > MAX_PUBLIC_METHODS:
            yield f"{node.lineno}: class {node.name} has {num_public} public methods, more than {MAX_PUBLIC_METHODS}"


def keywords_after_two(source: Source) -> Iterator[str]:
    """A public function takes its third parameter by keyword.

    Names that Python itself calls are free, and so are the pure JAX packages, where arrays go by position.
    """
    if source.package in PURE_JAX:
        return
    for node in _functions(source):
        if node.name.startswith("_") and node.name != "__init__":
            continue
        positional = [*node.args.posonlyargs, *node.args.args]
        if positional and positional[0].arg in {"self", "cls"}:
            positional = positional[1:]
        if len(positional) > MAX_POSITIONAL and not _is_nested(node, source):
            yield f"{node.lineno}: {node.name} takes {len(positional)} positional parameters; put `*` after the second"


def keywords_at_the_call(source: Source) -> Iterator[str]:
    """A call passes keywords, never a dict that the same file prepared: that hides errors from the type checker."""
    assigned = [node for node in source.nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
    prepared = {name for node in assigned for name in _dicts(node)} - {""}
    for node in source.nodes:
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            value = keyword.value
            if keyword.arg is None and (isinstance(value, ast.Dict | ast.IfExp) or _last_name(value) in prepared):
                yield f"{node.lineno}: passes **{ast.unparse(value)}"


def documented_module(source: Source) -> Iterator[str]:
    """A file that holds anything says what it is for."""
    if source.tree.body and not ast.get_docstring(source.tree):
        yield "1: no module docstring"


def empty_init(source: Source) -> Iterator[str]:
    """A package file re-exports names; only the root one exports lazily, and calls what has to come before imports."""
    if not source.path.endswith("__init__.py"):
        return
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import | ast.Assign) or _is_docstring(node):
            continue
        is_lazy = isinstance(node, ast.Expr) or getattr(node, "name", None) in {"__getattr__", "__dir__"}
        if source.path == "__init__.py" and is_lazy:
            continue
        yield f"{node.lineno}: code in a package file"


def no_root_import(source: Source) -> Iterator[str]:
    """Nothing inside imports the root's lazy names, and the root imports nothing of ours."""
    for node in source.nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name == "rayserve_moe" or (source.path == "__init__.py" and name.startswith("rayserve_moe.")):
                yield f"{node.lineno}: imports {name}"


def compiles_in_one_place(source: Source) -> Iterator[str]:
    """Compilation happens where all shapes are listed."""
    if source.path not in MAY_COMPILE:
        yield from _uses(source, {"jit", "pjit", "pmap"}, owner="jax")


def reads_environment_in_one_place(source: Source) -> Iterator[str]:
    """Environment variables are settings, and settings are loaded in one file."""
    if source.path not in MAY_READ_ENVIRONMENT:
        yield from _uses(source, {"environ", "environb", "getenv", "putenv"}, owner="os")


def catches_by_name(source: Source) -> Iterator[str]:
    """Only the two outer loops catch everything, re-raised or not."""
    if source.path in MAY_CATCH_ALL:
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = {child.id for child in ast.walk(node.type) if isinstance(child, ast.Name)} if node.type else {""}
            if caught & {"", "Exception", "BaseException"}:
                yield f"{node.lineno}: catches everything"


def imports_are_plain(source: Source) -> Iterator[str]:
    """No import depends on who is asking: not on a type checker, not on a failure."""
    for node in source.nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield f"{node.lineno}: hides an import from the running program"
        if isinstance(node, ast.Try) and any(isinstance(child, ast.Import | ast.ImportFrom) for child in node.body):
            yield f"{node.lineno}: tries an import"


def known_third_parties(source: Source) -> Iterator[str]:
    """Plain Python and pure JAX packages import the standard library, each other, and what the architecture lists."""
    allowed = THIRD_PARTIES.get(source.package)
    if allowed is None:
        return
    for node in source.nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for top in {name.split(".")[0] for name in names}:
            if top not in allowed | {"rayserve_moe"} | sys.stdlib_module_names:
                yield f"{node.lineno}: {source.package} may not import {top}"


def no_filler(source: Source) -> Iterator[str]:
    """A name says what a thing does, in the words of the domain."""
    for part in Path(source.path).with_suffix("").parts:
        if FILLER_MODULE.match(part):
            yield f"1: a module called {part} has no single job"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and FILLER_CLASS.search(node.name):
            yield f"{node.lineno}: class {node.name} is called by a filler word"
        for name in _bound_names(node):
            if FILLER_NAME.match(name):
                yield f"{getattr(node, 'lineno', 1)}: {name} is a filler word"


def numbered_todo(source: Source) -> Iterator[str]:
    """Work left open has an issue (#12) or an ADR number beside it."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if UNNUMBERED.search(line):
            yield f"{number}: open work without an issue or ADR number"


def nothing_silenced(source: Source) -> Iterator[str]:
    """A rule of the house is not switched off in place."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if SILENCED.search(line):
            yield f"{number}: switches off a rule of the house"


def plain_english(source: Source) -> Iterator[str]:
    """Docstrings and comments use the words of the field."""
    docstrings = [(node.lineno, node.value.value) for node in source.nodes if _is_docstring(node)]
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in [*docstrings, *comments]:
        for found in NOT_PLAIN.finditer(" ".join(text.split())):
            yield f"{line}: says {found[0]!r}: take the field's word"


CHECKS: dict[str, Check] = {
    "short_file": short_file,
    "short_function": short_function,
    "small_class": small_class,
    "keywords_after_two": keywords_after_two,
    "keywords_at_the_call": keywords_at_the_call,
    "documented_module": documented_module,
    "empty_init": empty_init,
    "no_root_import": no_root_import,
    "compiles_in_one_place": compiles_in_one_place,
    "reads_environment_in_one_place": reads_environment_in_one_place,
    "catches_by_name": catches_by_name,
    "imports_are_plain": imports_are_plain,
    "known_third_parties": known_third_parties,
    "no_filler": no_filler,
    "numbered_todo": numbered_todo,
    "nothing_silenced": nothing_silenced,
    "plain_english": plain_english,
}


def _dicts(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Names that an assignment gives a dict which it makes."""
    value = node.value
    choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    is_made = any(isinstance(choice, ast.Dict | ast.DictComp) or _is_dict_call(choice) for choice in choices)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [_last_name(target) for target in targets] if is_made else []


def _is_dict_call(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _functions(source: Source) -> list[FunctionNode]:
    return [node for node in source.nodes if isinstance(node, FunctionNode)]


def _classes(source: Source) -> list[ast.ClassDef]:
    return [node for node in source.nodes if isinstance(node, ast.ClassDef)]


def _num_lines(node: FunctionNode | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_nested(node: FunctionNode, source: Source) -> bool:
    return any(node in ast.walk(outer) for outer in _functions(source) if outer is not node)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _uses(source: Source, names: set[str], *, owner: str) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{node.lineno}: uses .{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == owner:
            for alias in node.names:
                if alias.name in names:
                    yield f"{node.lineno}: imports {alias.name}"


def _bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return [node.name] if isinstance(node, FunctionNode) else []
