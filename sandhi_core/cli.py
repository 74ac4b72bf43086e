"""The `sandhi` command, as a table of commands. Those here need the wheel alone; a checkout adds its own (__main__.py).

Standard output carries the answer (with --json, one JSON document); progress and problems go to standard error.
Exit status: 0 sound, 1 something is wrong with the models or the result, 2 the command or pool file is wrong, 130
stopped by Ctrl-C or SIGTERM.
"""

import argparse
import faulthandler
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from sandhi_core.answering import ENDINGS, GOES_ON, Answer, UndeliveredError, failure, signal_noted, write_all
from sandhi_core.errors import UsageError
from sandhi_core.verification.arguments import add_arguments

OF_CHECKOUTS = ("check", "build", "report", "gc", "schema")
"""Commands that only a checkout has."""


@dataclass(frozen=True)
class Command:
    """`add` adds arguments, all but --json; `run` answers, and returns the exit status; what it needs it imports then:
    `sandhi --help` should not wait for torch. `after`: how things are left where it fails or is stopped."""

    help: str
    examples: tuple[str, ...]
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Answer], int]
    after: str = GOES_ON


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None, commands: Mapping[str, Command]) -> int:
    """Run one of `commands`, by default as the process was asked to; returns its exit status. Expected failures print
    one line each, never a traceback."""
    if argv is not None:
        answering = partial(Answer, sys.stdout.write)
        with redirect_stdout(sys.stderr):
            return _run(argv, commands, answering, lambda: False)
    faulthandler.enable()  # a mapped file that another process cuts short ends this one: then it says where
    given = os.dup(1)
    # Standard output is for the answer alone: what libraries and task modules print goes to standard error.
    os.dup2(2, 1)
    try:
        answering = partial(Answer, partial(write_all, given), terminal=os.isatty(given))
        return _run(sys.argv[1:], commands, answering, signal_noted())
    finally:
        sys.stdout.flush()
        os.close(given)


def _run(
    argv: Sequence[str],
    commands: Mapping[str, Command],
    answering: Callable[[bool], Answer],
    stopped: Callable[[], bool],
) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    given, extra = list(argv[:cut]), list(argv[cut + 1 :])
    answer = answering("--json" in given)
    named = commands.get(given[0]) if given else None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)  # one that came while modules were imported lands here
        arguments = _parsed(given, extra, commands, answer)
        return 0 if arguments is None else commands[arguments.command].run(arguments, answer)
    except UndeliveredError as error:
        print(error, end="\n" if error.args else "", file=sys.stderr)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        problems, status = failure(error, stopped(), named.after if named else GOES_ON)
        for problem in problems:
            print(problem.line(), file=sys.stderr)
        with suppress(UndeliveredError):
            answer.refuse(problems)
        return status


def _parsed(
    given: Sequence[str], extra: Sequence[str], commands: Mapping[str, Command], answer: Answer
) -> argparse.Namespace | None:
    """None where help or the version was asked for, which is answered then. Raises UsageError."""
    if given and given[0] in OF_CHECKOUTS and given[0] not in commands:
        remedy = "pip install -e '.[pipeline]' in one; the wheel alone serves, renders and verifies"
        raise UsageError(f"{given[0]} needs a checkout of the repository", remedy=remedy)
    page = io.StringIO()
    try:
        with redirect_stdout(page):
            arguments = _parser(commands).parse_args(given)
    except SystemExit:  # --help, --version
        answer.text(page.getvalue())
        return None
    if extra and arguments.command != "serve":
        raise UsageError("arguments after -- are for engines", remedy=f"leave -- {extra[0]} ... out")
    arguments.extra = extra
    return arguments


def _parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    top = _Parser(prog="sandhi", description="Serve many fine-tuned language models from shared weights.")
    if missing := [name for name in OF_CHECKOUTS if name not in commands]:
        top.epilog = f"{', '.join(missing)} need a checkout of the repository"
    top.add_argument("--version", action="version", version=_versions())
    listed = top.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, command in commands.items():
        first, *more = command.examples
        added = listed.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog="\n  ".join(["examples:", first, *more]) if more else f"example: {first}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(added)
        added.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return top


def _versions() -> str:
    """This package and those that decide the bytes it writes, as installed; none of them is imported."""
    beside = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
    return f"sandhi {version('sandhi')} ({beside})"


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


def _serve(arguments: argparse.Namespace, answer: Answer) -> int:
    from sandhi_core.serving import fleet, told
    from sandhi_core.serving.engines import python_of
    from sandhi_core.serving.gpu import device_of
    from sandhi_core.serving.members import members, needed, opened

    for word in arguments.extra:
        if remedy := _OURS.get(word.partition("=")[0]):
            raise UsageError(f"{word} after -- would move a server from where it is waited for", remedy=remedy)
    deployed = opened(arguments.export.expanduser())
    python = python_of(needed(deployed, arguments.engine, arguments.only), arguments.python)
    chosen = members(
        deployed,
        engine=arguments.engine,
        only=arguments.only,
        port_base=arguments.port_base,
        device=arguments.device or device_of(python),
        extra=arguments.extra,
        environment=os.environ,
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
        answer(document, lambda: print(told.planned(document), end=""))
        return 0
    try:
        with fleet.running(deployed, chosen, settings, _say) as running:
            document = running.document()
            answer(document, lambda: print(told.served(document), end=""))
            fleet.watch(running)
    except KeyboardInterrupt:
        if not answer.given:
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


def _render(arguments: argparse.Namespace, answer: Answer) -> int:
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
    document = {"ok": True, "problems": [], "export": str(deployed.root), "written": [str(path)]}
    answer(document, lambda: print(path))
    return 0


# --- verify -------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace, answer: Answer) -> int:
    from sandhi_core.verification.exports import verify_all
    from sandhi_core.verification.told import tell

    document, tables = verify_all(arguments)

    def show() -> None:
        for table in tables:
            tell(table)

    answer(document, show)
    return 0 if document["ok"] else 1


_LEFT = "nothing is left running"
COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "start the servers of an export, and stop them at Ctrl-C",
        (
            "sandhi serve .sandhi/exports/demo/4f0c... --python .venv-vllm/bin/python",
            "sandhi serve EXPORT --only chemist roman --port-base 9000 -- --enforce-eager",
            "sandhi serve EXPORT --engine transformers --proxy .venv-litellm/bin/python",
        ),
        _add_serve,
        _serve,
        _LEFT,
    ),
    "render": Command(
        "write an export's servers for Docker Compose, Kubernetes or LiteLLM",
        (
            "sandhi render EXPORT --to compose --image registry.example/vllm-sandhi:1 --out deploy/",
            "sandhi render EXPORT --to kubernetes --claim models --path exports/demo/4f0c... --out deploy/",
            "sandhi render EXPORT --to litellm --host 127.0.0.1 --out deploy/",
        ),
        _add_render,
        _render,
        _LEFT,
    ),
    "verify": Command(
        "hold exports to their manifests and deployments, and measure the servers that serve them",
        ("sandhi verify .sandhi/exports/demo/4f0c... --engine transformers",),
        add_arguments,
        _verify,
        _LEFT,
    ),
}
