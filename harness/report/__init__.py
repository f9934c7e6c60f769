"""The report: one self-contained page, and the same figures ready to print. It reads only the store."""

from harness.report.study import ReportError
from harness.report.verdict_text import verdict_lines
from harness.report.write import write_report

__all__ = ["ReportError", "verdict_lines", "write_report"]
