"""The `sandhi` command: check, build, verify, report, schema.

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
from pathlib import Path
from typing import Any, NoReturn

from pipelines.settings import default_root
from sandhi_core.errors import PreflightError, SandhiError, UsageError

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
        "hold an export to its manifest and deployment",
        "sandhi verify .sandhi/exports/demo/4f0c... --memory",
    ),
    "report": ("write the report of a pool that was built", "sandhi report pools/demo.yaml"),
    "schema": ("print the JSON schema of pool files", "sandhi schema > pool.schema.json"),
}


_POOL_HELP = {"report": "pool file (YAML), or a directory of them"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sandhi", description="Serve many fine-tuned language models from shared weights.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    added = {}
    for name, (text, example) in COMMANDS.items():
        added[name] = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
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
    added["verify"].add_argument("export", type=Path, help="directory that holds sandhi.json")
    added["verify"].add_argument(
        "--memory", action="store_true", help="also start processes and measure what they share"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status. Expected failures print one line each, never a traceback."""
    if argv is not None:
        text, status = _answered(argv, stopped=lambda: False)
        return _deliver(text, status, None)
    answer = os.dup(1)
    # Standard output is for the answer alone: what libraries and task modules print goes to standard error.
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        text, status = _answered(None, stopped=_signal_noted())
        sys.stdout.flush()
        return _deliver(text, status, answer)
    finally:
        os.close(answer)


def _signal_noted() -> Callable[[], bool]:
    """Tells whether SIGINT or SIGTERM has come, whoever handled it: where it lands inside a library it may come
    out as that library's own failure."""
    arrived, noted = os.pipe()
    os.set_blocking(arrived, False)
    os.set_blocking(noted, False)
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)

    def stopped() -> bool:
        try:
            return bool({signal.SIGINT, signal.SIGTERM} & set(os.read(arrived, 4096)))
        except BlockingIOError:
            return False

    return stopped


def _answered(argv: list[str] | None, stopped: Callable[[], bool]) -> tuple[str, int]:
    """What a command answers, and its exit status."""
    out, wants_json = io.StringIO(), False
    try:
        with redirect_stdout(out):
            arguments = _parser().parse_args(argv)
            wants_json = getattr(arguments, "json", False)
            document, status = _COMMANDS[arguments.command](arguments, _root(arguments))
        if document is None:
            return out.getvalue(), status
        sys.stderr.write(out.getvalue())  # not ours: a task's module may print
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n", status
    except SystemExit:  # --help
        return out.getvalue(), 0
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or stopped():
            print("stopped; what was finished is kept, the same command goes on from there", file=sys.stderr)
            return "", 130
        return _failed(error, wants_json)


def _failed(error: Exception, wants_json: bool) -> tuple[str, int]:
    """What is said of a failure: expected ones by their problems, others in one line."""
    if isinstance(error, SandhiError):
        problems = error.problems if isinstance(error, PreflightError) else [error.problem]
        for problem in problems:
            print(problem.line(), file=sys.stderr)
        found = {"ok": False, "problems": [p.model_dump(mode="json") for p in problems]}
        text = json.dumps(found, indent=2, sort_keys=True) + "\n" if wants_json else ""
        return text, 2 if isinstance(error, UsageError) else 1
    if isinstance(error, OSError):
        print(f"error: {error.strerror or error}: {error.filename or 'no file named'}", file=sys.stderr)
        return "", 1
    # A defect of ours: still one line, and where to find the rest.
    if os.environ.get("SANDHI_DEBUG"):
        raise error
    print(f"unexpected {type(error).__name__}: {error} (set SANDHI_DEBUG=1 to see where)", file=sys.stderr)
    return "", 1


def _root(arguments: argparse.Namespace) -> Path:
    given = getattr(arguments, "root", None)
    try:
        return (given or default_root()).expanduser().resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(f"--root {str(given)!r} is no usable path: {error}", remedy="name a directory") from None


def _deliver(text: str, status: int, answer: int | None) -> int:
    """Write the answer; a reader that has gone away or a full disk is an exit status, not a traceback."""
    try:
        if answer is None:
            sys.stdout.write(text)
        else:
            data = memoryview(text.encode())
            while data:
                data = data[os.write(answer, data) :]
        return status
    except BrokenPipeError:
        return status or 1
    except OSError as error:
        print(f"error: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return 1


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
    return (document if arguments.json else None), (0 if document.get("ok", True) else 1)


def _verify(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from sandhi_core.report.text import print_verify
    from sandhi_core.sharing import verify

    document, sound = verify(arguments.export.expanduser().resolve(), memory=arguments.memory)
    if not arguments.json:
        print_verify(document)
    return (document if arguments.json else None), (0 if sound else 1)


def _report(arguments: argparse.Namespace, root: Path) -> tuple[Any, int]:
    from pipelines.reporting import report

    paths = report(arguments.pool, root)
    if not arguments.json:
        print(*paths, sep="\n")
    return ({"reports": [str(path) for path in paths]} if arguments.json else None), 0


_COMMANDS = {"schema": _schema, "check": _check, "build": _build, "verify": _verify, "report": _report}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
