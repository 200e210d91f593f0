"""AdaTAMW against AdamW over many datasets, as the paper compares them on MTEB, and what it says of that.

rows = read(MTEB)  # the paper's six tables, or rows of one's own
print(text(rows))
"""

from tam.lab.comparison.page import figures, html, text, write
from tam.lab.comparison.said import claims
from tam.lab.comparison.scores import BASELINE, KINDS, MTEB, OTHER, Row, read, shares, summary

__all__ = [
    "BASELINE", "KINDS", "MTEB", "OTHER", "Row", "claims", "figures", "html", "read", "shares", "summary",
    "text", "write",
]  # fmt: skip
