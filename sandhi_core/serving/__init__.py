"""Processes that hold models in memory."""
