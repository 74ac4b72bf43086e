"""The `sandhi` command: check, build, verify, report, schema; serve and render are of sandhi_core.serving.cli.

Standard output carries the answer (with --json, one JSON document); progress and problems go to standard error.
Exit status: 0 sound, 1 something is wrong with the models or the result, 2 the command or pool file is wrong, 130
stopped by Ctrl-C or SIGTERM.
"""

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from pipelines.settings import default_root
from sandhi_core.answering import ENDINGS, deliver, failure, signal_noted
from sandhi_core.errors import UsageError
from sandhi_core.serving import cli as serving
from sandhi_core.verification.arguments import add_arguments

COMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "say what is wrong with a pool and what building it would cost",
        "sandhi check pools/demo.yaml",
    ),
    "build": (
        "run every stage that is stale, as the Dagster jobs do",
        "sandhi build pools/demo.yaml --dry-run",
    ),
    "verify": (
        "hold exports to their manifests and deployments, and measure the servers that serve them",
        "sandhi verify .sandhi/exports/demo/4f0c... --engine transformers",
    ),
    "report": ("write the report of a pool that was built", "sandhi report pools/demo.yaml"),
    "schema": ("print the JSON schema of pool files", "sandhi schema > pool.schema.json"),
}


_POOL_HELP = {"report": "pool file (YAML), or a directory of them"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see `{self.prog} --help`")


def _versions() -> str:
    """This package and those that decide the bytes it writes, as installed; none of them is imported."""
    beside = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
    return f"sandhi {version('sandhi')} ({beside})"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sandhi", description="Serve many fine-tuned language models from shared weights.")
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    added = {}
    for name, (text, example) in COMMANDS.items():
        added[name] = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
    for name, (text, _) in serving.COMMANDS.items():  # listed here; `main` hands them over
        commands.add_parser(name, help=text)
    for name in ("check", "build", "report"):
        added[name].add_argument("pool", type=Path, help=_POOL_HELP.get(name, "pool file (YAML)"))
        added[name].add_argument(
            "--root",
            type=Path,
            default=None,
            help="artifact root (default: SANDHI_HOME, or .sandhi in the checkout)",
        )
    for name in ("check", "build", "verify", "report"):
        added[name].add_argument("--json", action="store_true", help="one JSON document on standard output")
    added["build"].add_argument(
        "--dry-run", action="store_true", help="say what is stale and what it costs; run nothing"
    )
    added["build"].add_argument(
        "--regroup", action="store_true", help="form the groups anew, as the nightly rebuild does"
    )
    add_arguments(added["verify"])
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status. Expected failures print one line each, never a traceback."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in serving.COMMANDS:
        return serving.main(given)
    if argv is not None:
        return deliver(*_answered(argv, stopped=lambda: False), None)
    answer = os.dup(1)
    # Standard output is for the answer alone: what libraries and task modules print goes to standard error.
    os.dup2(2, 1)
    try:
        text, status = _answered(sys.argv[1:], stopped=signal_noted(), terminal=os.isatty(answer))
        sys.stdout.flush()
        return deliver(text, status, answer)
    finally:
        os.close(answer)


class _Page(io.StringIO):
    """What is printed for people; coloured where a terminal will show it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def _answered(argv: list[str], stopped: Callable[[], bool], terminal: bool = False) -> tuple[str, int]:
    """What a command answers, and its exit status."""
    page, wants_json = _Page(terminal), "--json" in argv
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)  # one that came while modules were imported lands here
        with redirect_stdout(page):
            arguments = _parser().parse_args(argv)
            document, status = _COMMANDS[arguments.command](arguments, _root(arguments))
        if document is None:
            return page.getvalue(), status
        sys.stderr.write(page.getvalue())  # not ours: a task's module may print
        return _json(document), status
    except SystemExit:  # --help, --version
        return page.getvalue(), 0
    except (Exception, KeyboardInterrupt) as error:
        problems, status = failure(error, stopped())
        for problem in problems:
            print(problem.line(), file=sys.stderr)
        found = {"ok": False, "problems": [p.model_dump(mode="json") for p in problems]}
        return (_json(found) if wants_json else ""), status


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _root(arguments: argparse.Namespace) -> Path:
    given = getattr(arguments, "root", None)
    try:
        return (given or default_root()).expanduser().resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(f"--root {str(given)!r} is no usable path: {error}", remedy="name a directory") from None


# Commands import what they need when they run: `sandhi --help` and `sandhi schema` should not wait for torch.


def _schema(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from sandhi_core.pool import json_schema

    return json_schema(), 0


def _check(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from pipelines.checking import check
    from sandhi_core.report.text import print_check

    document = check(arguments.pool, root)
    if not arguments.json:
        print_check(document)
    return (document if arguments.json else None), (0 if document["ok"] else 1)


def _build(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from pipelines.building import build_pool, dry_run
    from sandhi_core.report.text import print_build, print_dry_run

    if arguments.dry_run:
        document = dry_run(arguments.pool, root, regroup=arguments.regroup)
    else:
        document = build_pool(arguments.pool, root, regroup=arguments.regroup)
    if not arguments.json:
        (print_dry_run if arguments.dry_run else print_build)(document)
    return (document if arguments.json else None), (0 if document["ok"] else 1)


def _verify(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from sandhi_core.verification.exports import verify_all
    from sandhi_core.verification.told import tell

    document, tables = verify_all(arguments)
    if not arguments.json:
        for table in tables:
            tell(table)
    return (document if arguments.json else None), (0 if document["ok"] else 1)


def _report(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from pipelines.reporting import report

    paths, problems = report(arguments.pool, root)
    for problem in problems:
        print(problem.line(), file=sys.stderr)
    found = [p.model_dump(mode="json") for p in problems]
    document = {"ok": not problems, "problems": found, "reports": [str(path) for path in paths]}
    if not arguments.json:
        print("".join(f"{path}\n" for path in paths), end="")
    return (document if arguments.json else None), (0 if document["ok"] else 1)


_COMMANDS = {"schema": _schema, "check": _check, "build": _build, "verify": _verify, "report": _report}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
