"""Characters beyond ASCII that are written instead of ASCII characters.

Unicode's form NFKC would go too far: it turns ``10³`` into ``103``, ``5₂`` into ``52`` and ``①`` into ``1``.
"""

import unicodedata

_WRITTEN_FOR = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(
    map(ord, "−﹣"), "-"
)
"""Full-width forms, the minus sign U+2212 and the small hyphen-minus U+FE63 → the character of ASCII."""


def with_ascii_numbers(text: str) -> str:
    """Return the text with decimal digits of all scripts, full-width forms and minus signs as characters of ASCII."""
    if text.isascii():
        return text
    text = text.translate(_WRITTEN_FOR)
    return "".join(str(unicodedata.decimal(character, character)) for character in text)
