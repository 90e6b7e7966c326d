"""What a machine can check of how the package is written: who imports whom, sizes, and calls that have one place."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

from .source import PACKAGE, ROOT, Module, read_package

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES = 159  # 60 was drawn for the first version; the limit on lines below is the one that keeps it readable
MAX_LINES = 28_100
MAX_DEPENDENCIES = 20
MAX_BROAD_FILES = 3

WORDS = {"errors", "types"}
SETTINGS = {"config", "json_fields", "model_config", *WORDS}
# Room -> rooms that it may import besides itself. A room that is not here needs a line here.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "cores": set(),
    "service": WORDS,
    "config": {"cores", *WORDS},
    "settings": {"config", *WORDS},
    "machine": {"config"},
    "deploy": {"settings", "machine", *SETTINGS},
    "json_fields": WORDS,
    "model_config": {"json_fields", *WORDS},
    "habits": {"model_config", "json_fields", *WORDS},
    "kernels": set(),
    "audio": WORDS,
    "attention": {"kernels", "config", *WORDS},
    "text": SETTINGS,
    "models": {"kernels", "config", "model_config", "types"},
    "checkpoint_files": SETTINGS,
    "checkpoint": {"checkpoint_files", "models", *SETTINGS},
    "embedded": {"checkpoint", "models", "text", *SETTINGS},
    "voices": {"audio", "cores", *SETTINGS},
    "engine": {"models", "kernels", "attention", "checkpoint", "cores", *SETTINGS},
    "narration": {"engine", "text", *WORDS},
    "synthesizer": {"service", "narration", "engine", "text", "voices", "habits", *SETTINGS},
    "tts": {"synthesizer", "engine", "checkpoint", "embedded", "audio", *SETTINGS},
    "server": {"audio", "recipe", "config", "service", *WORDS},
    "serving": {"server", "synthesizer", "engine", *SETTINGS},
    "logs": {"config", "errors"},
    "workers": {"serving", "server", "synthesizer", "service", "engine", "logs", *SETTINGS},
    "roofline": set(),
    "recipe": {"deploy", "settings", "machine", "roofline", "config", "errors"},
    "conditions": set(),
    "bench": {"roofline", "conditions", "errors"},
    "parts_bench": {"roofline", "conditions", "engine", "models", "checkpoint", *SETTINGS},
    "cluster": {"serving", "server", "synthesizer", "deploy", "settings", "config", "errors"},
    "doctor": {
        "tts", "synthesizer", "engine", "voices", "embedded", "checkpoint", "checkpoint_files", "models", "kernels",
        "attention", "text", "audio", "cores", *SETTINGS,
    },
}  # fmt: skip
ANYTHING = {"cli", "cli_bench", "cli_voices", "__main__", "__init__"}

LATE_IMPORTS = {"attention/fish_kvcache_attn.py", "cli.py", "cli_bench.py", "cli_voices.py", "kernels/__init__.py",
                "cluster/__init__.py", "__init__.py"}  # fmt: skip
LITERAL_NAMES = {"checkpoint.py", "__init__.py"}
GLOBAL_SEEDS = {"torch.manual_seed", "torch.seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "random.seed",
                "np.random.seed", "numpy.random.seed"}  # fmt: skip

MODULES = read_package()


def wrong_imports(modules: list[Module]) -> list[str]:
    known = frozenset(module.name for module in modules)
    found = []
    for module in modules:
        if module.room in ANYTHING:
            continue
        if module.room not in MAY_IMPORT:
            found.append(f"{module.path}: the room {module.room} has no line in MAY_IMPORT")
            continue
        for name in sorted(module.imports(known) - {ROOT}):
            room = name.split(".")[1]
            if room != module.room and room not in MAY_IMPORT[module.room]:
                found.append(f"{module.path}: {module.room} may not import {name}")
    return found


def cycle(modules: list[Module]) -> list[str]:
    """The modules of a cycle, if there is one. The package's own `__init__` is a door that loads nothing by itself."""
    known = frozenset(module.name for module in modules)
    graph = {module.name: module.imports(known) - {ROOT} for module in modules if module.name != ROOT}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def long_files(modules: list[Module]) -> list[str]:
    return [f"{m.path}: {m.num_lines} lines" for m in modules if m.num_lines > MAX_FILE_LINES]


def long_functions(modules: list[Module]) -> list[str]:
    sizes = [(module.path, f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for module in modules for f in module.functions()]
    return [f"{path}: {name} has {lines} lines" for path, name, lines in sizes if lines > MAX_FUNCTION_LINES]


def environment_readers(modules: list[Module]) -> list[str]:
    names = {"environ", "environb", "getenv", "putenv"}
    found = set()
    for module in modules:
        for node in ast.walk(module.tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            name = isinstance(node, ast.ImportFrom) and node.module == "os" and any(n.name in names for n in node.names)
            if attribute or name:
                found.add(module.path)
    return sorted(found)


def broad_handlers(modules: list[Module]) -> list[str]:
    found = set()
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                    found.add(module.path)
    return sorted(found)


def literal_names(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{call.lineno}: {ast.unparse(call)}"
        for module in modules
        for call in module.calls()
        if ast.unparse(call.func) in ("getattr", "hasattr", "setattr")
        and len(call.args) > 1
        and isinstance(call.args[1], ast.Constant)
    ]


def global_effects(modules: list[Module]) -> list[str]:
    """Prints, emptied caches and global seeds. A generator of one's own may be seeded."""
    found = []
    for module in modules:
        for call in module.calls():
            name = ast.unparse(call.func)
            if name == "print" or name.endswith("empty_cache") or name in GLOBAL_SEEDS:
                found.append(f"{module.path}:{call.lineno}: {name}")
    return found


def late_imports(modules: list[Module]) -> list[str]:
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node)}"
        for module in modules
        for function in module.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def outside(paths: set[str]) -> list[Module]:
    return [module for module in MODULES if module.path not in paths]


