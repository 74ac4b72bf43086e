"""The commands `serve` and `render`, and `verify` where there is no checkout: they need the wheel alone.

Standard output carries the answer (with --json, one JSON document); progress and problems go to standard error.
"""

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from sandhi_core.answering import ENDINGS, failure
from sandhi_core.errors import UsageError
from sandhi_core.verification.arguments import add_arguments

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": (
        "start the servers of an export, and stop them at Ctrl-C",
        "sandhi serve .sandhi/exports/demo/4f0c... --python .venv-vllm/bin/python\n"
        "  sandhi serve EXPORT --only chemist roman --port-base 9000 -- --enforce-eager\n"
        "  sandhi serve EXPORT --engine transformers --proxy .venv-litellm/bin/python",
    ),
    "render": (
        "write an export's servers for Docker Compose, Kubernetes or LiteLLM",
        "sandhi render EXPORT --to compose --image registry.example/vllm-sandhi:1 --out deploy/\n"
        "  sandhi render EXPORT --to kubernetes --claim models --path exports/demo/4f0c... --out deploy/\n"
        "  sandhi render EXPORT --to litellm --host 127.0.0.1 --out deploy/",
    ),
}
_VERIFY = ("hold an export to its manifest and deployment", "sandhi verify .sandhi/exports/demo/4f0c... --json")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """Of the command as the wheel alone has it."""
    top = _Parser(
        prog="sandhi",
        description="Serve many fine-tuned language models from shared weights.",
        epilog="check, build, report and schema need a checkout of the repository",
    )
    top.add_argument("--version", action="version", version=f"sandhi {version('sandhi')}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, (text, example) in (COMMANDS | {"verify": _VERIFY}).items():
        added = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"examples:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _ADD[name](added)
        added.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit status. Expected failures print one line each, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cut = argv.index("--") if "--" in argv else len(argv)
    given, extra = list(argv[:cut]), list(argv[cut + 1 :])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        arguments = parser().parse_args(given)
        if extra and arguments.command != "serve":
            raise UsageError("arguments after -- are for engines", remedy=f"leave -- {extra[0]} ... out")
        arguments.extra = extra
        return _RUN[arguments.command](arguments)
    except SystemExit as ended:  # --help, --version
        return int(ended.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        problems, status = failure(error, stopped=False, after="nothing is left running")
        for problem in problems:
            print(problem.line(), file=sys.stderr)
        if "--json" in given and not _answered:
            _answer({"ok": False, "problems": [problem.model_dump(mode="json") for problem in problems]})
        return status


_answered: list[bool] = []  # whether there is a document on standard output already


def _answer(document: Any) -> None:
    _answered.append(True)
    print(json.dumps(document, indent=2, sort_keys=True, allow_nan=False), flush=True)


# --- serve --------------------------------------------------------------------------------------------------


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("export", type=Path, help="directory that holds sandhi.json and deployment.json")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help="these models alone")
    parser.add_argument("--engine", choices=["vllm", "transformers"], help="another engine than the deployment's")
    parser.add_argument("--port-base", type=int, metavar="N", help="port of the first server; the others follow (8000)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.usage = "sandhi serve [-h] EXPORT [OPTION ...] [-- ENGINE_ARGUMENT ...]"
    parser.add_argument("--python", default="", help="of the engine (default: for vLLM SANDHI_VLLM_PYTHON; or this)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="what engines compute on (default: a GPU if any)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument(
        "--proxy",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="put LiteLLM's proxy, of that Python's environment (default: the engine's), before all servers",
    )
    parser.add_argument("--proxy-port", type=int, default=4000, metavar="N", help="the proxy's port (4000)")
    parser.add_argument(
        "--ready-timeout", type=_seconds, default=900.0, metavar="SECONDS", help="for each server to be ready (900)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; start nothing")


def _serve(arguments: argparse.Namespace) -> int:
    from sandhi_core.serving import fleet, told
    from sandhi_core.serving.engines import python_of
    from sandhi_core.serving.gpu import device_of
    from sandhi_core.serving.members import members, opened

    for word in arguments.extra:
        if remedy := _OURS.get(word.partition("=")[0]):
            raise UsageError(f"{word} after -- would move a server from where it is waited for", remedy=remedy)
    deployed = opened(arguments.export.expanduser())
    python = python_of(arguments.engine or deployed.spec.engine, arguments.python)
    chosen = members(
        deployed,
        engine=arguments.engine,
        only=arguments.only,
        port_base=arguments.port_base,
        device=arguments.device or device_of(python),
        extra=arguments.extra,
    )
    settings = fleet.Settings(
        python=python,
        host=arguments.host,
        proxy=None if arguments.proxy is None else _python(arguments.proxy or python),
        proxy_port=arguments.proxy_port,
        ready_timeout=arguments.ready_timeout,
        logs=arguments.logs,
    )
    if arguments.dry_run:
        document = fleet.commands(deployed, chosen, settings)
        _answer(document) if arguments.json else print(told.planned(document), end="")
        return 0
    ready = False
    try:
        with fleet.running(deployed, chosen, settings, _say) as running:
            document = running.document()
            _answer(document) if arguments.json else print(told.served(document), end="", flush=True)
            ready = True
            fleet.watch(running)
    except KeyboardInterrupt:
        if not ready:
            raise
        _say("stopped")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_OURS = {
    "--port": "give the first server's port by --port-base, before --",
    "--host": "give --host before --",
    "--model": "choose models by --only, before --",
    "--served-model-name": "leave it out: a server answers by its model's name",
}
"""Arguments of engines that are not the operator's to give, and what is."""


def _seconds(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{given} is no number of seconds")
    return value


def _python(given: str) -> str:
    """Servers run in another directory: the path of a program is made absolute, and links stay: a virtual environment
    is found by them. Raises UsageError where there is none."""
    found = shutil.which(Path(given).expanduser())
    if found is None:
        raise UsageError(f"{given!r} is no program", remedy="give the path of a Python interpreter")
    return str(Path(found).absolute())


# --- render -------------------------------------------------------------------------------------------------


def _add_render(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument("--to", choices=["compose", "kubernetes", "litellm"], required=True, help="what to write")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write it; made if need be")
    parser.add_argument("--image", help="image with the engine, and this package for shared tensors (sandhi-vllm)")
    parser.add_argument("--path", help="of the export on the machine or node (default: where it lies), or in the claim")
    parser.add_argument("--claim", help="Kubernetes: claim of the volume that holds the export (default: hostPath)")
    parser.add_argument("--host", help="LiteLLM: where all servers listen (default: each at its own name)")


def _render(arguments: argparse.Namespace) -> int:
    from sandhi_core.serving.members import members, opened
    from sandhi_core.serving.render.containers import Target
    from sandhi_core.serving.render.writing import write

    for option, to in (("claim", "kubernetes"), ("host", "litellm")):
        if getattr(arguments, option) and arguments.to != to:
            raise UsageError(f"--{option} is for --to {to}", remedy=f"leave --{option} out")
    deployed = opened(arguments.export.expanduser())
    chosen = members(deployed, engine=arguments.engine, only=arguments.only, port_base=arguments.port_base)
    target = Target.of(arguments.image, arguments.path, arguments.claim, arguments.host)
    path = write(arguments.to, deployed, chosen, target, arguments.out.expanduser())
    if arguments.json:
        _answer({"ok": True, "problems": [], "export": str(deployed.root), "written": [str(path)]})
    else:
        print(path)
    return 0


# --- verify -------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from sandhi_core.verification.exports import verify_all
    from sandhi_core.verification.told import tell

    document, tables = verify_all(arguments)
    if arguments.json:
        _answer(document)
    else:
        for table in tables:
            tell(table)
    return 0 if document["ok"] else 1


_ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "serve": _add_serve,
    "render": _add_render,
    "verify": add_arguments,
}
_RUN: dict[str, Callable[[argparse.Namespace], int]] = {"serve": _serve, "render": _render, "verify": _verify}
