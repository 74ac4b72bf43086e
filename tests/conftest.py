"""Settings of all tests, and the trained models that whole-line tests use."""

from sandhi_core.offline import work_offline

work_offline()

import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("sandhi", deadline=None)  # correctness tests never depend on time
settings.load_profile("sandhi")

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def trained() -> Path:
    """The fixture pool's folder (models/, tasks/): trained at the first run of the tests, then kept."""
    folder = CHECKOUT / ".sandhi-demo" / "fixture"
    folder.parent.mkdir(exist_ok=True)
    make = [sys.executable, "-m", "demo.make_pool", str(folder), "--size", "fixture"]
    subprocess.run(make, cwd=CHECKOUT, check=True, capture_output=True)
    return folder