def test_the_package_was_found() -> None:
    assert {"errors.py", "types.py", "config.py", "text/rules.py"} <= {module.path for module in MODULES}


def test_imports_follow_the_table() -> None:
    assert wrong_imports(MODULES) == []


def test_the_table_itself_points_one_way() -> None:
    assert list(TopologicalSorter(MAY_IMPORT).static_order())


def test_no_cycle() -> None:
    assert cycle(MODULES) == []


def test_files_are_short() -> None:
    assert long_files(MODULES) == []


def test_functions_are_short() -> None:
    assert long_functions(MODULES) == []


def test_the_environment_is_read_in_one_file() -> None:
    assert set(environment_readers(MODULES)) <= {"config.py"}


def test_few_files_catch_everything() -> None:
    assert len(broad_handlers(MODULES)) <= MAX_BROAD_FILES, broad_handlers(MODULES)


def test_attributes_are_not_looked_up_by_literal_name() -> None:
    assert literal_names(outside(LITERAL_NAMES)) == []


def test_no_prints_emptied_caches_or_global_seeds() -> None:
    assert global_effects(outside({"cli.py"})) == []


def test_imports_stand_at_the_top() -> None:
    assert late_imports(outside(LATE_IMPORTS)) == []


def test_size_of_the_package() -> None:
    counted = [m.path for m in MODULES if not m.path.endswith(("__init__.py", "__main__.py"))]
    assert len(counted) <= MAX_MODULES
    assert sum(module.num_lines for module in MODULES) <= MAX_LINES


def test_number_of_dependencies() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert 0 < len(project["dependencies"]) <= MAX_DEPENDENCIES


def test_server_and_text_side_load_no_torch() -> None:
    rooms = ("synthesizer", "server", "serving", "workers", "logs", "text", "voices", "audio", "config", "model_config",
             "conditions", "bench")  # fmt: skip
    # The server's end of the socket, and the engine's end but for the engine itself.
    ends = ("wire", "routing", "link", "supervisor", "visitor", "remote", "host", "life", "null", "codec_service",
            "remote_codec")  # fmt: skip
    names = [m.name for m in MODULES if m.room in rooms or m.name in {f"{ROOT}.engine.{end}" for end in ends}]
    names.remove(f"{ROOT}.bench.plot")  # needs a library that is no dependency
    assert len(names) > len(rooms) + len(ends)
    program = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


OFFENDERS = {
    "text/prompt.py": "from duetts.engine import runner\n",
    "engine/runner.py": "from ..text.prompt import x\nimport duetts.server.app\n",
    "errors.py": "x = 1\n" * 401,
    "novel.py": "",
    "types.py": "def f():\n" + "    x = 1\n" * 60,
    "cluster.py": "import os\nos.environ['a']\n",
    "bench.py": "from os import getenv\n",
    "audio/a.py": "try:\n    x\nexcept (ValueError, Exception):\n    pass\n",
    "audio/b.py": "try:\n    x\nexcept:\n    pass\n",
    "audio/c.py": "getattr(x, 'y')\ngetattr(x, y)\nhasattr(x, 'y')\n",
    "audio/d.py": "print(1)\ntorch.cuda.empty_cache()\ntorch.manual_seed(1)\ntorch.Generator().manual_seed(1)\n",
    "audio/e.py": "def f():\n    import json\n",
}


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (wrong_imports, ["engine/runner.py", "engine/runner.py", "novel.py", "text/prompt.py"]),
        (long_files, ["errors.py"]),
        (long_functions, ["types.py"]),
        (environment_readers, ["bench.py", "cluster.py"]),
        (broad_handlers, ["audio/a.py", "audio/b.py"]),
        (literal_names, ["audio/c.py"] * 2),
        (global_effects, ["audio/d.py"] * 3),
        (late_imports, ["audio/e.py"]),
    ],
)
def test_each_check_finds_its_offenders(check: Callable[[list[Module]], list[str]], expected: list[str]) -> None:
    found = [entry.split(":")[0] for entry in check([Module.parse(path, text) for path, text in OFFENDERS.items()])]
    assert sorted(found) == sorted(expected)


def test_a_cycle_is_found() -> None:
    modules = [Module.parse(path, text) for path, text in OFFENDERS.items()]
    assert set(cycle(modules)) == {"duetts.engine.runner", "duetts.text.prompt"}
