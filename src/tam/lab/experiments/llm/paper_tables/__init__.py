"""AdaTAMW compared with AdamW over many datasets, as the paper does on MTEB, and what it says of that.

rows = comparison.read_rows(comparison.MTEB)  # the paper's six tables, or rows of one's own
print(page.text(rows))
"""
