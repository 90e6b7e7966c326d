"""Recipes for readers: as text and as Markdown, with the parts of the public recipe page in its order."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

ABOUT = "A dual-AR text-to-speech model behind OpenAI's /v1/audio/speech: 44.1 kHz mono speech, with voice cloning."


def _rendered(recipe: Mapping[str, Any], docker: bool, markdown: bool) -> str:
    chosen, serve, estimates = recipe["configuration"], recipe["serve"], recipe["estimates"]
    query = "&".join(f"{name}={chosen[name]}" for name in ("hardware", "variant", "task", "goal"))
    flags = " ".join(f"--{name} {chosen[name]}" for name in ("hardware", "variant", "task", "goal"))
    count = f"--gpus {chosen['gpu_count']}"

    def head(text: str) -> str:
        return f"## {text}" if markdown else f"{text}\n{'-' * len(text)}"

    def code(command: str) -> str:
        return f"```bash\n{command}\n```" if markdown else textwrap.indent(command, "    ")

    def listed(rows: list[str]) -> str:
        return "\n".join(f"- {row}" for row in rows)

    options = [f"{name}: {', '.join(values)}" for name, values in recipe["options"].items()]
    command = serve["docker_command"] if docker else serve["command"].replace(" --", " \\\n  --")
    parts = [
        f"# {recipe['model']['id']}: recipe of duetts" if markdown else f"{recipe['model']['id']}: recipe of duetts",
        ABOUT,
        f"Configuration: hardware {chosen['hardware']} ({chosen['gpu_count']} x {chosen['gpu_name']}), "
        f"variant {chosen['variant']} ({chosen['precision']}), task {chosen['task']}, goal {chosen['goal']}",
        listed([f"note: {warning}" for warning in recipe["warnings"]]),
        f"As JSON: GET /v1/recipe?{query}&gpus={chosen['gpu_count']} of a running server, or",
        code(f"duetts recipe {recipe['model']['id']} {flags} {count} --format json"),
        head("Other configurations"),
        listed(options),
        head("Install"),
        *(f"{step['note']}:\n\n{code(step['command'])}" for step in recipe["install"]),
        head("Serve"),
        code(command),
        listed([f"{flag}: {reason}." for flag, reason in serve["reasons"].items()]),
        head("What to expect"),
        listed([f"{name}: {value}" for name, value in estimates.items() if value is not None]),
        head("Check"),
        *(f"{step['note']}:\n\n{code(step['command'])}" for step in recipe["verify"]),
        head("Ask"),
        *(code(example["curl"]) for example in recipe["examples"]),
        head("Guide"),
        "Background; what stands under Serve wins over it.",
        recipe["guide_md"].strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _argv(recipe: Mapping[str, Any], docker: bool) -> str:
    """A word a line."""
    return "".join(f"{word}\n" for word in recipe["serve"]["docker_argv" if docker else "argv"])


FORMS: dict[str, Callable[[Mapping[str, Any], bool], str]] = {
    "text": partial(_rendered, markdown=False),
    "json": lambda recipe, docker: json.dumps(recipe, indent=2, ensure_ascii=False) + "\n",
    "argv": _argv,
    "md": partial(_rendered, markdown=True),
}
