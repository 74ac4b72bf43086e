"""Why a pool file is no YAML, in words for whoever wrote it.

A parser stops where it can no longer go on, which is often a line after the mistake: the line named here is the
one to look at.
"""

import re

import yaml

from sandhi_core.pools.problems import Mistake, shown, shown_text

_QUOTE = "put quotes around a value that holds such characters"
_INDENT = "give all fields of one mapping, and all items of one list, the same number of spaces"
_REMEDIES = {
    "undefined alias": "put quotes around a value that begins with *",
    "constructor for the tag": "put quotes around a value that begins with !",
    "unknown escape": "use single quotes around a value that holds a backslash",
    "chomping": "put quotes around a value that begins with | or >",
}
_DASH = re.compile(r"\s*-[^\s-]")
_FIELD = re.compile(r":(\s|$)")


def syntax_mistake(error: yaml.MarkedYAMLError, text: str) -> Mistake:
    """The line to look at, what is wrong there, and what to do."""
    lines = text.splitlines() or [""]
    at = min(_line(error.problem_mark or error.context_mark), len(lines) - 1)
    began = _line(error.context_mark) if error.context_mark else at
    problem, context = error.problem or "", error.context or ""
    if "'\\t'" in problem:
        return Mistake(at + 1, "a tab stands where YAML takes only spaces", "use spaces: tabs cannot indent YAML")
    if "cannot start any token" in problem:
        character = problem.removeprefix("found character ").removesuffix(" that cannot start any token")
        return Mistake(at + 1, f"a value cannot begin with {character}", _QUOTE)
    if problem.startswith("mapping values are not allowed"):
        return _misplaced_colon(lines, at, error.problem_mark.column if error.problem_mark else 0)
    if "could not find expected ':'" in problem:
        return _no_colon(began)
    if (
        context.startswith("while parsing a flow")
        and error.context_mark
        and not problem.startswith("expected the node")
    ):
        return _unclosed(error.context_mark, lines, at)
    if "quoted scalar" in context and "end of stream" in problem:
        return Mistake(began + 1, "the quotation mark that opens here is never closed", "close it, or remove it")
    if "found another document" in problem:
        return Mistake(at + 1, "another document begins here", "keep one pool in a file: remove the `---`")
    if problem.startswith(("expected <block end>", "expected '<document start>'")):
        return _out_of_line(problem, lines, at)
    if "stream end" in problem:
        return Mistake(at + 1, "the file ends in the middle of a list or mapping", "close every [ and {")
    message = " ".join(part for part in (context, problem) if part)
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in problem), "correct this line")
    return Mistake(at + 1, shown_text(message), remedy)


def _line(mark: yaml.Mark | None) -> int:
    return mark.line if mark else 0


def _no_colon(line: int) -> Mistake:
    return Mistake(line + 1, "no colon with a space after it follows the field's name", "write `field: value`")


def _misplaced_colon(lines: list[str], at: int, column: int) -> Mistake:
    """A `field:` where a text goes on: the text may have begun on the line before."""
    before = _before(lines, at)
    for line in (before, at):
        if _DASH.match(lines[line]):
            return Mistake(line + 1, "no space follows the dash", "write `- item`")
    if before != at and not _FIELD.search(_uncommented(lines[before])):
        return _no_colon(before)
    if _FIELD.search(lines[at][:column]):
        return Mistake(at + 1, "a second colon stands in the line", "put quotes around a value that holds `: `")
    return Mistake(at + 1, "is indented as part of the line before, which has a value already", _INDENT)


def _before(lines: list[str], at: int) -> int:
    """The last line before `at` that holds more than a comment; `at` where there is none."""
    return next((n for n in range(at - 1, -1, -1) if _uncommented(lines[n])), at)


def _uncommented(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line).strip()


def _unclosed(opened: yaml.Mark, lines: list[str], at: int) -> Mistake:
    """The line of the bracket, unless it goes on over several lines that may each have the mistake."""
    line = min(opened.line, len(lines) - 1)
    bracket = lines[line][opened.column : opened.column + 1]
    closing = "]" if bracket == "[" else "}"
    where = "" if at == line else f" or line {at + 1}"
    return Mistake(
        line + 1,
        f"the {shown(bracket)} that opens here is not closed, or a comma is missing on this line{where}",
        f"close it with {shown(closing)}, and put a comma between two entries",
    )


def _out_of_line(problem: str, lines: list[str], at: int) -> Mistake:
    found = problem.rpartition("found ")[2].strip("'")
    if found in ("}", "]"):
        return Mistake(at + 1, f"a {shown(found)} too many", "remove it")
    if found == "<scalar>":
        return Mistake(at + 1, "text follows a value that is complete", "put quotes around the whole of it")
    before = _before(lines, at)
    if "<document start>" in problem and before != at and not _FIELD.search(_uncommented(lines[before])):
        return _no_colon(before)
    return Mistake(at + 1, "is indented differently from what it belongs to", _INDENT)
