"""`make ui`: the Dagster UI on the instance of the artifact root."""

import os
import sys
from pathlib import Path

from pipelines.instance import dagster_home
from pipelines.settings import CHECKOUT, Settings


def main() -> None:
    """Replace this process by `dagster dev` (stop it with Ctrl-C)."""
    dagster_home(Settings.from_environment().root)
    dagster = str(Path(sys.executable).with_name("dagster"))
    os.chdir(CHECKOUT)
    os.execv(dagster, [dagster, "dev", "--workspace", "workspace.yaml", *sys.argv[1:]])


if __name__ == "__main__":
    main()
