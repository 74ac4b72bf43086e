"""Tables and pictures of a pool: what was saved, at what quality, and how it came about."""

from sandhi_core.report.data import ReportData
from sandhi_core.report.html import write_report

__all__ = ["ReportData", "write_report"]
