"""How fast Sandhi is, measured beside the ways it replaces."""

import os

from sandhi_core.offline import work_offline

work_offline()
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the Makefile; every way is measured under it
