"""Reading a pool file as strict YAML that remembers its lines, before anyone asks what the values mean.

The YAML has the types of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `no` is a word, `1e-2` is
a number, `010` is text, and neither dates nor merge keys exist. PyYAML alone takes the last of two equal keys
in silence; here that is a mistake.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sandhi_core.errors import PoolError
from sandhi_core.pools.problems import LOOK_UP, Loc, Mistake, pool_error, shown, shown_path, shown_text
from sandhi_core.pools.syntax import syntax_mistake

LARGEST = 1 << 20
"""Bytes of a pool file: thousands of models. What takes PyYAML minutes is refused at once."""


class _Loader(yaml.SafeLoader):
    """Knows text, numbers, booleans, null, lists and mappings; anything else is an error with its line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[Mistake] = []

    def text(self, node: yaml.Node) -> str:
        return str(self._of_kind(node, yaml.ScalarNode))

    def sequence(self, node: yaml.Node) -> list[Any]:
        return [self.construct_object(item, deep=True) for item in self._of_kind(node, yaml.SequenceNode)]

    def mapping(self, node: yaml.Node) -> dict[str, Any]:
        """Keys must be text, each once; further ones are noted and the first is kept."""
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in self._of_kind(node, yaml.MappingNode):
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                self.repeated.append(Mistake(line, "a key must be text", "put quotes around it"))
            elif key in result:
                first = lines[key]
                where = "in this line" if first == line else f"the first is on line {first}"
                self.repeated.append(Mistake(line, f"{shown(key)} is given twice; {where}", "remove one of them"))
            else:
                lines[key] = line
                result[key] = self.construct_object(value_node, deep=True)
        return result

    def scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.rpartition(":")[2]
        pattern, convert = _SCALARS[kind]
        text = self.text(node)
        if not pattern.fullmatch(text):
            raise _construction_error(f"{shown(text)} is no {kind}", node)
        return convert(text)

    def _of_kind(self, node: yaml.Node, kind: type[yaml.Node]) -> Any:
        """The node's value; an explicit tag can claim a kind that it is not."""
        if isinstance(node, kind):
            return node.value
        raise _construction_error(f"this is no {shown(node.tag)}", node)


def _construction_error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (re.compile(r"[-+]?(0|[1-9][0-9]*)"), int),
    "float": (
        re.compile(
            r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
_CONSTRUCTORS: dict[str | None, Any] = {
    **{_TAG + kind: _Loader.scalar for kind in _SCALARS},
    _TAG + "str": _Loader.text,
    _TAG + "seq": _Loader.sequence,
    _TAG + "map": _Loader.mapping,
    None: _Loader.construct_undefined,
}
# In place of the parent's, which are YAML 1.1's.
_Loader.yaml_constructors = _CONSTRUCTORS
_Loader.yaml_implicit_resolvers = {
    None: [(_TAG + kind, re.compile(rf"(?:{pattern.pattern})\Z")) for kind, (pattern, _) in _SCALARS.items()]
}


class Document(NamedTuple):
    """A parsed pool file: its top mapping, its nodes, and keys that were unusable or given twice."""

    data: dict[str, Any]
    root: yaml.MappingNode
    repeated: list[Mistake]

    def line(self, loc: Loc) -> int:
        """The line of the value at `loc`, or of the nearest thing around it that is in the file."""
        node: yaml.Node = self.root
        line = node.start_mark.line
        for part in loc:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            elif isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == part]
                if not found:
                    break
                key, node = found[0]
                line = key.start_mark.line
            else:
                break
        return line + 1


def read_document(path: Path) -> Document:
    """Parse the pool file. Raises PoolError with `path:line` where it cannot be read as one YAML mapping."""
    text = _text(path)
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            return Document(loader.construct_document(root), root, loader.repeated)
        line = 1 if root is None else root.start_mark.line + 1
        found = "is empty" if root is None else "holds no mapping of fields to values"
        mistake = Mistake(line, found, "write a field a line, such as `name: mine`; README.md shows a whole pool")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        mistake = Mistake(line, f"character U+{error.character:04X} is not allowed", "remove it")
    except yaml.MarkedYAMLError as error:
        mistake = syntax_mistake(error, text)
    except RecursionError:
        mistake = Mistake(1, "lists and mappings are nested too deeply", LOOK_UP)
    except (ValueError, OverflowError) as error:  # PyYAML's own, from escapes and overlong numbers
        line = loader.line + 1 if loader else 1
        mistake = Mistake(line, f"cannot be read: {shown_text(str(error))}", "correct the value")
    raise pool_error(path, [mistake])


def _text(path: Path) -> str:
    try:
        with path.open("rb") as f:
            raw = f.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise PoolError(
            f"the pool file cannot be read: {reason}", remedy="check the path", file=shown_path(path)
        ) from None
    if len(raw) > LARGEST:
        found = Mistake(
            1, f"has more than {LARGEST >> 20} MiB", "give the pool file, which names models and holds none"
        )
        raise pool_error(path, [found])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise pool_error(path, [Mistake(line, "is not UTF-8 text", "save the file as UTF-8")]) from None
