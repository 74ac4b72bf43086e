"""What a checkout adds to the `sandhi` command (sandhi_core/cli.py): check, build, report, gc and schema."""

import argparse
import sys
from pathlib import Path

from pipelines.scratch import scratch_within
from pipelines.settings import default_root
from sandhi_core.answering import Answer
from sandhi_core.cli import Command
from sandhi_core.errors import UsageError


def _add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, help="pool file (YAML)")
    _add_root(parser)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=Path, default=None, help="artifact root (default: SANDHI_HOME, or .sandhi in the checkout)"
    )


def _root(arguments: argparse.Namespace) -> Path:
    given = arguments.root
    try:
        root: Path = (given or default_root()).expanduser().resolve()
        return root
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(f"--root {str(given)!r} is no usable path: {error}", remedy="name a directory") from None


def _add_headers_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headers-only",
        action="store_true",
        help="read no weights, which takes hours where there are terabytes: not whether they are damaged or NaN",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser)
    _add_headers_only(parser)


def _check(arguments: argparse.Namespace, answer: Answer) -> int:
    root = _root(arguments)
    with scratch_within(root):
        from pipelines.checking import check
        from sandhi_core.report.text import print_check

        document = check(arguments.pool, root, headers_only=arguments.headers_only)
    answer(document, lambda: print_check(document))
    return 0 if document["ok"] else 1


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what is stale and what it costs; run nothing")
    parser.add_argument("--regroup", action="store_true", help="form the groups anew, as the nightly rebuild does")
    _add_headers_only(parser)


def _build(arguments: argparse.Namespace, answer: Answer) -> int:
    file, root, regroup = arguments.pool, _root(arguments), arguments.regroup
    if arguments.headers_only and not arguments.dry_run:
        raise UsageError("a build reads the weights", remedy="give --headers-only with --dry-run, or to check")
    with scratch_within(root):
        from pipelines.building import build_pool, dry_run
        from sandhi_core.report.text import print_build, print_dry_run

        if arguments.dry_run:
            document = dry_run(file, root, regroup=regroup, headers_only=arguments.headers_only)
        else:
            document = build_pool(file, root, regroup=regroup)
    answer(document, lambda: (print_dry_run if arguments.dry_run else print_build)(document))
    return 0 if document["ok"] else 1


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, help="pool file (YAML), or a directory of them")
    _add_root(parser)


def _report(arguments: argparse.Namespace, answer: Answer) -> int:
    root = _root(arguments)
    with scratch_within(root):
        from pipelines.reporting import report

        paths, problems = report(arguments.pool, root)
    for problem in problems:
        print(problem.line(), file=sys.stderr)
    found = [p.model_dump(mode="json") for p in problems]
    document = {"ok": not problems, "problems": found, "reports": [str(path) for path in paths]}
    answer(document, lambda: print("".join(f"{path}\n" for path in paths), end=""))
    return 0 if document["ok"] else 1


def _add_gc(parser: argparse.ArgumentParser) -> None:
    _add_report(parser)
    parser.add_argument("--keep", type=_number, default=1, metavar="N", help="earlier exports of each pool to keep (1)")
    parser.add_argument("--gone", action="store_true", help="pools of the root that are not given here are no more")
    parser.add_argument("--apply", action="store_true", help="remove it; otherwise it is only told")


def _number(given: str) -> int:
    if not given.isdecimal():
        raise argparse.ArgumentTypeError(f"{given!r} is no number of exports")
    return int(given)


def _gc(arguments: argparse.Namespace, answer: Answer) -> int:
    from pipelines.collecting import collect
    from sandhi_core.report.text import print_garbage

    document = collect(
        arguments.pool, _root(arguments), keep=arguments.keep, gone=arguments.gone, apply=arguments.apply
    )
    answer(document, lambda: print_garbage(document))
    return 0


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """`schema` takes no arguments."""


def _schema(arguments: argparse.Namespace, answer: Answer) -> int:
    from sandhi_core.pools.pool import json_schema

    answer.document(json_schema())
    return 0


COMMANDS: dict[str, Command] = {
    "check": Command(
        "say what is wrong with a pool and what building it would cost",
        ("sandhi check pools/demo.yaml",),
        _add_check,
        _check,
    ),
    "build": Command(
        "run every stage that is stale, as the Dagster jobs do",
        ("sandhi build pools/demo.yaml --dry-run",),
        _add_build,
        _build,
    ),
    "report": Command(
        "write the report of a pool that was built", ("sandhi report pools/demo.yaml",), _add_report, _report
    ),
    "gc": Command(
        "say, and with --apply remove, what no pool and no deployment needs",
        ("sandhi gc pools/", "sandhi gc pools/ --keep 2 --apply"),
        _add_gc,
        _gc,
    ),
    "schema": Command(
        "print the JSON schema of pool files", ("sandhi schema > pool.schema.json",), _add_nothing, _schema
    ),
}
