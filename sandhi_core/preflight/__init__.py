"""Everything that must hold before an hour of a GPU is spent on a pool."""
