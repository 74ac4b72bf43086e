"""Settings of all tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from hypothesis import settings

settings.register_profile("sandhi", deadline=None)  # correctness tests never depend on time
settings.load_profile("sandhi")
