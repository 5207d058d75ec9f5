"""Damage to text: UTF-8 read as something else (mojibake), control characters, and U+FFFD where a character was lost."""

import re

_SUSPECT = re.compile(r"[^\x09\x0a\x0c\x0d\x20-\x7e]")
LOST = "\ufffd"


def repaired(text: str) -> str:
    """The text with mojibake decoded and control characters taken out, by ftfy; nothing else is changed, and text that is whole stays as it is.

    >>> repaired("itâ€™s 5\\x00 €"), repaired("naïve “café” ½")
    ('it’s 5 €', 'naïve “café” ½')
    """
    if not _SUSPECT.search(text):
        return text
    import ftfy

    return ftfy.fix_text(
        text,
        ftfy.TextFixerConfig(
            unescape_html=False,
            remove_terminal_escapes=False,
            fix_latin_ligatures=False,
            fix_character_width=False,
            uncurl_quotes=False,
            fix_line_breaks=False,
            fix_surrogates=False,
            normalization=None,
            explain=False,
        ),
    )


def damage(text: str) -> str | None:
    """What is wrong with a text, in words; None where nothing is."""
    if LOST in text:
        return "U+FFFD in place of a lost character"
    return None if repaired(text) == text else "mojibake or control characters"
