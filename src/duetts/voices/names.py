"""Names of voices: keys, never paths. Which strings are names, when two are the same, and the folder of one. No files."""

from __future__ import annotations

import hashlib
import re
import unicodedata

from duetts.errors import InvalidRequest

MAX_NAME_CHARS = 64
RESERVED_NAMES = {"default", "none", "auto"}
GENERATED_NAME = re.compile(r"seed[-:][0-9]")  # how the names of clips that the model spoke itself begin
FOLDER_NAME = re.compile(r"(?:[a-z0-9-]{1,32}-)?[0-9a-f]{32}")


def clean_name(name: str) -> str:
    """A name as it is shown. Raises `InvalidRequest` for what is no name or is reserved."""
    problem = name_problem(name)
    if problem:
        raise InvalidRequest(f"name {problem}", field="name")
    shown = _shown(name)
    if name_key(shown) in RESERVED_NAMES or GENERATED_NAME.match(name_key(shown)):
        raise InvalidRequest(f"name {shown!r} is reserved; choose another", field="name")
    return shown


def name_key(name: str) -> str:
    """What is equal for all spellings of one name: Unicode's compatibility forms and cases folded."""
    folded = unicodedata.normalize("NFKC", _shown(name)).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def folder_name(name: str) -> str:
    """Readable as far as it is plain ASCII, and the hash of the key: nothing that a user writes can lead elsewhere."""
    key = name_key(name)
    readable = re.sub(r"[^a-z0-9]+", "-", key)[:32].strip("-")
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{readable}-{digest}" if readable else digest


def _shown(name: str) -> str:
    spaced = "".join(" " if unicodedata.category(character) == "Zs" else character for character in name[: 4 * MAX_NAME_CHARS])
    return unicodedata.normalize("NFC", " ".join(word for word in spaced.split(" ") if word))


def name_problem(name: str) -> str:
    """What is wrong with a name, if anything is."""
    shown = _shown(name)
    if not shown:
        return "is empty"
    if len(shown) > MAX_NAME_CHARS or len(name) > 4 * MAX_NAME_CHARS:
        return f"has more than {MAX_NAME_CHARS} characters"
    if "/" in shown or "\\" in shown or not shown.isprintable():
        return "must not hold slashes, backslashes, or characters that do not print"
    if not any(character.isalnum() for character in name_key(shown)):
        return "has no letter and no digit"
    return ""
