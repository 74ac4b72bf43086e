"""Settings of all tests."""

from sandhi_core.offline import work_offline

work_offline()

from hypothesis import settings  # noqa: E402

settings.register_profile("sandhi", deadline=None)  # correctness tests never depend on time
settings.load_profile("sandhi")
