"""Shared tensors of an export in the memory of a GPU once: a process that owns them, engines that map them."""
