"""A pool's servers for tools that run or route them: what `sandhi render` writes. Pure: the same bytes every time."""
