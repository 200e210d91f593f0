"""Reports: `build_report` makes a model from results, and the others render it."""

from tam.lab.report.render import WRITERS, render_html, render_json, render_markdown
from tam.lab.report.sections import build_report

__all__ = ["WRITERS", "build_report", "render_html", "render_json", "render_markdown"]
