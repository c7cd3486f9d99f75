"""Characters beyond ASCII that are written for those of ASCII.

A compatibility form of Unicode (NFKC) would go too far: it makes ``10³`` to ``103``, ``5₂`` to ``52`` and ``①`` to ``1``.
"""

import unicodedata

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MINUS = {ord(minus): "-" for minus in "−﹣"}
"""The minus sign U+2212 and the small hyphen-minus U+FE63; U+FF0D is among the full-width forms."""


def with_ascii_numbers(text: str) -> str:
    """Return the text with decimal digits of all scripts, full-width forms and minus signs as characters of ASCII."""
    if text.isascii():
        return text
    text = text.translate(_FULL_WIDTH | _MINUS)
    return "".join(str(unicodedata.decimal(character, character)) for character in text)
