import os
import stat
from pathlib import Path

import pytest

from sandhi_core.serving.census import tell, told


def test_what_a_worker_tells_is_for_its_user_alone_and_told_once(tmp_path: Path) -> None:
    assert told(tmp_path) == {}
    tell(tmp_path, 7)
    assert told(tmp_path) == {os.getpid(): 7}
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        tell(tmp_path, 8)
