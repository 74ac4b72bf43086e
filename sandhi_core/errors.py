"""Everything that can go wrong on purpose, as one tree, so that a command line can catch it in one place.

Every error names the model, file and tensor it is about where there is one, and what to do. A `Problem` is the
same as a value: preflight gathers all of them before anything is raised.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from sandhi_core.codes import Code, severity


class Problem(BaseModel):
    """One finding of preflight. `code` is stable and meant for machines (codes.py has them all); `message` and `remedy`
    are for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: Code
    severity: Literal["error", "warning"]
    model: str | None = None
    file: str | None = None
    tensor: str | None = None
    message: str
    remedy: str

    @model_validator(mode="after")
    def _severity_of_the_code(self) -> "Problem":
        if severity(self.code) not in (self.severity, "either"):
            raise ValueError(f"{self.code} is no {self.severity}")
        return self

    def line(self) -> str:
        """In words. A base has no name but its place in the pool file, merging.bases[0]; models' names have no dot."""
        named = {"model": self.model, "file": self.file, "tensor": self.tensor}
        where = " ".join(v if k == "model" and "." in v else f"{k} {v}" for k, v in named.items() if v)
        return f"{self.severity}: {self.code}: {where + ': ' if where else ''}{self.message} ({self.remedy})"


class SandhiError(Exception):
    """Base of all expected failures; prints as one line: where, what, remedy. `problems` holds all findings, of which
    `problem` is the first."""

    code: str

    def __init__(
        self,
        message: str,
        *,
        remedy: str,
        model: str | None = None,
        file: str | None = None,
        tensor: str | None = None,
        code: str | None = None,
    ) -> None:
        self.problem = Problem(
            code=code or self.code,
            severity="error",
            model=model,
            file=file,
            tensor=tensor,
            message=message,
            remedy=remedy,
        )
        self.problems = [self.problem]
        super().__init__(self.problem.line())

    def amend(self, **changes: str) -> None:
        """Say `problem` otherwise, by its fields: for what passes an error on and knows more of where it happened."""
        amended = self.problem.model_copy(update=changes)
        self.problems = [amended if one is self.problem else one for one in self.problems]
        self.problem = amended
        self.args = (amended.line(),)


class UsageError(SandhiError):
    """The command was called wrongly, or the pool file cannot be read as a pool (exit status 2)."""

    code = "usage"


class PoolError(UsageError):
    """The pool file is not a valid pool definition; `file` carries `path:line` where there is a line."""

    code = "pool"


class CheckpointError(SandhiError):
    """A checkpoint directory is incomplete, ambiguous, unsupported, damaged, or changed while in use."""

    code = "checkpoint"


class TaskError(SandhiError):
    """A task cannot be built, has no such metric, or has too few questions."""

    code = "task"


class EvaluationError(SandhiError):
    """A score could not be computed or is not finite."""

    code = "evaluation"


@contextmanager
def of_model(model: str) -> Iterator[None]:
    """Whatever EvaluationError passes through here names a model: this one, where it named none."""
    try:
        yield
    except EvaluationError as error:
        found = error.problem
        if found.model is not None:
            raise
        raise EvaluationError(
            found.message, remedy=found.remedy, model=model, file=found.file, tensor=found.tensor
        ) from error


class MergeError(SandhiError):
    """A recipe cannot be applied: contributors differ from what was recorded, or the result is not finite."""

    code = "merge"


class StoreError(SandhiError):
    """The artifact root cannot be written or holds something other than what was recorded."""

    code = "store"


class ProofError(SandhiError):
    """Exported bytes are not the scored bytes, or are not shared as claimed."""

    code = "proof"


class ServingError(SandhiError):
    """An export cannot be served as asked, or a server cannot be started, has ended, or does not answer."""

    code = "serving"


class PreflightError(SandhiError):
    """Preflight found errors; carries all of them."""

    def __init__(self, problems: list[Problem]) -> None:
        errors = [p for p in problems if p.severity == "error"]
        first = errors[0]
        super().__init__(
            first.message if len(errors) == 1 else f"{len(errors)} problems; the first: {first.message}",
            remedy=first.remedy,
            model=first.model,
            file=first.file,
            tensor=first.tensor,
            code=first.code,
        )
        self.problems = problems


class PoolMistakesError(PreflightError, PoolError):
    """Everything wrong in the text of one pool file: a problem for each mistake, in the order of the file."""

    code = "pool"

    def __str__(self) -> str:
        return "\n".join(problem.line() for problem in self.problems)
