"""Imports between the packages of sandhi_core go one way."""

import ast
from pathlib import Path

import sandhi_core

ROOT = Path(sandhi_core.__file__).parent
ABOVE = {
    "rungs": {"evaluation", "serving", "offers", "verification", "report"},
    "serving": {"evaluation", "verification", "report", "sharing"},
    "evaluation": {"offers", "verification", "report"},
}
"""By package, what it knows nothing of."""


def imported(file: Path) -> set[str]:
    """Parts of sandhi_core that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.split(".")[1] for name in names if name.startswith("sandhi_core.")}


def test_no_package_knows_what_is_above_it() -> None:
    for package, above in ABOVE.items():
        for file in (ROOT / package).rglob("*.py"):
            if file.name != "cli.py":  # a command line knows everything
                assert not imported(file) & above, file
    assert "memory" not in imported(ROOT / "claims.py")
