"""What `ast` says about the package's source: modules, their imports, and calls by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "duetts"
ROOT = PACKAGE.name

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, its path below the package, its lines and its tree."""

    name: str
    path: str
    num_lines: int
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Module:
        parts = [ROOT, *Path(path).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return cls(name, path, len(text.splitlines()), ast.parse(text))

    @property
    def room(self) -> str:
        """The folder or file directly below the package; `__init__` for the package itself."""
        return Path(self.path).parts[0].removesuffix(".py")

    @property
    def is_package(self) -> bool:
        return Path(self.path).name == "__init__.py"

    def functions(self) -> Iterator[Function]:
        yield from (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def calls(self) -> Iterator[ast.Call]:
        yield from (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def imports(self, known: frozenset[str]) -> set[str]:
        """The modules of this package that are imported anywhere in the file, under `TYPE_CHECKING` and in functions too."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                submodules = {f"{base}.{name.name}" for name in node.names}
                found.update((submodules & known) or {base})
        return {name for name in found if name == ROOT or name.startswith(ROOT + ".")} - {self.name}

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


def read_package() -> list[Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [Module.parse(file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8")) for file in files]
