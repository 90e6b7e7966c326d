"""Runs the cases against a server: `python -m tests.conformance http://127.0.0.1:8000`."""

from __future__ import annotations

import argparse
import os
import sys

import httpx

from tests.conformance.cases import CASES
from tests.conformance.target import NotHere, Target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Tries the API's cases on a server.")
    parser.add_argument("address", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model's id; default: the first that it lists")
    parser.add_argument("--case", type=int, action="append", help="only this number; may be given again")
    options = parser.parse_args()
    key = os.environ.get("DUETTS_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    failed = 0
    with httpx.Client(base_url=options.address, headers=headers, timeout=600, trust_env=False) as http:
        target = Target(http, options.model or http.get("/v1/models").json()["data"][0]["id"])
        with target.voice("anna"):
            for case in CASES:
                if options.case is None or case.number in options.case:
                    failed += not shown(case.number, case.what, attempt(case.number, target))
    return int(failed > 0)


def attempt(number: int, target: Target) -> str:
    """What is wrong, or why it could not be tried."""
    try:
        CASES[number - 1].check(target)
    except NotHere as reason:
        return f"not tried: {reason}"
    except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shown(number: int, what: str, wrong: str) -> bool:
    print(f"{number:3d} {'ok   ' if not wrong else 'WRONG'} {what}" + (f"\n          {wrong}" if wrong else ""), flush=True)
    return not wrong or wrong.startswith("not tried")


if __name__ == "__main__":
    sys.exit(main())
