"""Parts that all HTML pages share: one style sheet, safe elements, plots. A page is one file that needs no other."""
